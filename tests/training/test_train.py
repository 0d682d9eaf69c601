"""What is said of a run that has stopped."""

import socket
from itertools import product
from pathlib import Path

import pytest

from aworld_runtime.bus.memory import MemoryBus
from aworld_runtime.errors import ConfigError, RunLostError, SamplerError, UsageError
from aworld_runtime.events import Event, MessagePosted, Registry
from aworld_runtime.names import EPISODES_QUEUE
from aworld_runtime.processes import HOST, free_port
from aworld_runtime.training.config import TrainConfig
from aworld_runtime.training.run_folder import RunFolder, Wiring
from aworld_runtime.training.sampler.of_run import port_of_run
from aworld_runtime.training.train import report_on, resume_run, what_now

pytestmark = pytest.mark.anyio


def started(tmp_path: Path) -> RunFolder:
    """The folder of a run whose processes have been started once."""
    config = TrainConfig(store=f"sqlite:///{tmp_path}/store.db")
    folder = RunFolder.create(tmp_path / "run", config, "r", [])
    folder.wiring = Wiring(
        run_id="r",
        code_version="",
        bus="",
        model="m",
        sampler="transformers",
        sampler_port=free_port(),
    )
    return folder


def test_a_run_that_began_can_be_resumed_whatever_stopped_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "my runs" / "#1")
    hint = f"nothing is lost: continue with aworld train --resume '{tmp_path}/my runs/#1'"
    assert what_now(SamplerError("died"), folder, began=False) == hint
    assert what_now(ConfigError("port 1 is taken"), folder, began=True) == hint
    assert what_now(ConfigError("port 1 is taken"), folder, began=False) is None


def test_of_a_run_that_the_bus_has_lost_the_checkpoints_are_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    hint = what_now(RunLostError("0 of 9 events"), folder, began=True)
    assert hint == f"what is left of it: {tmp_path}/checkpoints"


FILES = ("config.yaml", "provenance.json", "wiring.json")
DAMAGE = (b"", b'{"run', b"[]", b"\xff\xfe: \x80")


@pytest.mark.parametrize("name, damage", [*product(FILES, DAMAGE), ("provenance.json", None)])
def test_a_damaged_file_of_the_run_is_named_in_one_line(
    tmp_path: Path, name: str, damage: bytes | None
) -> None:
    folder = started(tmp_path)
    (folder.path / name).unlink()
    if damage is not None:
        (folder.path / name).write_bytes(damage)
    with pytest.raises(UsageError, match=rf"^[^\n]*{name}: can't be read: [^\n]*$") as caught:
        resume_run(folder.path)
    assert "pydantic" not in str(caught.value)


async def test_a_resumed_run_keeps_its_samplers_port_where_it_can(tmp_path: Path) -> None:
    async with MemoryBus("memory://", Registry()) as bus:
        folder = started(tmp_path)
        port = folder.wiring.sampler_port
        assert await port_of_run(folder, bus) == port
        with socket.socket() as other:
            other.bind((HOST, port))
            other.listen()
            assert await port_of_run(folder, bus, patience_s=0) != port
            await bus.put(EPISODES_QUEUE, Event.of(MessagePosted(content="x"), source="trainer/r"))
            with pytest.raises(ConfigError, match=rf"port {port} .* \(1 queued episodes"):
                await port_of_run(folder, bus, patience_s=0)


async def test_a_report_that_can_not_be_written_is_one_line(tmp_path: Path) -> None:
    folder = started(tmp_path)
    folder.report.mkdir()
    with pytest.raises(UsageError, match=r"the report can't be written: .*report.html"):
        await report_on(folder)
