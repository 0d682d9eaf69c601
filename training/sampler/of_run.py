"""The sampler of a training run, as any of the run's processes sees it: same address, same policy."""

from __future__ import annotations

from pathlib import Path

from aworld_runtime.bus.base import Bus
from aworld_runtime.errors import ConfigError
from aworld_runtime.names import EPISODES_QUEUE
from aworld_runtime.processes import RELEASE_S, free_port, until_port_is_free
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


async def port_of_run(folder: RunFolder, bus: Bus, *, patience_s: float = RELEASE_S) -> int:
    """The port for the run's sampler. A resumed run keeps its own while queued episodes name it.

    Raises:
        ConfigError: another program has that port.
    """
    config = folder.config
    if not folder.started:
        return config.sampler_port or free_port()
    port, host = folder.wiring.sampler_port, config.sampler_host
    if await until_port_is_free(port, host, patience_s=patience_s):
        return port
    waiting = await bus.backlog(EPISODES_QUEUE)
    if waiting or config.sampler_port:
        raise ConfigError(
            f"port {port} on {host} is the sampler's of this run ({waiting} queued episodes expect it there), and"
            " another program has it: end that program, then resume"
        )
    return free_port()
