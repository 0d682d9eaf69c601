"""`aworld archive --bus URL --store URL`: what every `aworld run` does beside its run, for a bus that others run on.

SIGTERM, SIGINT ──▶ drain: store what the bus has by now, leave
once more       ──▶ leave now; the next one goes on from there
"""

from __future__ import annotations

import argparse
import logging
import signal
from functools import partial
from typing import TYPE_CHECKING

from aworld_runtime.cli.own_types import add_program, own_types
from aworld_runtime.cli.shared import add_bus, add_health, add_store, joined_bus, run_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from pydantic import JsonValue

    from aworld_runtime.archive.archiver import Archiver
    from aworld_runtime.archive.janitor import Janitor

logger = logging.getLogger(__name__)

LOG_LEVEL = "info"
TELL_S = 60.0
DRAIN_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Copy what happens on a bus to a store, free what has ended and restore what the server lost, until SIGTERM or"
        " Ctrl-C; a second one ends it now. Wanted where no `aworld run` or `aworld train` stays on the bus."
    )
    add_health(parser)
    add_program(parser)
    add_bus(parser)
    add_store(parser)
    parser.epilog = "example: aworld archive --bus redis://host:6379 --store mongodb://host/aworld --health 9102"


def run(arguments: argparse.Namespace) -> int:
    with own_types(arguments.program):
        return run_async(_serve, arguments)


async def _serve(arguments: argparse.Namespace) -> int:
    import anyio

    from aworld_runtime.archive.archiver import Archiver
    from aworld_runtime.archive.janitor import Janitor
    from aworld_runtime.cli.health import serve_health
    from aworld_runtime.config import Settings
    from aworld_runtime.store.open import open_store

    settings, code = Settings.from_env(), 0
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with (
            joined_bus(arguments.bus) as bus,
            open_store(arguments.store or settings.store) as store,
            Archiver(bus, store) as archiver,
            anyio.create_task_group() as tasks,
        ):
            janitor = Janitor(
                bus,
                store,
                archiver,
                retire_after_s=settings.retire_after_s,
                restore_after_s=settings.restore_after_s,
            )
            tasks.start_soon(janitor.run)
            tasks.start_soon(_tell, archiver)
            if arguments.health is not None:
                health = partial(_health, archiver, janitor)
                await tasks.start(serve_health, arguments.health, health)
            logger.info("archiver on %s: to %s", bus.url, store.url)
            await anext(signals)
            logger.info(
                "archiver: draining, %.1f s behind; once more to leave now", archiver.lag_s()
            )
            code = await _drain(archiver, signals)
            tasks.cancel_scope.cancel()
    return code


async def _tell(archiver: Archiver) -> None:
    """How it goes, now and then, while there is something to do."""
    import anyio

    told = archiver.archived
    while True:
        await anyio.sleep(TELL_S)
        if news := archiver.archived - told:
            logger.info(
                "archiver: %d events in the last minute, %.1f s behind", news, archiver.lag_s()
            )
        told += news


async def _drain(archiver: Archiver, signals: AsyncIterator[signal.Signals]) -> int:
    """Returns the exit code.

    Raises:
        StoreUnavailableError: not everything is in the store in time.
    """
    import anyio

    code = 0
    async with anyio.create_task_group() as tasks:

        async def leave() -> None:
            nonlocal code
            code = 128 + await anext(signals)
            tasks.cancel_scope.cancel()

        tasks.start_soon(leave)
        await archiver.drain(DRAIN_S)
        logger.info("archiver: everything is in the store; it copied %d events", archiver.archived)
        tasks.cancel_scope.cancel()
    return code


def _health(archiver: Archiver, janitor: Janitor) -> Mapping[str, JsonValue]:
    """What it says of itself when asked."""
    return {
        "status": "ok",
        "archived": archiver.archived,
        "behind_s": round(archiver.lag_s(), 3),
        "incidents": len(archiver.incidents) + len(janitor.incidents),
    }
