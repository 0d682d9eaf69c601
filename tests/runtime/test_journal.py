"""The journal: handlers that ask several things at once, give up or fail go the same way again, in any run."""
# ruff: noqa: ARG002 - nodes have a given signature

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.lowlevel
import pytest
from pydantic import JsonValue

from aworld_runtime.bus.base import read_all
from aworld_runtime.bus.open import open_bus
from aworld_runtime.errors import EventError, ModelUnavailableError
from aworld_runtime.events import (
    REFUSE_ABOVE,
    EpisodeFinished,
    Event,
    MessagePosted,
    ValueRecorded,
)
from aworld_runtime.messages import Completion
from aworld_runtime.models.base import ModelRequest
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.names import episode_log
from aworld_runtime.nodes import journal
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.node import Program
from aworld_runtime.replay import replay as replaying
from aworld_runtime.replay.replay import inspect, replay
from tests.episodes import owner_of
from tests.runtime.test_replay import Said, calls, diverge, record, seq_of


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """These nodes fail on purpose."""
    caplog.set_level(logging.ERROR)


class Concurrent:
    """Asks several things at once, in one of several ways; its answer tells in which order the answers came."""

    role = "concurrent"
    subscriptions = ("episode.requested",)

    def __init__(self, how: str) -> None:
        self.how = how
        self.got: list[str] = []

    async def handle(self, ctx: Context, event: Event) -> None:
        self.got = []
        await getattr(self, self.how)(ctx)
        ctx.emit(EpisodeFinished(answer=" ".join(self.got)))

    async def all_of_them(self, ctx: Context) -> None:
        """The last that was asked answers first."""
        async with anyio.create_task_group() as tasks:
            for name, after in (("slow", 0.06), ("middle", 0.03), ("fast", 0)):
                tasks.start_soon(self.ask, ctx, name, after)

    async def at_the_same_time(self, ctx: Context) -> None:
        """Answers come in the same turn of the event loop, and one of them takes several turns to be told."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.ask, ctx, "long", 0, 5)
            tasks.start_soon(self.ask, ctx, "short", 0, 0)
            tasks.start_soon(self.ask, ctx, "medium", 0, 2)

    async def the_first_that_comes(self, ctx: Context) -> None:
        async with anyio.create_task_group() as tasks:

            async def race(name: str, after: float) -> None:
                await self.ask(ctx, name, after)
                tasks.cancel_scope.cancel()

            tasks.start_soon(race, "slow", 20)
            tasks.start_soon(race, "fast", 0.01)

    async def with_a_time_limit(self, ctx: Context) -> None:
        with anyio.move_on_after(0.02) as scope:
            await self.ask(ctx, "late", 20)
        self.got.append(f"gave up: {scope.cancelled_caught}")
        await self.ask(ctx, "again", 0)

    async def with_asyncios_own_means(self, ctx: Context) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                await self.ask(ctx, "late", 20)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ask(ctx, "later", 20), 0.02)  # noqa: TID251 - users do
        async with asyncio.TaskGroup() as tasks:
            slow = tasks.create_task(self.ask(ctx, "slow", 0.03))
            fast = tasks.create_task(self.ask(ctx, "fast", 0.01))
        self.got.append(f"{slow.done()} {fast.done()}")

    async def values(self, ctx: Context) -> None:
        async def look(page: str, after: float) -> None:
            async def fetch() -> JsonValue:
                await anyio.sleep(after)
                return page

            self.got.append(str(await ctx.record(page, fetch)))
            ctx.emit(MessagePosted(content=page), to="nobody")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look, "a", 0.03)
            tasks.start_soon(look, "b", 0)
            tasks.start_soon(ctx.sleep, 0.01)
            tasks.start_soon(self.ask, ctx, "c", 0.02)

    async def one_asks_and_one_does_not(self, ctx: Context) -> None:
        async def asks() -> None:
            await self.ask(ctx, "asked", 0.01)
            self.got.append(str(ctx.random.random()))

        async def draws() -> None:
            await anyio.lowlevel.checkpoint()
            self.got.append(str(ctx.random.random()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(asks)
            tasks.start_soon(draws)

    async def retries(self, ctx: Context) -> None:
        for attempt in range(3):
            try:
                await self.ask(ctx, f"attempt {attempt}", 0, 0, attempt < 2)
            except ModelUnavailableError as error:
                self.got.append(str(error))
                await ctx.sleep(0.01 * attempt)

    async def swallows(self, ctx: Context) -> None:
        async def fetch() -> JsonValue:
            raise FileNotFoundError(2, "no such page")

        for _ in range(2):
            try:
                await ctx.record("page", fetch)
            except Exception as error:  # noqa: BLE001 - as careless handlers do
                self.got.append(f"{type(error).__name__}: {error}")

    async def ask(
        self, ctx: Context, name: str, after: float, turns: int = 0, fails: bool = False
    ) -> None:
        async def reply() -> str:
            await anyio.sleep(after)
            if fails:
                raise ModelUnavailableError(f"{name} is down")
            return name

        completion = await ctx.complete(Thinking(reply))
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        self.got.append(completion.text)
        ctx.emit(MessagePosted(content=completion.text), to="nobody")

    def program(self) -> Program:
        return Program(nodes=(self,))


class Thinking(ScriptedModel):
    """Takes its time."""

    def __init__(self, reply: Callable[[], Awaitable[str]]) -> None:
        super().__init__("")
        self.reply = reply

    async def complete(self, request: ModelRequest) -> Completion:
        return Completion(text=await self.reply())


CONCURRENT = {
    "all_of_them": None,
    "at_the_same_time": None,
    "the_first_that_comes": "fast",
    "with_a_time_limit": "gave up: True again",
    "with_asyncios_own_means": None,
    "values": None,
    "one_asks_and_one_does_not": None,
    "retries": "attempt 0 is down attempt 1 is down attempt 2",
    "swallows": "FileNotFoundError: [Errno 2] no such page FileNotFoundError: [Errno 2] no such page",
}


@pytest.mark.parametrize("how", CONCURRENT)
async def test_what_a_handler_asks_at_once_is_answered_in_the_logged_order(how: str) -> None:
    events = await record(Concurrent(how))
    answer = inspect(events).answer
    assert answer == CONCURRENT[how] or CONCURRENT[how] is None
    for _ in range(5):
        again = Concurrent(how)
        report = await replay(events, again.program())
        assert report.identical, report.divergence
        assert " ".join(again.got) == answer


async def taken_over(whole: list[Event], cut: int, node: Concurrent) -> list[Event]:
    """The log, cut there and gone on with by another owner."""
    log = episode_log(whole[0].episode_id or "")
    async with open_bus("memory://") as bus:
        await bus.append(log, 0, whole[:cut])
        await owner_of(bus, whole[0], node.program(), worker="w2").run()
        return await read_all(bus, log)


@pytest.mark.parametrize("how", CONCURRENT)
async def test_a_takeover_among_concurrent_answers_replays(how: str) -> None:
    """Wherever the log is cut, another owner ends the episode, and what both did replays as one."""
    whole = await record(Concurrent(how))
    for cut in range(4, len(whole) - 1):
        events = await taken_over(whole, cut, Concurrent(how))
        assert inspect(events).reason == "answered", (cut, inspect(events).error)
        report = await replay(events, Concurrent(how).program())
        assert report.identical, (cut, report.divergence)


class Untrue(Concurrent):
    """Its second run does something else."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.hows = iter((first, second))

    async def handle(self, ctx: Context, event: Event) -> None:
        self.how = next(self.hows)
        await super().handle(ctx, event)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (journal, replaying):
        monkeypatch.setattr(module, "PATIENCE_S", 0.2)  # so long each test waits


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "second, said",
    [
        ("waits_for_nobody", "model.failed; this time it did nothing more"),
        ("forgets_one", "model.requested; this time it did nothing more"),
        ("never_ends", "model.requested; this time it did nothing more"),
    ],
)
async def test_a_handler_that_waits_for_what_cannot_come_diverges(second: str, said: str) -> None:
    class Changed(Untrue):
        async def waits_for_nobody(self, ctx: Context) -> None:
            """One that the record has as cancelled."""
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.ask, ctx, "slow", 20)
                tasks.start_soon(self.ask, ctx, "fast", 0.01)

        async def forgets_one(self, ctx: Context) -> None:
            await self.ask(ctx, "slow", 0)

        async def never_ends(self, ctx: Context) -> None:
            await anyio.sleep_forever()

    changed = Changed("the_first_that_comes", second)
    events = await record(changed)
    with anyio.fail_after(10):
        found = await diverge(events, changed.program())
    assert said in found.message


