"""One training run as one call: `train(...)`, `aworld train`, `run_distributed_train.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from secrets import token_hex
from shlex import quote as quote_word
from typing import Any, TextIO
from urllib.parse import quote, urlsplit

import anyio
from anyio.to_thread import run_sync as run_sync_in_thread

from aworld_runtime.bus.open import open_bus
from aworld_runtime.config import Settings
from aworld_runtime.environments.base import Split
from aworld_runtime.errors import (
    BusUnavailableError,
    ConfigError,
    RunLostError,
    StoreError,
    UsageError,
    first_error,
)
from aworld_runtime.events import utc_now
from aworld_runtime.nodes.node import load_program
from aworld_runtime.processes import HOST, port_is_free
from aworld_runtime.runtime import run_sync
from aworld_runtime.store.open import open_store
from aworld_runtime.store.sqlite import path_of
from aworld_runtime.training.config import TrainConfig
from aworld_runtime.training.config_file import load_config
from aworld_runtime.training.extra import importing_train_extra
from aworld_runtime.training.launcher import Launcher
from aworld_runtime.training.progress import Progress
from aworld_runtime.training.run_folder import RunFolder
from aworld_runtime.training.sampler import choose_sampler
from aworld_runtime.training.smollm2 import resolve_model
from aworld_runtime.training.task import environment_of, find_task, tasks_of
from aworld_runtime.urls import shown
from aworld_runtime.version import code_version

with importing_train_extra():
    from aworld_runtime.training.summary import RunSummary, write_results

SPLITS: tuple[Split, ...] = ("train", "test")
REACH_S = 3.0
"""Seconds for the servers that were named to answer."""


def train(
    program: str | None = None, *, task: str = "calculator", workers: int = 4, **settings: Any
) -> RunSummary:
    """Train the agents of `task` and return what came of it.

        summary = train(task="calculator", workers=4, steps=20)

    Args:
        program: `module:attribute` of an agent or swarm to train instead of the task's own.
        task: a built-in task, or `module:attribute` of a `TrainingTask`.
        workers: worker processes.
        settings: other keys of `TrainConfig`.

    Raises:
        UsageError: something given is wrong.
        TrainingError: the run stopped; `aworld train --resume` continues it.
    """
    given = {"task": task, "worker_num": workers, "program": program, **settings}
    config = load_config(file=None, settings=(), given=given)
    return run_sync(_train_new, config)


def start_run(config: TrainConfig, out: TextIO = sys.stdout) -> RunSummary:
    """A new run, its progress told to `out`."""
    return run_sync(_train_new, config, out)


def resume_run(path: Path, out: TextIO = sys.stdout) -> RunSummary:
    """Go on with the run in `path`.

    Raises:
        NotFoundError: there is none.
    """
    return run_sync(_resume, RunFolder.open(path), out)


async def _train_new(config: TrainConfig, out: TextIO = sys.stdout) -> RunSummary:
    """Check everything that can be wrong before anything is made."""
    progress = Progress(config.steps, out, evaluate_every=config.evaluate_every)
    config = with_store(config)
    _check_task(config)
    _, which = choose_sampler(config.sampler)
    _check_addresses(config)
    await _reach(config)
    model = await run_sync_in_thread(lambda: resolve_model(config.model, report=progress.say))
    run_id = f"{utc_now():%Y%m%d-%H%M%S}-{token_hex(3)}"
    folder = RunFolder.create(config.out or Path("runs") / run_id, config, run_id, sys.argv)
    progress.say(f"run {run_id} in {folder.path}")
    progress.say(which)
    return await _train(folder, model, progress, resumed=False)


async def _resume(folder: RunFolder, out: TextIO = sys.stdout) -> RunSummary:
    config = folder.config
    progress = Progress(config.steps, out, evaluate_every=config.evaluate_every)
    progress.say(f"run {folder.run_id} goes on in {folder.path}")
    _check_task(config)
    await _reach(config)
    if not folder.started:
        model = await run_sync_in_thread(lambda: resolve_model(config.model, report=progress.say))
        return await _train(folder, model, progress, resumed=False)
    return await _train(folder, Path(folder.wiring.model), progress, resumed=True)


async def _train(
    folder: RunFolder, model: Path, progress: Progress, *, resumed: bool
) -> RunSummary:
    config = folder.config
    kind, _ = choose_sampler(folder.wiring.sampler if resumed else config.sampler)
    launcher = Launcher(
        folder, code_version=code_version(), say=progress.say, follow=progress.follow
    )
    try:
        with folder.held(), progress:
            await launcher.run(model=model, sampler=kind.kind, resumed=resumed)
            summary = await report_on(folder)
    except BaseException as stopped:
        error = first_error(stopped)
        if (hint := what_now(error, folder, began=launcher.began)) is not None:
            progress.say(hint)
        if error is stopped:
            raise
        raise error from None
    progress.say(f"report: {folder.report}")
    return summary


async def report_on(folder: RunFolder) -> RunSummary:
    """Write what came of the run into its folder.

    Raises:
        UsageError: it can't be written; a resume of the finished run writes it again.
    """
    try:
        return await write_results(folder, folder.config.store or Settings.from_env().store)
    except OSError as error:
        raise UsageError(f"all is trained, but the report can't be written: {error}") from error


def what_now(error: BaseException, folder: RunFolder, *, began: bool) -> str | None:
    """What can be done about a run that has stopped; nothing about one that had not begun and can't."""
    if isinstance(error, RunLostError):
        left = [str(path) for path in (folder.model, folder.checkpoints) if path.exists()]
        return f"what is left of it: {', '.join(left) or 'its log folder'}"
    if isinstance(error, UsageError) and not began:
        return None
    return f"nothing is lost: continue with aworld train --resume {quote_word(str(folder.path))}"


