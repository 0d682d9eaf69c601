"""The sampler of a training run, as any of the run's processes sees it: same address, same policy."""

from __future__ import annotations

from pathlib import Path

from aworld_runtime.training.run_folder import RunFolder, Wiring
from aworld_runtime.training.sampler import SamplerProcess, SamplerSettings, choose_sampler


def sampler_of_run(folder: RunFolder, wiring: Wiring) -> SamplerProcess:
    """Not started: the launcher starts it, the trainer publishes to it."""
    config = folder.config
    settings = SamplerSettings(
        host=config.sampler_host,
        port=wiring.sampler_port,
        max_model_len=config.sampler_max_len,
        max_batch=min(256, config.worker_num * config.slots),
        threads=config.sampler_threads,
    )
    kind, _ = choose_sampler(wiring.sampler, settings)
    return kind(
        Path(wiring.model), log=folder.log / "sampler.log", policy=config.policy, settings=settings
    )