async def test_values_that_are_not_asked_for_any_more_are_a_difference() -> None:
    class Clock(Concurrent):
        async def looks(self, ctx: Context) -> None:
            await ctx.now()

        async def looks_away(self, ctx: Context) -> None:
            pass

    events = await record(Clock("looks"))
    found = await diverge(events, Clock("looks_away").program())
    assert found.seq == seq_of(events, "concurrent", ValueRecorded)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("content", ["\ud800", "x" * (REFUSE_ABOVE + 1)], ids=["torn", "large"])
async def test_what_no_log_can_hold_fails_where_it_was_said_live_and_replayed(content: str) -> None:
    class Loud(Concurrent):
        async def shouts(self, ctx: Context) -> None:
            ctx.emit(MessagePosted(content="before"), to="nobody")
            with pytest.raises(EventError):
                ctx.emit(MessagePosted(content=content), to="nobody")
            ctx.emit(MessagePosted(content="after"), to="nobody")

            async def much() -> JsonValue:
                return content

            with pytest.raises(EventError):
                await ctx.record("much", much)
            await self.ask(ctx, content, 0)

    events = await record(Loud("shouts"))
    assert len([e for e in events if isinstance(e.data, MessagePosted)]) == 2
    assert "ModelError" in str(inspect(events).error)
    report = await replay(events, Loud("shouts").program())
    assert report.identical, report.divergence