def _check_task(config: TrainConfig) -> None:
    """What the workers and the trainer will load must be there, and fit together.

    Raises:
        UsageError: it isn't, or doesn't.
    """
    task = find_task(config.task)
    environment = environment_of(task)
    for split in SPLITS:
        tasks_of(task, environment, split, count=1, seed=config.seed)
    reference = config.program or task.program
    roles = {node.role for node in load_program(reference, {}, {}).nodes}
    if missing := [role for role in task.roles if role not in roles]:
        raise ConfigError(
            f"task={config.task!r} trains {', '.join(missing)}, but {reference!r} has only {', '.join(sorted(roles))}"
        )


def with_store(config: TrainConfig) -> TrainConfig:
    """The same with its store named, so that it is this one from whatever folder the run is resumed."""
    url = config.store or Settings.from_env().store
    if urlsplit(url).scheme == "sqlite":
        url = f"sqlite:///{quote(str(path_of(url).absolute()))}"
    return config.model_copy(update={"store": url})


def _check_addresses(config: TrainConfig) -> None:
    """An address that was asked for must be this machine's, a port free.

    Raises:
        ConfigError: it isn't; names it.
    """
    host = config.sampler_host
    if host in {"", "0.0.0.0"} or not port_is_free(0, host):  # noqa: S104 - it is refused
        raise ConfigError(
            f"sampler_host={host!r}: is no address of this machine's by which a worker could reach it"
        )
    health = range(config.health_port, config.health_port + 1 + config.learner_ranks)
    ports = [
        ("bus_port", HOST, 0 if config.bus else config.bus_port),
        ("sampler_port", host, config.sampler_port),
        *(("health_port", config.health_host, port) for port in health if config.health_port),
    ]
    for key, at, port in ports:
        if port and not port_is_free(port, at):
            raise ConfigError(
                f"{key}={port}: another program has this port; choose another, or none for a free one"
            )


async def _reach(config: TrainConfig) -> None:
    """A server that was named must answer before anything is started.

    Raises:
        ConfigError: it doesn't; names it.
    """
    if config.bus is not None and urlsplit(config.bus).scheme == "memory":
        raise ConfigError(
            f"bus={config.bus!r} is inside one process, and training is several:"
            " give a server's URL, or none for a private server"
        )
    bus, store = config.bus, config.store or Settings.from_env().store
    asked = store
    try:
        with anyio.fail_after(REACH_S):
            async with open_store(store):
                pass
            if bus is not None:
                asked = bus
                async with open_bus(bus, keys=Settings.from_env().bus_keys):
                    pass
    except (BusUnavailableError, StoreError) as error:
        raise ConfigError(str(error)) from error
    except TimeoutError:
        raise ConfigError(
            f"{shown(asked)} does not answer within {REACH_S:g} s: start a server there, or name another"
        ) from None
