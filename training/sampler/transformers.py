"""The transformers sampler's launcher; the package transformers itself loads in its process only."""

from __future__ import annotations

import importlib.util
import os

from aworld_runtime.training.sampler.base import SamplerProcess, interpreter


class TransformersSampler(SamplerProcess):
    """Our own batching server: needs no more than the learner does."""

    kind = "transformers"

    def command(self) -> list[str]:
        """Options of `transformers_server`."""
        settings = self.settings
        options = {
            "--model": str(self.model),
            "--policy": self.policy,
            "--host": self.settings.host,
            "--port": str(self.port),
            "--dtype": settings.dtype,
            "--max-model-len": str(settings.max_model_len),
            "--max-batch": str(settings.max_batch),
            "--threads": str(settings.threads or len(os.sched_getaffinity(0))),
        }
        pairs = [word for option in options.items() for word in option]
        server = ["-P", "-m", "aworld_runtime.training.sampler.transformers_server"]
        return [interpreter(None), *server, *pairs, *settings.arguments]

    def environment(self) -> dict[str, str | None]:
        """Nothing is fetched: the model is a local folder."""
        return {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # OpenMP's threads spin while they wait for one another. Where they share their cores
            # with other processes that made a step twenty times slower.
            "OMP_WAIT_POLICY": "passive",
        }


def is_installed() -> bool:
    """Whether it can be started."""
    return all(
        importlib.util.find_spec(name) is not None
        for name in ("torch", "transformers", "starlette", "uvicorn")
    )
