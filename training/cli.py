"""`aworld train`."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from aworld_runtime.cli.shared import import_from_here
from aworld_runtime.errors import ConfigError, TrainingError

DESCRIPTION = """\
Train the agents of a task by reinforcement learning: rollouts by worker processes over an event bus, sampled from
a real model, learned from by GRPO, and published back into the running sampler. Ends with a report."""
FLAGS = ("task", "worker_num", "steps", "seed", "sampler", "model", "bus", "store", "out")
EXAMPLES = """\
examples:
  aworld train                                    task calculator, 4 workers
  aworld train --task my_project.tasks:chess --worker_num 8 --steps 50
  aworld train --config run.yaml group_size=16 learner.lr=2e-5
  aworld train --resume runs/20260101-120000-abc  go on where it stopped
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--task",
        help="built-in task or module:attribute (default: the config file's, else calculator)",
    )
    parser.add_argument(
        "--worker_num", "--worker-num", type=int, help="worker processes (default 4)"
    )
    parser.add_argument("--steps", type=int, help="optimizer steps (default 20)")
    parser.add_argument("--seed", type=int, help="of tasks and sampling (default 0)")
    parser.add_argument("--sampler", help="auto, vllm or transformers (default auto)")
    parser.add_argument("--model", help="smollm2 or a model folder (default smollm2)")
    parser.add_argument("--bus", help="URL of a Redis or Valkey server (default: a private one)")
    parser.add_argument(
        "--store", help="sqlite:///… or mongodb://… (default sqlite:///.aworld/aworld.db)"
    )
    parser.add_argument("--out", help="folder of the run (default runs/RUN)")
    parser.add_argument("--config", type=Path, help="YAML file with the keys of TrainConfig")
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="go on with the run in this folder"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON, progress to stderr"
    )
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="any other key, such as learner.lr=1e-5"
    )


def train_command(arguments: argparse.Namespace) -> int:
    """Run `aworld train`; returns the exit code."""
    from aworld_runtime.training.config_file import load_config
    from aworld_runtime.training.train import resume_run, start_run

    given: dict[str, Any] = {
        key: value for key in FLAGS if (value := getattr(arguments, key)) is not None
    }
    import_from_here()
    out = sys.stderr if arguments.json else sys.stdout
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        if arguments.resume is None:
            settings = arguments.settings
            summary = start_run(
                load_config(file=arguments.config, settings=settings, given=given), out
            )
        elif given or arguments.settings or arguments.config:
            raise ConfigError("--resume takes its settings from the run's folder: give no others")
        else:
            summary = resume_run(arguments.resume, out)
    except TrainingError as error:
        print(f"aworld: training stopped: {error}", file=sys.stderr)
        return 1
    print(summary.model_dump_json(indent=2) if arguments.json else summary.text())
    return 0
