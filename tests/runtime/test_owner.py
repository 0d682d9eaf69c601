"""The owner of an episode: order, ends, mail, and taking over at any point."""
# ruff: noqa: ARG002 - nodes, tools and environments have given signatures

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta

import anyio
import pytest
from pydantic import JsonValue

from aworld_runtime import Agent, BaseTool
from aworld_runtime.bus.base import Bus, read_all
from aworld_runtime.bus.open import open_bus
from aworld_runtime.environments.base import Reward
from aworld_runtime.errors import Fenced, ModelRejectedError, ToolArgumentsError
from aworld_runtime.events import (
    REFUSE_ABOVE,
    DeliveryDeadLettered,
    DeliveryHandled,
    DuplicateFiltered,
    EpisodeCancelled,
    EpisodeFinished,
    EpisodeTakenOver,
    Event,
    EventData,
    HandoffMade,
    MessagePosted,
    ModelCompleted,
    ModelFailed,
    ModelRequested,
    RecordDropped,
    RewardGiven,
    ToolCalled,
    ToolFailed,
    ToolReturned,
    utc_now,
)
from aworld_runtime.messages import Completion, Task, ToolCall, ToolSpec
from aworld_runtime.models.base import ModelRequest
from aworld_runtime.models.scripted import Reply, ScriptedModel
from aworld_runtime.names import episode_log, tool_queue
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.node import Node, Program
from aworld_runtime.nodes.tool_calls import answer_event
from aworld_runtime.nodes.tool_worker import ToolWorker
from aworld_runtime.replay.replay import replay
from aworld_runtime.tools.base import RemoteTool
from aworld_runtime.trajectory import Episode, episode_of
from tests.episodes import (
    EXACT_MATCH,
    Adder,
    Gate,
    adding,
    adding_program,
    of_kind,
    one,
    owner_of,
    request_episode,
    run_episode,
)
from tests.waiting import wait_until


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with open_bus("memory://") as opened:
        yield opened


class Sleeper(BaseTool):
    """Never answers by itself."""

    def __init__(self) -> None:
        self.started = anyio.Event()

    def get_schema(self) -> ToolSpec:
        return ToolSpec(name="sleep")

    async def run(self, **arguments: JsonValue) -> JsonValue:
        self.started.set()
        await anyio.sleep_forever()


def sleeping_agent() -> tuple[Program, Sleeper]:
    sleeper = Sleeper()
    model = ScriptedModel([ToolCall(id="c1", name="sleep"), "done"])
    return Agent("solver", llm=model, tools=[sleeper]).program(), sleeper


async def test_swarm_answers_with_tools_and_is_scored(bus: Bus) -> None:
    program, model, tool = adding_program()
    requested = request_episode(environment=EXACT_MATCH, expected="checked: 100")
    events = await run_episode(bus, requested, program)
    episode = episode_of(events)
    assert (episode.answer, episode.reason, episode.reward) == ("checked: 100", "answered", 1.0)
    assert sorted(tool.ran) == [(10, 20), (30, 40), (30, 70)]
    assert len(model.requests) == 4
    assert events[-1].type == "episode.finished"
    assert [event.seq for event in events] == list(range(1, len(events) + 1))


async def test_parallel_calls_are_all_answered_before_the_next_turn(bus: Bus) -> None:
    program, model, _ = adding_program()
    await run_episode(bus, request_episode(), program)
    second = model.requests[1]
    assert [m.role for m in second.messages] == ["system", "user", "assistant", *["tool"] * 3]
    assert {m.tool_call_id for m in second.messages if m.role == "tool"} == {"c1", "c2", "c3"}


async def test_unknown_tool_is_told_to_the_agent_which_goes_on(bus: Bus) -> None:
    program, _, _ = adding_program()
    events = await run_episode(bus, request_episode(), program)
    failed = one(events, ToolFailed)
    assert failed.error == "UnknownToolError"
    assert failed.message == "no tool 'divide'; there are: add"


async def test_malformed_call_is_told_to_the_agent_which_goes_on(bus: Bus) -> None:
    model = ScriptedModel([ToolCall(id="c1", name="add", malformed='{"a": 1,'), "sorry"])
    program = Agent("solver", llm=model, tools=[Adder()]).program()
    events = await run_episode(bus, request_episode(), program)
    assert one(events, ToolFailed).error == "ToolArgumentsError"
    assert '{"a": 1,' in model.requests[1].messages[-1].content
    assert one(events, EpisodeFinished).answer == "sorry"