@pytest.mark.usefixtures("quiet")
async def test_exceptions_of_values_are_the_same_live_and_replayed() -> None:
    class OddError(Exception):
        def __init__(self, page: str, code: int) -> None:
            super().__init__(f"{page} gave {code}")
            self.code = code

    class Curious(Concurrent):
        async def looks(self, ctx: Context) -> None:
            wrong = (
                OddError("page", 7),
                KeyError("x"),
                ConnectionRefusedError(111, "refused"),
                ExceptionGroup("some", [ValueError("x")]),
                SystemExit(3),
            )
            for error in wrong:

                async def fail(error: BaseException = error) -> JsonValue:
                    raise error

                try:
                    await ctx.record("page", fail)
                except (Exception, SystemExit) as caught:  # noqa: BLE001 - looks at each
                    self.got.append(f"{type(caught).__name__}({caught})")

    events = await record(Curious("looks"))
    assert inspect(events).answer == (
        f"RuntimeError({OddError.__qualname__}: page gave 7)"
        " KeyError('x') ConnectionRefusedError([Errno 111] refused)"
        " RuntimeError(ExceptionGroup: some (1 sub-exception); ValueError: x) SystemExit(3)"
    )
    assert (await replay(events, Curious("looks").program())).identical


@dataclass(frozen=True)
class Step:
    """Something that a handler does, perhaps by tasks of its own."""

    kind: str
    name: int
    after: float
    tasks: tuple[tuple["Step", ...], ...] = ()


TREE = ("together", "gather", "queue", "lock")
LEAF = ("think", "fail", "value", "now", "sleep", "say", "draw", "checkpoints")


