"""Choosing a sampler, starting it, and its end. What all samplers promise is in tests/contracts."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from aworld_runtime.errors import ConfigError, SamplerError
from aworld_runtime.training.sampler import SamplerProcess, SamplerSettings, choose_sampler
from aworld_runtime.training.sampler.transformers import TransformersSampler
from aworld_runtime.training.sampler.vllm import VllmSampler
from aworld_runtime.training.smollm2 import resolve_model
from tests.training.sampling import Refused, complete
from tests.waiting import wait_until_sync

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

# Starts a sampler and sleeps: the parent to be killed. Its own process id is the group's.
PARENT = """
import sys, anyio
from pathlib import Path
from aworld_runtime.training.sampler import SamplerSettings, choose_sampler

async def main():
    kind, _ = choose_sampler(sys.argv[1])
    sampler = kind(Path(sys.argv[2]), log=Path(sys.argv[3]), settings=SamplerSettings(kv_cache_gb=1))
    await sampler.start()
    await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return resolve_model()


def test_auto_takes_vllm_where_it_is_installed_and_says_so(tmp_path: Path) -> None:
    kind, line = choose_sampler("auto", SamplerSettings(python=tmp_path / "python"))
    assert kind is VllmSampler
    assert line == "sampler: vllm (installed)"


def test_auto_falls_back_to_transformers_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert choose_sampler("auto") == (
        TransformersSampler,
        "sampler: transformers (vllm is not installed)",
    )
    with pytest.raises(ConfigError, match="vllm is not installed here; use transformers or auto"):
        choose_sampler("vllm")


def test_a_sampler_can_be_named() -> None:
    assert choose_sampler("transformers") == (TransformersSampler, "sampler: transformers")


def test_naming_a_sampler_loads_nothing_heavy() -> None:
    code = (
        "import sys, aworld_runtime.training.sampler as sampler; sampler.choose_sampler();"
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_a_server_that_dies_at_its_start_tells_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    sampler = TransformersSampler(tmp_path / "model", log=tmp_path / "log")
    with pytest.raises(SamplerError, match=r"(?s)ended with code 1 while starting.*model") as error:
        await sampler.start()
    assert str(tmp_path / "log") in str(error.value)


async def test_a_taken_port_is_an_error(model_folder: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        settings = SamplerSettings(port=other.getsockname()[1])
        sampler = TransformersSampler(model_folder, log=tmp_path / "log", settings=settings)
        with pytest.raises(SamplerError, match="is taken"):
            await sampler.start()


async def test_a_server_that_is_too_slow_is_stopped(model_folder: Path, tmp_path: Path) -> None:
    settings = SamplerSettings(start_deadline=0.2)
    sampler = TransformersSampler(model_folder, log=tmp_path / "log", settings=settings)
    with pytest.raises(SamplerError, match="does not answer after"):
        await sampler.start()
    assert sampler.returncode is not None


async def test_a_sampler_stops_within_five_seconds(model_folder: Path, tmp_path: Path) -> None:
    sampler: SamplerProcess
    async with TransformersSampler(model_folder, log=tmp_path / "log") as sampler:
        pid = sampler.pid
        assert pid is not None
        start = time.monotonic()
        await sampler.stop()
        assert time.monotonic() - start < 5
        assert pid not in descendants(os.getpid())
        with pytest.raises(SamplerError, match="does not answer"):
            await sampler.health()


async def test_a_server_started_anew_takes_weights_from_a_trainer_that_knew_its_forerunner(
    model_folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "sampler.log"
    server = TransformersSampler(model_folder, log=log)
    settings = SamplerSettings(port=server.port, publish_deadline=15)
    trainers = TransformersSampler(model_folder, log=log, settings=settings)
    weights = list(AutoModelForCausalLM.from_pretrained(model_folder).named_parameters())
    async with server:
        await trainers.publish(weights, version=1)
        os.kill(server.pid or 0, signal.SIGKILL)
        await server.wait()
        await server.start(hold=True)
        assert (await trainers.policy_state()).version == -1
        await trainers.publish(weights, version=1)
        assert (await trainers.health()).version == 1


async def test_weights_that_are_not_finite_give_an_answer_that_says_so(
    model_folder: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    weights = dict(model.named_parameters())
    async with TransformersSampler(model_folder, log=tmp_path / "log") as sampler:
        bad = {name: torch.full_like(tensor, math.nan) for name, tensor in weights.items()}
        await sampler.publish(bad.items(), version=1)
        with pytest.raises(Refused, match="logits are not finite") as refused:
            await complete(sampler.url, [1, 2, 3], max_tokens=4)
        assert refused.value.status == 422
        await sampler.publish(weights.items(), version=2)
        assert (await complete(sampler.url, [1, 2, 3], max_tokens=4)).version == 2


def descendants(parent: int) -> dict[int, str]:
    """Processes below a process, with their command lines; needs no package."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found: set[int] = set()
    layer = {parent}
    while layer:
        layer = {pid for pid, above in parents.items() if above in layer}
        found |= layer
    lines: dict[int, str] = {}
    for pid in found:
        try:
            lines[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return lines


@pytest.mark.parametrize(
    "kind, sign",
    [
        ("transformers", "transformers_server"),
        pytest.param("vllm", "VLLM::Worker", marks=[pytest.mark.vllm, pytest.mark.slow]),
    ],
)
def test_no_process_is_left_when_the_parent_is_killed(
    model_folder: Path, tmp_path: Path, kind: str, sign: str
) -> None:
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, kind, model_folder, tmp_path / "log"])
    try:
        wait_until_sync(
            lambda: any(sign in line for line in descendants(parent.pid).values()),
            timeout=120,
            description=f"a process {sign}",
        )
        family = descendants(parent.pid)
        parent.send_signal(signal.SIGKILL)
        wait_until_sync(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in family),
            description=f"the end of {family}",
        )
    finally:
        parent.kill()
        parent.wait()