class Recorder:
    """A role that notes the seqs it handles, and takes its time over each."""

    role = "recorder"
    subscriptions = ("tool.", "model.")

    def __init__(self) -> None:
        self.seqs: list[int] = []
        self.busy = False

    async def handle(self, ctx: Context, event: Event) -> None:
        assert not self.busy
        self.busy = True
        for _ in range(event.seq % 3):
            await anyio.lowlevel.checkpoint()
        self.seqs.append(event.seq)
        self.busy = False


async def test_a_role_handles_one_delivery_at_a_time_in_seq_order(bus: Bus) -> None:
    program, _, _ = adding_program()
    recorder = Recorder()
    program = Program(nodes=(*program.nodes, recorder), tools=program.tools)
    events = await run_episode(bus, request_episode(), program)
    subscribed = [e.seq for e in events if e.to is None and e.type.startswith(("tool.", "model."))]
    assert recorder.seqs == subscribed[: len(recorder.seqs)]
    assert len(recorder.seqs) > 5  # it may still be at work when the episode ends
    handled = [
        e.data.seq for e in events if e.role == "recorder" and isinstance(e.data, DeliveryHandled)
    ]
    assert handled == recorder.seqs[: len(handled)]


class Crashing:
    """Says something, then fails."""

    role = "crashing"
    subscriptions = ("episode.requested",)

    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def handle(self, ctx: Context, event: Event) -> None:
        ctx.emit(MessagePosted(content="I am about to fail"), to="nobody")
        raise self.error


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("by zero"), SystemExit(3), asyncio.CancelledError("by itself")]
)
async def test_a_crashing_handler_ends_the_episode_with_its_error(
    bus: Bus, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    events = await run_episode(bus, request_episode(), Program(nodes=(Crashing(error),)))
    dead = one(events, DeliveryDeadLettered)
    name = type(error).__name__
    assert (dead.seq, dead.error, dead.message) == (1, name, str(error))
    assert one(events, MessagePosted).content == "I am about to fail"
    finished = one(events, EpisodeFinished)
    assert (finished.reason, finished.error) == ("failed", f"crashing: {name}: {error}")


class Exiting:
    """An environment whose score is a script with an exit."""

    async def score(self, task: Task, episode: Episode) -> Reward:
        sys.exit("no judge")


async def test_an_environment_that_exits_fails_its_episode(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    requested = request_episode(environment="tests.runtime.test_owner:Exiting")
    program = Agent("solver", llm=ScriptedModel("done")).program()
    finished = one(await run_episode(bus, requested, program), EpisodeFinished)
    assert finished.error == "environment: SystemExit: no judge"


class Bare:
    """An environment whose score is a mere number."""

    async def score(self, task: Task, episode: Episode) -> float:
        return 0.5


async def test_a_score_that_is_no_reward_is_told(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    reference = "tests.runtime.test_owner:Bare"
    program = Agent("solver", llm=ScriptedModel("done")).program()
    events = await run_episode(bus, request_episode(environment=reference), program)
    error = f"environment: TypeError: {reference}.score returned 0.5, not a Reward"
    assert one(events, EpisodeFinished).error == error


class TooLarge:
    """Emits more than a log takes, while another role emits a little."""

    role = "large"
    subscriptions = ("episode.requested",)

    async def handle(self, ctx: Context, event: Event) -> None:
        ctx.emit(MessagePosted(content="x" * (REFUSE_ABOVE + 1)), to="nobody")


async def test_an_event_too_large_is_its_own_handlers_failure(bus: Bus) -> None:
    program, _, _ = adding_program()
    program = Program(nodes=(TooLarge(), *program.nodes), tools=program.tools)
    with anyio.fail_after(5):
        events = await run_episode(bus, request_episode(), program)
    assert one(events, DeliveryDeadLettered).error == "PayloadTooLargeError"
    assert [e.role for e in events if isinstance(e.data, DeliveryDeadLettered)] == ["large"]
    assert one(events, EpisodeFinished).reason == "failed"


class Saying:
    """Says something, and may fail then."""

    role = "saying"
    subscriptions = ("episode.requested",)

    def __init__(self, said: EventData, error: Exception | None = None) -> None:
        self.said = said
        self.error = error

    async def handle(self, ctx: Context, event: Event) -> None:
        ctx.emit(self.said, to="nobody")
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    "said",
    [MessagePosted(content="a\ud800"), DuplicateFiltered(original=9**9999)],
    ids=["half a character", "a huge number"],
)
async def test_an_event_that_no_log_can_hold_is_its_own_handlers_failure(
    bus: Bus, said: EventData
) -> None:
    program, _, _ = adding_program()
    program = Program(nodes=(Saying(said), *program.nodes), tools=program.tools)
    with anyio.fail_after(5):
        events = await run_episode(bus, request_episode(), program)
    assert one(events, DeliveryDeadLettered).error == "MalformedEventError"
    assert [e.role for e in events if isinstance(e.data, DeliveryDeadLettered)] == ["saying"]
    assert "saying: MalformedEventError: " in str(one(events, EpisodeFinished).error)


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "error, told",
    [
        (ValueError("a\ud800"), "ValueError: a?"),
        (MuteError(), "MuteError: no message, its __str__ raised RuntimeError"),
    ],
)
async def test_a_handler_that_fails_in_a_way_no_log_can_hold_ends_its_episode(
    bus: Bus, error: Exception, told: str
) -> None:
    program = Program(nodes=(Saying(MessagePosted(content="said"), error),))
    with anyio.fail_after(5):
        events = await run_episode(bus, request_episode(), program)
    assert one(events, EpisodeFinished).error == f"saying: {told}"
    assert one(events, MessagePosted).content == "said"


async def test_a_model_answer_that_no_log_can_hold_fails_its_episode(bus: Bus) -> None:
    program = Agent("solver", llm=ScriptedModel("a\ud800")).program()
    with anyio.fail_after(5):
        events = await run_episode(bus, request_episode(), program)
    assert one(events, EpisodeFinished).reason == "failed"
    assert "MalformedEventError" in str(one(events, EpisodeFinished).error)


class Refusing(ScriptedModel):
    """A client that fails with what can't be written as it is."""

    def __init__(self, error: Exception) -> None:
        super().__init__("never")
        self.error = error

    async def complete(self, request: ModelRequest) -> Completion:
        raise self.error


@pytest.mark.parametrize(
    "error, told",
    [
        (ModelRejectedError("a\ud800"), "a?"),
        (MuteError(), "MuteError: no message, its __str__ raised RuntimeError"),
    ],
)
async def test_a_model_error_that_no_log_can_hold_is_recorded_as_text(
    bus: Bus, error: Exception, told: str
) -> None:
    program = Agent("solver", llm=Refusing(error)).program()
    events = await run_episode(bus, request_episode(), program)
    assert one(events, ModelFailed).message == told
    assert one(events, EpisodeFinished).reason == "failed"


class Impatient:
    """Gives its model no time, and goes on without it."""

    role = "impatient"
    subscriptions = ("episode.requested",)

    async def handle(self, ctx: Context, event: Event) -> None:
        with anyio.move_on_after(0):
            await ctx.complete(ScriptedModel("too late"))
        ctx.emit(EpisodeFinished(answer="without"))


async def test_a_handler_that_cancels_its_own_model_call_does_not_block_the_log(bus: Bus) -> None:
    with anyio.fail_after(5):
        events = await run_episode(bus, request_episode(), Program(nodes=(Impatient(),)))
    assert one(events, ModelRequested)
    assert one(events, EpisodeFinished).answer == "without"


async def test_an_episode_in_which_nothing_is_left_to_do_ends_as_quiescent(bus: Bus) -> None:
    events = await run_episode(bus, request_episode(), Program(nodes=()))
    assert one(events, EpisodeFinished).reason == "quiescent"


class PassingOn:
    """Gives every message to the other one."""

    def __init__(self, role: str, other: str) -> None:
        self.role = role
        self.subscriptions = ("episode.requested",) if role == "a" else ()
        self._other = other

    async def handle(self, ctx: Context, event: Event) -> None:
        ctx.emit(HandoffMade(target=self._other), to=self._other)


async def test_roles_that_hand_over_to_each_other_for_ever_end_the_episode(bus: Bus) -> None:
    program = Program(nodes=(PassingOn("a", "b"), PassingOn("b", "a")), max_hops=100)
    events = await run_episode(bus, request_episode(), program)
    finished = one(events, EpisodeFinished)
    assert finished.reason == "hop_limit"
    assert "the last of 101 events that follow from one another" in (finished.error or "")
    assert len(of_kind(events, HandoffMade)) == 101


async def test_hops_count_what_followed_from_what(bus: Bus) -> None:
    program, _, _ = adding_program()
    events = await run_episode(bus, request_episode(), program)
    by_id = {event.id: event for event in events}
    assert [e.hops for e in events if e.causation_id is None] == [0]
    caused = [e for e in events if e.causation_id is not None]
    assert [e.hops for e in caused] == [by_id[e.causation_id or ""].hops + 1 for e in caused]


async def test_an_agent_is_told_of_a_tool_that_cancels_itself(bus: Bus) -> None:
    class Cancelling(BaseTool):
        def get_schema(self) -> ToolSpec:
            return ToolSpec(name="cancel")

        async def run(self, **arguments: JsonValue) -> JsonValue:
            raise asyncio.CancelledError

    model = ScriptedModel([ToolCall(id="c1", name="cancel"), "done"])
    program = Agent("solver", llm=model, tools=[Cancelling()]).program()
    with anyio.fail_after(5):
        events = await run_episode(bus, request_episode(), program)
    assert one(events, ToolFailed).message == "CancelledError: the tool cancelled itself"
    assert one(events, EpisodeFinished).answer == "done"


async def test_deadline_ends_the_episode_and_closes_the_open_call(bus: Bus) -> None:
    program, _ = sleeping_agent()
    soon = utc_now() + timedelta(seconds=0.05)
    events = await run_episode(bus, request_episode(deadline=soon), program)
    assert one(events, EpisodeFinished).reason == "time_limit"
    assert [e.type for e in events[-2:]] == ["tool.failed", "episode.finished"]
    assert one(events, ToolFailed).error == "Cancelled"


@pytest.mark.parametrize("group", [None, "r.g00001"])
async def test_an_episode_of_a_group_is_given_up_when_three_workers_have_died_at_the_same_place(
    bus: Bus, group: str | None
) -> None:
    requested = request_episode(timeout_s=1.5).model_copy(update={"group_id": group})
    for worker in ("w1", "w2", "w3"):
        program, sleeper = sleeping_agent()
        owner = owner_of(bus, requested, program, worker=worker)
        async with anyio.create_task_group() as dying:
            dying.start_soon(owner.run)
            await sleeper.started.wait()
            dying.cancel_scope.cancel()
    program, sleeper = sleeping_agent()
    await owner_of(bus, requested, program, worker="w4").run()
    events = await read_all(bus, episode_log(requested.episode_id or ""))
    assert [e.type for e in events[-2:]] == ["tool.failed", "episode.finished"]
    finished = one(events, EpisodeFinished)
    if group is None:
        assert (sleeper.started.is_set(), finished.reason) == (True, "time_limit")
    else:
        assert (sleeper.started.is_set(), finished.reason) == (False, "failed")
        assert finished.error == (
            "3 workers died in it, one after another, and none got any further"
        )


async def test_a_deadline_that_has_passed_starts_nothing(bus: Bus) -> None:
    past = utc_now() - timedelta(seconds=1)
    model = ScriptedModel("late", delay_s=5)
    program = Agent("solver", llm=model).program()
    events = await run_episode(bus, request_episode(deadline=past), program)
    assert one(events, EpisodeFinished).reason == "time_limit"


async def test_the_time_an_episode_may_run_ends_it(bus: Bus) -> None:
    program, _ = sleeping_agent()
    events = await run_episode(bus, request_episode(timeout_s=0.05), program)
    assert one(events, EpisodeFinished).reason == "time_limit"
    assert one(events, EpisodeFinished).error == "not done 0.05 s after worker w1 began"


async def test_the_time_an_episode_may_run_begins_with_its_claim(bus: Bus) -> None:
    requested = request_episode(timeout_s=0.2)
    await anyio.sleep(0.25)
    program, _, _ = adding_program()
    events = await run_episode(bus, requested, program)
    assert one(events, EpisodeFinished).reason == "answered"


def answer(called: Event, source: str, **changed: object) -> Event:
    made = answer_event(called, ToolReturned(name="add", content="forged"), source=source)
    return made.model_copy(update=changed)


async def refused(bus: Bus) -> None:
    async def buried() -> bool:
        return bool(await bus.dead_letters("mail"))

    await wait_until(buried, description="the dead letter")


FORGED: dict[str, Callable[[Event], Event]] = {
    "role solver runs in the owner itself": lambda called: answer(called, "solver/x"),
    "role worker runs in the owner itself": lambda called: answer(called, "worker/mallory"),
    "other/x, and add was asked": lambda called: answer(called, "other/x"),
    "the call nobody, which nobody has made": lambda called: answer(
        called, "add/x", correlation_id="nobody"
    ),
    "it is of episode another": lambda called: answer(called, "add/x", episode_id="another"),
    "only an episode's owner says episode.finished": lambda called: called.caused(
        EpisodeFinished(answer="forged"), source="add/x"
    ),
    "only an episode's owner says record.dropped": lambda called: called.caused(
        RecordDropped(seqs=(called.seq,)), source="add/x"
    ),
    "only an episode's owner says delivery.handled": lambda called: called.caused(
        DeliveryHandled(seq=1), source="cli/x"
    ),
}


@pytest.mark.parametrize("why", FORGED)
async def test_forged_mail_is_a_dead_letter_and_no_part_of_the_episode(
    bus: Bus, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    owner = owner_of(bus, request_episode(), remote_program())
    forged: Event | None = None
    async with (
        bus.consume(tool_queue("add"), consumer="c") as calls,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(owner.run)
        called = (await calls.take()).event
        forged = FORGED[why](called)
        await bus.send_mail(owner.log, forged)
        await refused(bus)
        await bus.send_mail(owner.log, answer(called, "add/t1", trust="system"))
    assert forged is not None
    (letter,) = await bus.dead_letters("mail")
    assert (letter.event, letter.log) == (forged, owner.log)
    assert "ForgedEventError" in letter.reason
    assert why in letter.reason
    assert why in caplog.text
    events = await read_all(bus, owner.log)
    assert forged.id not in {event.id for event in events}
    assert one(events, EpisodeFinished).answer == "five"
    (returned,) = [event for event in events if isinstance(event.data, ToolReturned)]
    assert (returned.source, returned.trust) == ("add/t1", "tool")


async def test_a_tool_that_runs_in_the_owner_gets_no_answer_by_mail(bus: Bus) -> None:
    gate = Gate()
    model = ScriptedModel([ToolCall(id="c", name="gate"), "done"])
    owner = owner_of(bus, request_episode(), Agent("solver", llm=model, tools=[gate]).program())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(owner.run)
        await gate.reached.wait()
        called = next(e for e in owner.events if isinstance(e.data, ToolCalled))
        await bus.send_mail(owner.log, answer(called, "gate/mallory"))
        await refused(bus)
        gate.open.set()
    assert one(await read_all(bus, owner.log), ToolReturned).content == "open"


async def test_cancel_by_mail_ends_the_episode(bus: Bus) -> None:
    program, sleeper = sleeping_agent()
    requested = request_episode()
    owner = owner_of(bus, requested, program)
    cancel = Event.of(EpisodeCancelled(reason="not needed"), source="cli/1")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(owner.run)
        await sleeper.started.wait()
        await bus.send_mail(owner.log, cancel)
        await bus.send_mail(owner.log, cancel)
    events = await read_all(bus, owner.log)
    finished = one(events, EpisodeFinished)
    assert (finished.reason, finished.error) == ("cancelled", "not needed")
    assert one(events, EpisodeCancelled)
    assert one(events, ToolFailed).error == "Cancelled"


async def test_every_call_of_a_finished_episode_has_exactly_one_answer(bus: Bus) -> None:
    for program in (adding_program()[0], sleeping_agent()[0]):
        soon = utc_now() + timedelta(seconds=0.05)
        events = await run_episode(bus, request_episode(deadline=soon), program)
        calls = sorted(e.id for e in events if isinstance(e.data, ToolCalled))
        answers = [e for e in events if isinstance(e.data, ToolReturned | ToolFailed)]
        assert sorted(str(e.correlation_id) for e in answers) == calls


# --- remote tools ------------------------------------------------------------------------------------------------------


def remote_program(timeout_s: float = 5) -> Program:
    remote = RemoteTool(Adder().get_schema(), timeout_s=timeout_s)
    model = ScriptedModel([ToolCall(id="c1", name="add", arguments={"a": 2, "b": 3}), "five"])
    return Agent("solver", llm=model, tools=[remote]).program()


async def test_a_remote_tool_answers_by_mail(bus: Bus) -> None:
    events: list[Event] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ToolWorker(bus, {"add": Adder()}, name="t1").run)
        events = await run_episode(bus, request_episode(), remote_program())
        tasks.cancel_scope.cancel()
    returned = one(events, ToolReturned)
    assert returned.content == 5
    assert next(e for e in events if e.data is returned).source == "add/t1"


class Unspeakable(BaseTool):
    """Raises what can't be written as it is."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def get_schema(self) -> ToolSpec:
        return Adder().get_schema()

    async def run(self, **arguments: JsonValue) -> JsonValue:
        raise self.error


@pytest.mark.parametrize(
    "error, told",
    [
        (ToolArgumentsError("a\ud800"), "a?"),
        (MuteError(), "MuteError: no message, its __str__ raised RuntimeError"),
        (asyncio.CancelledError(), "CancelledError: the tool cancelled itself"),
    ],
)
async def test_a_tool_worker_tells_whatever_its_tool_raises(
    bus: Bus, error: BaseException, told: str
) -> None:
    events: list[Event] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ToolWorker(bus, {"add": Unspeakable(error)}, name="t1").run)
        events = await run_episode(bus, request_episode(), remote_program())
        tasks.cancel_scope.cancel()
    assert one(events, ToolFailed).message == told
    assert one(events, EpisodeFinished).answer == "five"


async def test_a_tool_worker_survives_what_is_no_call(bus: Bus) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ToolWorker(bus, {"add": Adder()}, name="t1").run)
        await bus.put("tool:add", request_episode())
        async with anyio.create_task_group() as running:
            running.start_soon(run_episode, bus, request_episode(), remote_program())
        tasks.cancel_scope.cancel()
    (letter,) = await bus.dead_letters("tool:add")
    assert letter.reason == "expected tool.called, got episode.requested"


async def test_a_remote_tool_that_nobody_serves_times_out_and_the_agent_is_told(bus: Bus) -> None:
    events = await run_episode(bus, request_episode(), remote_program(timeout_s=0.05))
    assert one(events, ToolFailed).error == "ToolTimeoutError"
    assert one(events, EpisodeFinished).answer == "five"


async def test_a_call_that_two_tool_workers_answered_has_one_answer(bus: Bus) -> None:
    """Tools see a call at least once, so its answer may come twice, even in one batch of mail."""
    requested = request_episode()
    log = episode_log(requested.episode_id or "")
    async with anyio.create_task_group() as tasks, bus.consume("tool:add", consumer="x") as queue:
        tasks.start_soon(run_episode, bus, requested, remote_program())
        delivery = await queue.take()
        for worker in ("t1", "t2"):
            answer = answer_event(
                delivery.event, ToolReturned(name="add", content=5), source=f"add/{worker}"
            )
            await bus.reply(delivery.event, answer)
        await delivery.ack()
    assert one(await read_all(bus, log), ToolReturned).content == 5


# --- taking over -------------------------------------------------------------------------------------------------------


async def finished_log(*, environment: str | None = EXACT_MATCH) -> list[Event]:
    async with open_bus("memory://") as bus:
        requested = request_episode(environment=environment, expected="checked: 100")
        return await run_episode(bus, requested, adding_program()[0])


def answered(events: list[Event], kind: type[ModelRequested] | type[ToolCalled]) -> set[str]:
    asked = {e.id for e in events if isinstance(e.data, kind)}
    return asked & {str(e.correlation_id) for e in events}


async def take_over(prefix: list[Event]) -> None:
    """Take the log over, finish it, and check that nothing that was done is done again."""
    program, model, tool = adding_program()
    async with open_bus("memory://") as bus:
        log = episode_log(prefix[0].episode_id or "")
        await bus.append(log, 0, prefix)
        await owner_of(bus, prefix[0], program, worker="w2").run()
        events = await read_all(bus, log)
    assert [e.id for e in events[: len(prefix)]] == [e.id for e in prefix]
    episode = episode_of(events)
    assert (episode.answer, episode.reason, episode.reward) == ("checked: 100", "answered", 1.0)
    assert len(of_kind(events, RewardGiven)) == 1
    assert {r.key for r in model.requests}.isdisjoint(answered(prefix, ModelRequested))
    assert len(model.requests) == 4 - len(of_kind(prefix, ModelCompleted))
    adds = [e for e in events if isinstance(e.data, ToolCalled) and e.data.call.name == "add"]
    assert len(adds) == 3
    assert len(tool.ran) == 3 - len(of_kind(prefix, ToolReturned))
    answers = [e.correlation_id for e in events if isinstance(e.data, ToolReturned | ToolFailed)]
    assert len(answers) == len(set(answers)) == 4
    report = await replay(events, program)
    assert report.identical, report.divergence


async def test_a_model_call_whose_owner_died_is_made_again_under_its_key(bus: Bus) -> None:
    requested = request_episode()
    slow, quick = ScriptedModel("late", delay_s=60), ScriptedModel("done")
    async with anyio.create_task_group() as dying:
        dying.start_soon(owner_of(bus, requested, Agent("solver", llm=slow).program()).run)
        await wait_until(lambda: bool(slow.requests), description="the call")
        dying.cancel_scope.cancel()
    await owner_of(bus, requested, Agent("solver", llm=quick).program(), worker="w2").run()
    events = await read_all(bus, episode_log(requested.episode_id or ""))
    (asked,) = (e for e in events if isinstance(e.data, ModelRequested))
    assert [r.key for r in (*slow.requests, *quick.requests)] == [asked.id] * 2
    assert one(events, EpisodeFinished).answer == "done"


async def test_a_log_cut_anywhere_is_taken_over_and_ends_the_same() -> None:
    whole = await finished_log()
    for cut in range(1, len(whole)):
        try:
            await take_over(whole[:cut])
        except BaseException as error:
            error.add_note(f"cut after seq {cut}: {whole[cut - 1].type} of {whole[cut - 1].role}")
            raise


async def test_a_log_cut_anywhere_twice_is_taken_over_and_ends_the_same() -> None:
    """Every third cut of a log that had been taken over already."""
    whole = await finished_log()
    half = len(whole) // 2
    program, _, _ = adding_program()
    async with open_bus("memory://") as bus:
        log = episode_log(whole[0].episode_id or "")
        await bus.append(log, 0, whole[:half])
        await owner_of(bus, whole[0], program, worker="w2").run()
        again = await read_all(bus, log)
    for cut in range(half + 1, len(again), 3):
        await take_over(again[:cut])


async def test_a_log_cut_among_calls_that_were_refused_is_taken_over_and_makes_none() -> None:
    model, tool = ScriptedModel(adding), Adder()
    program = Agent("solver", llm=model, tools=[tool], max_turns=1).program()
    async with open_bus("memory://") as bus:
        whole = await run_episode(bus, request_episode(), program)
    for cut in range(1, len(whole)):
        async with open_bus("memory://") as bus:
            log = episode_log(whole[0].episode_id or "")
            await bus.append(log, 0, whole[:cut])
            await owner_of(bus, whole[0], program, worker="w2").run()
            events = await read_all(bus, log)
        assert one(events, EpisodeFinished).reason == "turn_limit", cut
        assert not tool.ran, cut
        assert len(of_kind(events, ToolFailed)) == len(of_kind(events, ToolCalled)) == 3
        report = await replay(events, program)
        assert report.identical, (cut, report.divergence)


async def test_a_finished_log_is_not_touched() -> None:
    whole = await finished_log()
    program, model, _ = adding_program()
    async with open_bus("memory://") as bus:
        log = episode_log(whole[0].episode_id or "")
        await bus.append(log, 0, whole)
        await owner_of(bus, whole[0], program).run()
        assert len(await read_all(bus, log)) == len(whole)
    assert not model.requests


async def test_an_owner_whose_log_was_taken_over_is_fenced(bus: Bus) -> None:
    def reply(request: ModelRequest) -> Reply:
        return "an answer" if request.messages else ""

    requested = request_episode()
    log = episode_log(requested.episode_id or "")
    program = Agent("solver", llm=ScriptedModel(reply, delay_s=0.05)).program()
    owner = owner_of(bus, requested, program)

    async def usurp() -> None:
        await wait_until(lambda: bool(of_kind(owner.events, ModelRequested)))
        taken = Event.of(EpisodeTakenOver(worker="w2"), source="worker/w2")
        await bus.append(log, len(owner.events), [taken])

    fenced = False
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(usurp)
            await owner.run()
    except* Fenced:
        fenced = True
    assert fenced
    assert (await read_all(bus, log))[-1].type == "episode.taken_over"


class Lossy(Adder):
    """The first time, the bus forgets the log's events after `kept` while it runs."""

    def __init__(self, bus: Bus, log: str, kept: int, *, then: Sequence[Event] = ()) -> None:
        super().__init__()
        self.lost: list[Event] = []
        self._bus, self._log, self._kept, self._then = bus, log, kept, then

    async def run(self, **arguments: JsonValue) -> JsonValue:
        if not self.lost:
            self.lost = await read_all(self._bus, self._log)
            await self._bus.unlink(self._log, keep_s=0)
            await self._bus.restore(self._log, self.lost[: self._kept])
            await self._bus.append(self._log, self._kept, self._then)
        return await super().run(**arguments)


@pytest.mark.parametrize("kept", range(5))
async def test_what_the_bus_lost_of_a_log_its_owner_puts_back(bus: Bus, kept: int) -> None:
    requested = request_episode()
    tool = Lossy(bus, episode_log(requested.episode_id or ""), kept)
    model = ScriptedModel([ToolCall(id="c1", name="add", arguments={"a": 1, "b": 2}), "three"])
    agent = Agent("solver", llm=model, tools=[tool])
    events = await run_episode(bus, requested, agent.program())
    assert len(tool.lost) > kept
    assert [e.id for e in events[: len(tool.lost)]] == [e.id for e in tool.lost]
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    assert one(events, EpisodeFinished).answer == "three"
    assert len(tool.ran) == 1
    report = await replay(events, agent.program())
    assert report.identical, report.divergence


async def test_what_the_bus_lost_of_a_log_is_not_put_back_over_another_owners_events(
    bus: Bus,
) -> None:
    requested = request_episode()
    log = episode_log(requested.episode_id or "")
    taken = Event.of(EpisodeTakenOver(worker="w2"), source="worker/w2")
    tool = Lossy(bus, log, 3, then=[taken])
    model = ScriptedModel([ToolCall(id="c1", name="add", arguments={"a": 1, "b": 2}), "three"])
    with pytest.RaisesGroup(Fenced, flatten_subgroups=True):
        await run_episode(bus, requested, Agent("solver", llm=model, tools=[tool]).program())
    assert (await read_all(bus, log))[-1].id == taken.id


async def test_a_cancellation_that_the_last_owner_only_recorded_still_ends_it() -> None:
    whole = await finished_log()
    cancelled = Event.of(EpisodeCancelled(reason="not needed"), source="cli/1").at(6)
    program, _, _ = adding_program()
    async with open_bus("memory://") as bus:
        log = episode_log(whole[0].episode_id or "")
        await bus.append(log, 0, [*whole[:5], cancelled])
        await owner_of(bus, whole[0], program).run()
        assert one(await read_all(bus, log), EpisodeFinished).reason == "cancelled"


class Fickle:
    """Does something else each time."""

    role = "fickle"
    subscriptions = ("episode.requested",)

    def __init__(self, word: str) -> None:
        self.word = word

    async def handle(self, ctx: Context, event: Event) -> None:
        try:
            ctx.emit(MessagePosted(content=self.word), to="nobody")
        except Exception:  # noqa: BLE001 - swallowing is what this node is for
            return


async def test_a_takeover_by_code_that_strays_from_the_record_fails_loudly() -> None:
    nodes: tuple[Node, ...] = (Fickle("one"),)
    async with open_bus("memory://") as bus:
        requested = request_episode()
        events = await run_episode(bus, requested, Program(nodes=nodes))
    posted = next(e.seq for e in events if isinstance(e.data, MessagePosted))
    async with open_bus("memory://") as bus:
        log = episode_log(requested.episode_id or "")
        await bus.append(log, 0, events[:posted])
        await owner_of(bus, requested, Program(nodes=(Fickle("two"),))).run()
        finished = one(await read_all(bus, log), EpisodeFinished)
    assert finished.reason == "failed"
    assert "DivergenceError" in (finished.error or "")