class Tangled(Concurrent):
    """A random tree of tasks that ask, draw, wait for one another and say what they know; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        super().__init__("goes")
        self.seed = seed

    async def goes(self, ctx: Context) -> None:
        await self.do(ctx, self.plan(random.Random(self.seed), 3))

    def plan(self, dice: random.Random, depth: int) -> tuple[Step, ...]:
        steps: list[Step] = []
        for _ in range(dice.randint(1, 4)):
            kind = dice.choice(TREE + LEAF if depth else LEAF)
            width = dice.randint(2, 3) if kind in TREE else 0
            tasks = tuple(self.plan(dice, depth - 1) for _ in range(width))
            after = dice.choice((0, 0, 0.001, 0.003))
            steps.append(Step(kind, dice.randrange(1000), after, tasks))
        return tuple(steps)

    async def do(self, ctx: Context, steps: tuple[Step, ...]) -> None:
        for step in steps:
            await getattr(self, step.kind)(ctx, step)

    async def together(self, ctx: Context, step: Step) -> None:
        async with anyio.create_task_group() as tasks:
            for each in step.tasks:
                tasks.start_soon(self.do, ctx, each)

    async def gather(self, ctx: Context, step: Step) -> None:
        await asyncio.gather(*(self.do(ctx, each) for each in step.tasks))  # noqa: TID251 - users do

    async def queue(self, ctx: Context, step: Step) -> None:
        send, receive = anyio.create_memory_object_stream[int](10)

        async def work(number: int) -> None:
            await self.do(ctx, step.tasks[number])
            await send.send(number)

        async with anyio.create_task_group() as tasks, send, receive:
            for number in range(len(step.tasks)):
                tasks.start_soon(work, number)
            for _ in step.tasks:
                self.got.append(f"done {await receive.receive()}")

    async def lock(self, ctx: Context, step: Step) -> None:
        lock = anyio.Lock()

        async def work(steps: tuple[Step, ...]) -> None:
            async with lock:
                await self.do(ctx, steps)

        async with anyio.create_task_group() as tasks:
            for each in step.tasks:
                tasks.start_soon(work, each)

    async def think(self, ctx: Context, step: Step) -> None:
        await self.ask(ctx, str(step.name), step.after, step.name % 3)

    async def fail(self, ctx: Context, step: Step) -> None:
        try:
            await self.ask(ctx, str(step.name), step.after, fails=True)
        except ModelUnavailableError as error:
            self.got.append(str(error))

    async def value(self, ctx: Context, step: Step) -> None:
        async def fetch() -> JsonValue:
            await anyio.sleep(step.after)
            return step.name

        self.got.append(str(await ctx.record(f"page {step.name}", fetch)))

    async def now(self, ctx: Context, step: Step) -> None:
        self.got.append((await ctx.now()).isoformat())

    async def sleep(self, ctx: Context, step: Step) -> None:
        await ctx.sleep(step.after)

    async def say(self, ctx: Context, step: Step) -> None:
        ctx.emit(MessagePosted(content=" ".join(self.got)), to="nobody")

    async def draw(self, ctx: Context, step: Step) -> None:
        self.got.append(str(ctx.random.random()))

    async def checkpoints(self, ctx: Context, step: Step) -> None:
        for _ in range(step.name % 4):
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("seed", range(16))
async def test_whatever_a_handler_does_with_tasks_it_does_again(seed: int) -> None:
    """Replayed, and taken over at a place in between and replayed then."""
    whole = await record(Tangled(seed))
    report = await replay(whole, Tangled(seed).program())
    assert report.identical, report.divergence
    events = await taken_over(whole, len(whole) // 2, Tangled(seed))
    report = await replay(events, Tangled(seed).program())
    assert report.identical, report.divergence


@pytest.mark.parametrize("how", ["all_of_them", "the_first_that_comes", "values"])
async def test_handlers_that_ask_several_things_at_once_are_compared_wherever_they_are_cut_off(
    how: str,
) -> None:
    events = await record(Concurrent(how))
    for cut in range(1, len(events) - 1):
        report = await replay(events[:cut], Concurrent(how).program())
        assert report.identical, (cut, report.divergence)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "changed, said",
    [
        (partial(calls, arguments={}), "recorded message.posted; this time it emitted tool.called"),
        (Context.now, "recorded message.posted; this time it did nothing more"),
    ],
)
async def test_a_handler_that_was_cut_off_and_goes_another_way_is_a_difference(
    changed: Callable[[Context], Awaitable[None]], said: str
) -> None:
    async def waits(ctx: Context) -> None:
        ctx.emit(MessagePosted(content="x"), to="nobody")
        await Concurrent("").ask(ctx, "late", 20)

    events = await record(Said(waits), timeout_s=0.1)
    assert (await replay(events, Said(waits).program())).identical
    assert (await diverge(events, Said(changed).program())).message.endswith(said)
