"""A sampler as the trainer sees it: a process with an HTTP API, and weights published into it.

Every sampler answers `/v1/completions` (prompt as token ids, OpenAI's shape), `/v1/models`,
`/health`, `/policy` and `/publish`; each completion carries the headers `x-policy` and
`x-policy-version`, in force for all its tokens. `gate.py` says how that holds during a publish.
"""

from __future__ import annotations

import http.client
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

import anyio
from anyio.to_thread import run_sync
from pydantic import BaseModel, ConfigDict, Field

import aworld_runtime
from aworld_runtime.errors import ProcessError, SamplerError
from aworld_runtime.processes import HOST, ChildProcess, free_port, port_is_free, spawn
from aworld_runtime.training.sampler.gate import BUSY, HOLD

if TYPE_CHECKING:
    from torch import Tensor

    from aworld_runtime.training.sampler.transfer import Leader

STOP_GRACE = 3.0
HEALTH_INTERVAL = 0.2
HEALTH_DEADLINE = 5.0


class SamplerSettings(BaseModel):
    """How a sampler runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Its weights and computation; published weights are cast to it."""
    max_model_len: int = Field(default=2048, gt=0)
    """Tokens of prompt and completion together."""
    max_batch: int = Field(default=32, gt=0)
    """Completions sampled at once."""
    threads: int | None = Field(default=None, gt=0)
    """Cores to compute on; None is all that this process may use."""
    host: str = HOST
    """This machine's address where it listens, by which others reach it."""
    port: int = Field(default=0, ge=0, lt=65536)
    """0 takes a free one."""
    start_deadline: float = Field(default=240.0, gt=0)
    """Seconds until it must answer."""
    publish_deadline: float = Field(default=120.0, gt=0)
    """Seconds for new weights to be in force."""
    kv_cache_gb: float = Field(default=2.0, gt=0)
    """vLLM on CPU: memory for keys and values."""
    compile: bool = False
    """vLLM: compile the model, which costs minutes at the start for some speed later."""
    python: Path | None = None
    """Interpreter of the environment that holds vLLM, where it isn't this one."""
    arguments: tuple[str, ...] = ()
    """More command-line arguments for the server."""


@dataclass(frozen=True)
class PolicyState:
    """What a sampler serves."""

    policy: str
    version: int


