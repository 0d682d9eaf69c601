"""The sampler for where vLLM can't be had: transformers in a process of its own, the same HTTP API.

Started by `transformers.py` as `python -m aworld_runtime.training.sampler.transformers_server`.
"""

from __future__ import annotations

import argparse
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from aworld_runtime.cli.log_lines import set_up_logging


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, before anything heavy is imported."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--policy", default="policy")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--threads", type=int)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until stopped."""
    options = parse(arguments)
    set_up_logging(usual_level="info")

    import torch
    import uvicorn

    from aworld_runtime.training.sampler.completions import build

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    app, batcher = build(
        options.model,
        policy=options.policy,
        dtype=getattr(torch, options.dtype),
        max_model_len=options.max_model_len,
        max_batch=options.max_batch,
    )
    thread = threading.Thread(target=_or_exit, args=(batcher.run,), name="batcher")
    thread.start()
    try:
        uvicorn.run(app, host=options.host, port=options.port, log_level="warning")
    finally:
        batcher.close()
        thread.join()


def _or_exit(run: Callable[[], None]) -> None:
    """Without its sampling thread the server would leave every request hanging: end it instead."""
    try:
        run()
    except BaseException:
        logging.getLogger(__name__).exception("sampling failed")
        os._exit(1)


if __name__ == "__main__":
    main()