class SamplerProcess(ABC):
    """A sampler of `model`, which it calls `policy`. `async with` starts and stops it."""

    kind: ClassVar[Literal["vllm", "transformers"]]

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        policy: str = "policy",
        settings: SamplerSettings | None = None,
    ) -> None:
        self.model = model
        self.policy = policy
        self.log = log
        self.settings = settings or SamplerSettings()
        self.port = self.settings.port or free_port()
        self._process: ChildProcess | None = None
        self._leader: Leader | None = None
        self._published = 0

    @abstractmethod
    def command(self) -> list[str]:
        """The server's command line."""
        ...

    @abstractmethod
    def environment(self) -> dict[str, str | None]:
        """What the server's environment has beside ours."""
        ...

    @property
    def url(self) -> str:
        """Base of the API, without `/v1`."""
        return f"http://{self.settings.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return None if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        """Set once the server has ended."""
        return None if self._process is None else self._process.returncode

    async def start(self, *, hold: bool = False) -> Self:
        """Return once it answers; `SamplerError` with its last words if it doesn't.

        With `hold` it samples nothing before the first publish: the weights it starts with are old.
        """
        host = self.settings.host
        if not port_is_free(self.port, host):
            raise SamplerError(f"port {self.port} on {host} for the {self.kind} sampler is taken")
        environment = {**_import_path(), **self.environment(), HOLD: "1" if hold else None}
        try:
            self._process = await spawn(
                self.command(), log=self.log, env=environment, name=f"{self.kind} sampler"
            )
        except ProcessError as error:
            raise SamplerError(str(error)) from error
        try:
            with anyio.fail_after(self.settings.start_deadline):
                await self._until_healthy(self._process)
        except TimeoutError:
            await self.stop()
            raise self._failure(
                f"does not answer after {self.settings.start_deadline:.0f} s"
            ) from None
        except BaseException:
            await self.stop()
            raise
        return self

    async def health(self) -> PolicyState:
        """The policy and version in force; `SamplerError` when it is not fit to sample."""
        await self._call("GET", "/health", deadline=HEALTH_DEADLINE)
        return await self.policy_state()

    async def policy_state(self) -> PolicyState:
        """The policy and version it holds, fit or not; version -1 while it waits for its first."""
        state = await self._call("GET", "/policy", deadline=HEALTH_DEADLINE)
        return PolicyState(policy=state["policy"], version=state["version"])

    async def publish(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Put new weights into the running server, and return once `version` is in force.

        Called in the one process that has whole tensors, the trainer. Running completions end with
        finish reason `abort`; new ones wait. After an error the sampler refuses to sample until a
        publish succeeds.
        """
        pairs = list(weights)
        known = self._leader is not None
        try:
            await self._publish(pairs, version)
        except SamplerError:
            # A group from an earlier publish may be gone, say with a server that was started anew.
            if not known:
                raise
            await self._publish(pairs, version)

    async def _publish(self, pairs: Sequence[tuple[str, Tensor]], version: int) -> None:
        # Imported here, because commands that only name a sampler start without torch.
        import torch

        from aworld_runtime.training.sampler import transfer

        tensors = transfer.describe(pairs, getattr(torch, self.settings.dtype))
        deadline = self.settings.publish_deadline
        state = await self._call("GET", "/policy", deadline=HEALTH_DEADLINE)
        if self._leader is not None and state["version"] < self._published:
            # A server that was started anew: it would wait in vain for the others of its forerunner's group.
            self._leader.close()
            self._leader = None
        leader = self._leader
        if leader is None:
            leader = transfer.Leader(host=HOST, size=state["ranks"] + 1, deadline=deadline)
        order = {"version": version, "rendezvous": leader.rendezvous, "tensors": tensors}
        try:
            with anyio.fail_after(deadline):
                await self._send(leader, pairs, tensors, order)
            self._leader, self._published = leader, version
        except BaseException as error:
            self._leader = None
            leader.close()
            if isinstance(error, TimeoutError):
                raise self._failure(f"did not take version {version} in {deadline} s") from None
            raise

    async def _send(
        self, leader: Leader, pairs: Sequence[Any], tensors: Any, order: dict[str, Any]
    ) -> None:
        """The order and the bytes at once: the server receives while it handles the order."""
        failed: list[Exception] = []

        async def place_order(group: anyio.abc.TaskGroup) -> None:
            try:
                await self._order(order)
            except SamplerError as error:
                failed.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(place_order, group)
            try:
                await run_sync(leader.send, pairs, tensors, abandon_on_cancel=True)
            except RuntimeError as error:  # gloo's; the server's own words are better, if they come
                with anyio.move_on_after(HEALTH_DEADLINE):
                    await anyio.sleep_forever()
                failed.append(SamplerError(f"weights can't be sent to {self.url}: {error}"))
                group.cancel_scope.cancel()
        if failed:
            raise failed[0]

    async def _order(self, order: dict[str, Any]) -> None:
        """Place a publish order, after one that a trainer before us may have left unfinished."""
        while True:
            try:
                await self._call("POST", "/publish", order, deadline=self.settings.publish_deadline)
            except _RefusedError as error:
                if error.status != BUSY:
                    raise
                await anyio.sleep(HEALTH_INTERVAL)
            else:
                return

    async def wait(self) -> int:
        """Wait until the server has ended; its exit code. `SamplerError` if it was never started."""
        if self._process is None:
            raise SamplerError(f"the {self.kind} sampler was not started here")
        return await self._process.wait()

    async def stop(self) -> None:
        """End the server and all its processes, within five seconds."""
        if self._leader is not None:
            self._leader.close()
            self._leader = None
        if self._process is not None:
            await self._process.stop(grace=STOP_GRACE)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _until_healthy(self, process: ChildProcess) -> None:
        while True:
            if process.returncode is not None:
                raise self._failure(f"ended with code {process.returncode} while starting")
            try:
                await self._call("GET", "/health", deadline=HEALTH_DEADLINE)
            except SamplerError:
                await anyio.sleep(HEALTH_INTERVAL)
            else:
                return

    async def _call(
        self, method: str, path: str, body: object = None, *, deadline: float
    ) -> dict[str, Any]:
        return await run_sync(
            _request, method, self.url + path, body, deadline, abandon_on_cancel=True
        )

    def _failure(self, what: str) -> SamplerError:
        tail = self._process.log_tail(15) if self._process is not None else ""
        return SamplerError(f"the {self.kind} sampler {what}; the end of {self.log}:\n{tail}")


class _RefusedError(SamplerError):
    """An answer that is not 200."""

    def __init__(self, url: str, status: int, text: str) -> None:
        super().__init__(f"the sampler at {url} answers {status}: {text[:2000]}")
        self.status = status


def _request(method: str, url: str, body: object, deadline: float) -> dict[str, Any]:
    """One JSON request on a connection of its own; blocks."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=deadline)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, parts.path, content, {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise SamplerError(f"the sampler at {url} does not answer: {error!r}") from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise _RefusedError(url, response.status, text)
    return json.loads(text) if text else {}


def _import_path() -> dict[str, str | None]:
    """Lets the server import this package out of a checkout that nobody installed."""
    root = Path(aworld_runtime.__file__).resolve().parent.parent
    return {} if root.name in ("site-packages", "dist-packages") else {"PYTHONPATH": str(root)}


def interpreter(other: Path | None) -> str:
    """The Python that runs the server: this one, unless another is named."""
    return str(other or sys.executable)
