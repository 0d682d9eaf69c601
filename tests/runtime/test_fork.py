"""Forks: an episode that begins as another did, and goes on live, perhaps with something changed."""
# ruff: noqa: ARG002 - nodes and tools have a given signature

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path

import anyio
import pytest
from pydantic import JsonValue

from aworld_runtime import Agent, Runtime
from aworld_runtime.archive.logs import Logs
from aworld_runtime.archive.verify import compare
from aworld_runtime.bus import open_bus
from aworld_runtime.bus.base import read_all, read_own
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.errors import AWorldError, ConfigError, EventError, NotFoundError, UsageError
from aworld_runtime.events import (
    AnswerProposed,
    DeliveryHandled,
    EpisodeCancelled,
    EpisodeClaimed,
    EpisodeFinished,
    EpisodeForked,
    EpisodePaused,
    EpisodeRequested,
    EpisodeTakenOver,
    Event,
    EventData,
    HumanAnswered,
    HumanAsked,
    LogRestored,
    MessagePosted,
    ModelCompleted,
    RecordDropped,
    ToolCalled,
    ToolReturned,
    ValueRecorded,
    new_id,
)
from aworld_runtime.messages import Task, ToolCall
from aworld_runtime.models.base import ModelRequest
from aworld_runtime.models.scripted import Reply, ScriptedModel
from aworld_runtime.names import EPISODES_QUEUE, episode_log
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.node import Program, Runnable
from aworld_runtime.nodes.worker import Worker
from aworld_runtime.replay.fork import Changes, begin_fork
from aworld_runtime.replay.replay import replay
from aworld_runtime.store import open_store
from tests.episodes import EXACT_MATCH, Adder, Gate, adding, adding_swarm, of_kind, one, owner_of
from tests.faults import restart_empty
from tests.replayed import summing_agent
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio

SWARM = "tests.replayed:swarm"


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


@pytest.fixture
async def runtime(store: str) -> AsyncIterator[Runtime]:
    async with Runtime(bus="memory://", store=store) as opened:
        yield opened


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[PrivateServer]:
    async with PrivateServer(tmp_path / "server") as started:
        yield started


async def log_of(runtime: Runtime, episode: str) -> list[Event]:
    return await read_all(runtime.bus, episode_log(episode))


def before(log: list[Event], kind: type[EventData], *, number: int = 0) -> int:
    """The seq in front of an event of this kind."""
    return [event.seq for event in log if isinstance(event.data, kind)][number] - 1


async def test_a_fork_at_any_event_ends_as_its_parent_did_and_replays(runtime: Runtime) -> None:
    task = Task(id="t1", prompt="Add.", data={"expected": "checked: 100"}, environment=EXACT_MATCH)
    parent = await runtime.run(SWARM, task)
    log = await log_of(runtime, parent.id)
    forks = {at: await runtime.fork(parent.id, at=at) for at in range(1, len(log))}
    for at, fork in forks.items():
        episode = await runtime.result(fork)
        assert (episode.id, episode.answer, episode.reward) == (fork, "checked: 100", 1.0)
        whole = await log_of(runtime, fork)
        assert whole[:at] == log[:at]
        assert [event.seq for event in whole] == list(range(1, len(whole) + 1))
        assert {event.episode_id for event in whole[at:]} == {fork}
        assert whole[at].data == EpisodeForked(parent=episode_log(parent.id), at=at)
        assert not of_kind(whole[at:], EpisodeTakenOver)
        assert (
            await replay(whole, adding_swarm(ScriptedModel(adding), Adder()).program())
        ).identical
    assert await log_of(runtime, parent.id) == log


async def test_another_tool_answer_gives_another_outcome(runtime: Runtime) -> None:
    parent = await runtime.run(summing_agent(), "Add.")
    log = await log_of(runtime, parent.id)
    tool = Adder()
    fork = await runtime.fork(
        parent.id,
        at=before(log, ToolReturned),
        edit={"data.content": 100},
        program=summing_agent(tool),
    )
    assert (parent.answer, (await runtime.result(fork)).answer) == ("13", "110")
    assert tool.ran == [(100, 10)]
    assert await log_of(runtime, parent.id) == log
    whole = await log_of(runtime, fork)
    assert one(whole, EpisodeForked).edited == ("data.content",)
    edited = next(event for event in whole if event.data == ToolReturned(name="add", content=100))
    original = log[before(log, ToolReturned)]
    assert edited.id != original.id
    assert (edited.correlation_id, edited.trust, edited.to) == (
        original.correlation_id,
        "tool",
        "adder",
    )


async def test_a_call_that_was_open_is_made_again_and_not_one_that_was_answered(
    runtime: Runtime,
) -> None:
    parent = await runtime.run(summing_agent(), "Add.")
    log = await log_of(runtime, parent.id)
    for at, ran in (
        (before(log, ToolReturned), [(1, 2), (3, 10)]),
        (before(log, ToolReturned) + 1, [(3, 10)]),
        (before(log, ToolReturned, number=1), [(3, 10)]),
        (before(log, ToolReturned, number=1) + 1, []),
    ):
        tool = Adder()
        fork = await runtime.fork(parent.id, at=at, program=summing_agent(tool))
        assert (await runtime.result(fork)).answer == "13"
        assert tool.ran == ran


@pytest.mark.parametrize(
    "kind, edit, answer",
    [
        (ToolCalled, {"data.call.arguments.a": 5}, "17"),
        (ModelCompleted, {"data.tool_calls.0.arguments": {"a": 6, "b": 2}}, "18"),
        (MessagePosted, {"data.content": "Add, please."}, "13"),
        (AnswerProposed, {"data.text": "in other words"}, "in other words"),
    ],
)
async def test_what_a_handler_said_can_be_edited(
    runtime: Runtime, kind: type[EventData], edit: Mapping[str, JsonValue], answer: str
) -> None:
    """Its handler runs again, and the edited event stands for what it says in that place; in a replay, too."""
    parent = await runtime.run(summing_agent(), "Add.")
    at = before(await log_of(runtime, parent.id), kind)
    fork = await runtime.fork(parent.id, at=at, edit=edit, program=summing_agent())
    assert (await runtime.result(fork)).answer == answer
    whole = await log_of(runtime, fork)
    report = await replay(whole, summing_agent().program())
    assert report.identical, report.divergence
    assert not of_kind(whole, RecordDropped)


async def test_an_edited_completion_claims_no_tokens(store: str) -> None:
    sampled = ModelCompleted(text="a", token_ids=(1, 2), behavior_logprobs=(-0.1, -0.2))
    async with open_bus("memory://") as bus, open_store(store) as opened:
        requested = EpisodeRequested(task=Task(id="t", prompt="?"), program="m:a")
        events = [
            Event.of(requested, source="r/1", episode_id="e"),
            Event.of(sampled, source="adder/1", policy="p", policy_version=3, episode_id="e"),
        ]
        await bus.append(episode_log("e"), 0, events)
        logs = Logs(bus, opened)
        *_, edited = await begin_fork(
            logs, "e", 1, Changes(edit={"data.text": "b"}), source="r/1", run_id="r"
        )
    assert edited.data == ModelCompleted(text="b")
    assert (edited.policy, edited.policy_version) == (None, None)


async def test_what_a_handler_does_not_repeat_of_its_record_counts_no_more(
    runtime: Runtime,
) -> None:
    """Another program goes another way than the record of a handler that had not ended."""
    parent = await runtime.run(summing_agent(), "Add.")
    at = before(await log_of(runtime, parent.id), ToolCalled) + 1
    tool = Adder()
    other = Agent(
        "adder",
        llm=ScriptedModel([ToolCall(id="d1", name="add", arguments={"a": 7, "b": 7}), "done"]),
        tools=[tool],
        system_prompt="Add otherwise.",
    )
    fork = await runtime.fork(parent.id, at=at, program=other)
    episode = await runtime.result(fork)
    assert (episode.answer, tool.ran) == ("done", [(7, 7)])
    whole = await log_of(runtime, fork)
    assert [type(whole[seq - 1].data).type for seq in one(whole, RecordDropped).seqs] == [
        "model.requested",
        "model.completed",
        "tool.called",
    ]
    assert [len(t.turns) for t in episode.trajectories] == [2]
    again = Agent("adder", llm=ScriptedModel([]), tools=[Adder()], system_prompt="Add otherwise.")
    report = await replay(whole, again.program())
    assert report.identical, report.divergence


class Sayer:
    """Says some things to a listener, who ends the episode with what he has heard."""

    role = "sayer"
    subscriptions = ("episode.requested",)

    def __init__(self, *said: str) -> None:
        self.said = said

    async def handle(self, ctx: Context, event: Event) -> None:
        for text in self.said:
            ctx.emit(MessagePosted(content=text), to="listener")

    def program(self) -> Program:
        return Program(nodes=(self, Listener()))


class Listener:
    role = "listener"
    subscriptions: tuple[str, ...] = ()

    async def handle(self, ctx: Context, event: Event) -> None:
        if isinstance(event.data, MessagePosted) and event.data.content == "end":
            heard = [e.data.content for e in ctx.history if isinstance(e.data, MessagePosted)]
            ctx.emit(EpisodeFinished(answer=" ".join(heard)))


async def test_a_message_that_is_not_repeated_reaches_nobody(runtime: Runtime) -> None:
    parent = await runtime.run(Sayer("one", "two", "end"), "Say.")
    log = await log_of(runtime, parent.id)
    at = before(log, MessagePosted, number=1) + 1
    fork = await runtime.fork(parent.id, at=at, program=Sayer("one", "other", "end"))
    assert (await runtime.result(fork)).answer == "one other end"
    whole = await log_of(runtime, fork)
    assert one(whole, RecordDropped).seqs == (at,)
    heard = [e.data.seq for e in whole if isinstance(e.data, DeliveryHandled)]
    assert heard[1:] == sorted(heard[1:])
    fork = await runtime.fork(parent.id, at=at, program=Sayer("one"))
    episode = await runtime.result(fork)
    assert episode.reason == "quiescent"
    assert one(await log_of(runtime, fork), RecordDropped).seqs == (at,)


class Recorder:
    """Records two values and answers with them; each is another one every time."""

    role = "recorder"
    subscriptions = ("episode.requested",)

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds
        self.produced: list[str] = []

    async def handle(self, ctx: Context, event: Event) -> None:
        async def produce() -> JsonValue:
            self.produced.append(new_id())
            return self.produced[-1]

        values = [str(await ctx.record(kind, produce)) for kind in self.kinds]
        ctx.emit(EpisodeFinished(answer=" ".join(values)))

    def program(self) -> Program:
        return Program(nodes=(self,))


async def test_a_recorded_value_is_kept_only_where_the_same_is_asked_for(runtime: Runtime) -> None:
    first = Recorder("dice", "coin")
    parent = await runtime.run(first, "Go.")
    at = before(await log_of(runtime, parent.id), ValueRecorded, number=1)
    same = Recorder("dice", "coin")
    fork = await runtime.fork(parent.id, at=at, program=same)
    kept = await runtime.result(fork)
    assert kept.answer.split() == [first.produced[0], *same.produced]
    other = Recorder("cards", "coin")
    fork = await runtime.fork(parent.id, at=at, program=other)
    assert (await runtime.result(fork)).answer.split() == other.produced
    whole = await log_of(runtime, fork)
    assert one(whole, RecordDropped).seqs == (at,)
    assert (await replay(whole, other.program())).identical
    edit: dict[str, JsonValue] = {"data.value": "heads"}
    fork = await runtime.fork(parent.id, at=at, edit=edit, program=Recorder("dice", "coin"))
    assert (await runtime.result(fork)).answer == f"{first.produced[0]} heads"


class Breaking:
    """Says something, and fails until it is mended."""

    role = "breaking"
    subscriptions = ("episode.requested",)

    def __init__(self, *, mended: bool) -> None:
        self.mended = mended

    async def handle(self, ctx: Context, event: Event) -> None:
        ctx.emit(MessagePosted(content="so far"), to="nobody")
        if not self.mended:
            raise ValueError("broken")
        ctx.emit(EpisodeFinished(answer="mended"))

    def program(self) -> Program:
        return Program(nodes=(self,))


async def test_a_failed_episode_goes_on_with_mended_code_from_where_it_failed(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    parent = await runtime.run(Breaking(mended=False), "Go.")
    assert (parent.reason, parent.error) == ("failed", "breaking: ValueError: broken")
    log = await log_of(runtime, parent.id)
    for at in range(1, len(log)):
        fork = await runtime.fork(parent.id, at=at, program=Breaking(mended=True))
        assert (await runtime.result(fork)).answer == "mended"
        whole = await log_of(runtime, fork)
        assert len(of_kind(whole, MessagePosted)) == 1
        assert (await replay(whole, Breaking(mended=True).program())).identical


class Asker:
    """Asks a person, and ends the episode with what it is told."""

    role = "asker"
    subscriptions = ("episode.requested",)

    def __init__(self, *questions: str) -> None:
        self.questions = questions

    async def handle(self, ctx: Context, event: Event) -> None:
        if isinstance(event.data, HumanAnswered):
            ctx.emit(EpisodeFinished(answer=event.data.answer))
        for question in self.questions if isinstance(event.data, EpisodeRequested) else ():
            ctx.ask(question)

    def program(self) -> Program:
        return Program(nodes=(self,))


async def test_a_fork_waits_for_a_person_unless_it_no_longer_asks(runtime: Runtime) -> None:
    parent = await runtime.submit(Asker("Which?"), "Ask.")

    async def asked() -> bool:
        return bool(of_kind(await log_of(runtime, parent), DeliveryHandled))

    await wait_until(asked, description="the question")
    log = await log_of(runtime, parent)
    at = before(log, HumanAsked) + 1
    for handled in (0, 1):
        fork = await runtime.fork(parent, at=at + handled, program=Asker("Which?"))
        await runtime.answer(fork, "this")
        assert (await runtime.result(fork)).answer == "this"
    fork = await runtime.fork(parent, at=at, program=Asker())
    with anyio.fail_after(5):
        assert (await runtime.result(fork)).reason == "quiescent"
    await runtime.answer(parent, "that")
    assert (await runtime.result(parent)).answer == "that"


@pytest.mark.parametrize(
    "first, then, at",
    [
        (partial(Sayer, "one", "two", "end"), partial(Sayer, "one", "other", "end"), 5),
        (summing_agent, partial(summing_agent, prompt="Add otherwise."), 8),
    ],
)
async def test_a_fork_is_taken_over_at_any_event_and_what_was_taken_back_stays_so(
    runtime: Runtime, first: Callable[[], Runnable], then: Callable[[], Runnable], at: int
) -> None:
    parent = await runtime.run(first(), "Go.")
    fork = await runtime.fork(parent.id, at=at, program=then())
    episode = await runtime.result(fork)
    whole = await log_of(runtime, fork)
    for cut in range(at + 3, len(whole) - 1):  # the last two come at once
        async with open_bus("memory://") as bus:
            await bus.restore(episode_log(fork), whole[:cut])
            owner = owner_of(bus, whole[at + 1], then().program(), worker="heir")
            with anyio.fail_after(5):
                assert (await owner.run()).answer == episode.answer
            assert len(of_kind(owner.events, RecordDropped)) == 1
            assert of_kind(owner.events, EpisodeTakenOver)
            assert (await replay(owner.events, then().program())).identical


async def test_an_edit_that_nobody_comes_to_ends_the_fork_with_the_difference(
    runtime: Runtime,
) -> None:
    parent = await runtime.run(summing_agent(), "Add.")
    fork = await runtime.fork(
        parent.id,
        at=before(await log_of(runtime, parent.id), ModelCompleted),
        edit={"data.text": "something else"},
        program=summing_agent(prompt="Add otherwise."),
    )
    episode = await runtime.result(fork)
    assert episode.reason == "failed"
    assert "DivergenceError: at seq" in (episode.error or "")
    assert "differs in data.preamble" in (episode.error or "")


async def test_a_fork_of_a_fork_goes_through_both(runtime: Runtime) -> None:
    parent = await runtime.run(summing_agent(), "Add.")
    log = await log_of(runtime, parent.id)
    first = await runtime.fork(
        parent.id,
        at=before(log, ToolReturned),
        edit={"data.content": 100},
        program=summing_agent(),
    )
    await runtime.result(first)
    own = await read_own(runtime.bus, episode_log(first))
    answers: dict[int, str] = {}
    for at in range(1, own[-1].seq):
        second = await runtime.fork(first, at=at, program=summing_agent())
        answers[at] = (await runtime.result(second)).answer
        whole = await log_of(runtime, second)
        assert whole[:at] == (await log_of(runtime, first))[:at]
        assert (await replay(whole, summing_agent().program())).identical
    edited = own[0].seq + 2
    assert {answers[at] for at in range(1, edited)} == {"13"}
    assert {answers[at] for at in range(edited, own[-1].seq)} == {"110"}


async def test_an_episode_of_a_former_run_is_forked_from_the_store(store: str) -> None:
    async with Runtime(bus="memory://", store=store) as runtime:
        parent = await runtime.run(SWARM, "Add.")
    async with Runtime(bus="memory://", store=store) as runtime:
        fork = await runtime.fork(parent.id, at=20)
        assert (await runtime.result(fork)).answer == parent.answer
        with pytest.raises(NotFoundError, match="was not submitted to this runtime"):
            await runtime.result(parent.id)


@pytest.mark.parametrize("last", [EpisodePaused(), EpisodeCancelled(reason="enough")])
async def test_a_pause_or_an_end_by_hand_is_not_the_forks(
    runtime: Runtime, last: EventData
) -> None:
    gate = Gate()
    agent = Agent(
        "gated", llm=ScriptedModel([ToolCall(id="c", name="gate"), "through"]), tools=[gate]
    )
    parent = await runtime.submit(agent, "Go.")
    await gate.reached.wait()
    await runtime.bus.send_mail(episode_log(parent), Event.of(last, source="cli/1"))

    async def told() -> bool:
        return bool(of_kind(await log_of(runtime, parent), type(last)))

    await wait_until(told, description="it in the log")
    gate.open.set()
    at = before(await log_of(runtime, parent), type(last)) + 1
    again = Agent("gated", llm=ScriptedModel(["through"]), tools=[gate])
    fork = await runtime.fork(parent, at=at, program=again)
    assert (await runtime.result(fork)).answer == "through"
    end = EpisodeCancelled(reason="that was the parent")
    await runtime.bus.send_mail(episode_log(parent), Event.of(end, source="cli/1"))
    await runtime.result(parent)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"at": 0}, NotFoundError, "has no event 0: it has 1 … 35"),
        ({"at": 36}, NotFoundError, "has no event 36: it has 1 … 35"),
        ({"at": 35}, UsageError, "event 35 is the end of .*: fork at 34 or before"),
        ({"at": 34, "edit": {"data.answer": "x"}}, UsageError, "episode.finished .seq 35., is its"),
        (
            {"at": 11, "edit": {"data.text": "x"}},
            UsageError,
            "no 'data.text'; in data there is: na",
        ),
        ({"at": 11, "edit": {"data.content.0": "x"}}, UsageError, "in data.content there is: noth"),
        (
            {"at": 11, "edit": {"content": "x"}},
            UsageError,
            "'content': expected data.NAME, such as",
        ),
        (
            {"at": 11, "edit": {"data.name": 5}},
            UsageError,
            "tool.returned can't be so: data.name: ",
        ),
        (
            {"at": 6, "edit": {"data.tool_calls.3": 1}},
            UsageError,
            "in data.tool_calls there is: 0 ",
        ),
        (
            {"at": 11, "models": {"solver": "nowhere"}},
            ConfigError,
            "'nowhere': give base_url, or a",
        ),
        (
            {"at": 11, "models": {"slover": "openai/gpt-5"}},
            ConfigError,
            "no role 'slover' in tests",
        ),
        (
            {"at": 6, "edit": {"data.behavior_logprobs": 3}},
            UsageError,
            "model.completed can't be so: 'int' object is not iterable",
        ),
        ({"at": 6, "edit": {"data.token_ids": [1 << 40]}}, EventError, "can't be written"),
        ({"at": 11, "edit": {"data.content": "\ud800"}}, EventError, "can't be written"),
        ({"at": 11, "program": 5}, UsageError, "expected an agent, a swarm or module:attribute"),
    ],
)
async def test_what_cannot_be_forked_so_says_why(
    runtime: Runtime, arguments: dict[str, object], error: type[AWorldError], message: str
) -> None:
    parent = await runtime.run(SWARM, "Add.")
    with pytest.raises(error, match=message):
        await runtime.fork(parent.id, **arguments)  # pyright: ignore[reportArgumentType]
    assert await runtime.bus.backlog(EPISODES_QUEUE) == 0


async def test_the_two_halves_of_an_end_are_not_parted(runtime: Runtime) -> None:
    """A handler of an agent's own that ends the episode: it is handled in the append that holds the end."""
    parent = await runtime.run(Sayer("one", "end"), "Say.")
    last = len(await log_of(runtime, parent.id))
    with pytest.raises(UsageError, match=f"event {last - 1} .* are one: fork at {last - 2} or"):
        await runtime.fork(parent.id, at=last - 1, program=Sayer())
    fork = await runtime.fork(parent.id, at=last - 2, program=Sayer())
    assert (await runtime.result(fork)).answer == "one end"


async def test_an_unknown_episode_and_an_object_that_is_gone_are_named(runtime: Runtime) -> None:
    with pytest.raises(NotFoundError, match="no log episode:nowhere"):
        await runtime.fork("nowhere", at=1)
    parent = await runtime.run(summing_agent(), "Add.")
    with pytest.raises(ConfigError, match=r"an object of its process \(local:Agent/.*program="):
        await runtime.fork(parent.id, at=3)


async def test_a_fork_whose_parent_is_nowhere_fails_and_says_so() -> None:
    requested = Event.of(
        EpisodeRequested(task=Task(id="t", prompt="?"), program=SWARM), source="r/1", episode_id="f"
    )
    forked = Event.of(EpisodeForked(parent="episode:p", at=3), source="r/1", episode_id="f")
    own: list[Event] = []
    async with open_bus("memory://") as bus, anyio.create_task_group() as tasks:
        await bus.append(episode_log("f"), 3, [forked, requested])
        await bus.put(EPISODES_QUEUE, requested)
        tasks.start_soon(Worker(bus, name="w").run)

        async def ended() -> bool:
            own[:] = await read_own(bus, episode_log("f"))
            return bool(of_kind(own, EpisodeFinished))

        await wait_until(ended, description="the end of the fork")
        tasks.cancel_scope.cancel()
    assert "MissingParentError: episode f was forked from log episode:p" in (
        one(own, EpisodeFinished).error or ""
    )


# --- on a server ---------------------------------------------------------------------------------------------------


async def test_workers_without_a_store_run_a_fork_and_its_own_is_archived(
    server: PrivateServer, store: str
) -> None:
    async with Runtime(bus="memory://", store=store) as runtime:
        parent = await runtime.run(SWARM, "Add.")
    async with (
        Runtime(bus=server.url, store=store, slots=0) as runtime,
        open_bus(server.url) as bus,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(Worker(bus, name="elsewhere").run)
        fork = await runtime.fork(parent.id, at=20)
        episode = await runtime.result(fork)
        assert episode.answer == parent.answer
        whole = await bus.read(episode_log(fork))
        assert [event.seq for event in whole] == list(range(1, len(whole) + 1))
        again = await runtime.fork(fork, at=28)
        assert (await runtime.result(again)).answer == parent.answer

        async def archived() -> bool:
            return (await compare(bus, runtime.store)).same

        await wait_until(archived, description="the forks in the store")
        assert await runtime.store.read(episode_log(fork)) == whole[20:]
        tasks.cancel_scope.cancel()


GATES = [Gate()]


def gated_agent() -> Agent:
    """Waits at the newest gate."""
    model = ScriptedModel(lambda request: called(request) or "through")
    return Agent("gated", llm=model, tools=[GATES[-1]])


def called(request: ModelRequest) -> Reply | None:
    asked = any(message.role == "tool" for message in request.messages)
    return None if asked else ToolCall(id="c", name="gate")


async def test_a_fork_outlives_its_worker_and_the_servers_data(
    server: PrivateServer, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWORLD_RESTORE_AFTER_S", "2")
    GATES[-1].open.set()
    async with Runtime(bus="memory://", store=store) as runtime:
        parent = await runtime.run("tests.runtime.test_fork:gated_agent", "Go.")
        log = await log_of(runtime, parent.id)
    at = before(log, ToolReturned)
    gate = Gate()
    GATES.append(gate)
    whole: list[Event] = []
    async with Runtime(bus=server.url, store=store, slots=0) as runtime:
        fork = await runtime.fork(parent.id, at=at)
        async with open_bus(server.url) as bus, anyio.create_task_group() as tasks:
            tasks.start_soon(Worker(bus, name="first").run)
            await gate.reached.wait()

            async def archived() -> bool:
                kept = await runtime.store.last_seq(episode_log(fork))
                known = await runtime.store.bus(bus.url)
                return kept > at + 2 and known is not None

            await wait_until(archived, description="the fork in the store")
            tasks.cancel_scope.cancel()
        await restart_empty(server)
        gate.open.set()
        async with open_bus(server.url) as bus, anyio.create_task_group() as tasks:
            tasks.start_soon(Worker(bus, name="second").run)
            with anyio.fail_after(20):
                episode = await runtime.result(fork)
            assert episode.answer == "through"
            whole += await bus.read(episode_log(fork))
            tasks.cancel_scope.cancel()
    assert whole[:at] == log[:at]
    assert [e.data for e in whole if isinstance(e.data, EpisodeClaimed)][1:] == [
        EpisodeClaimed(worker="first")
    ]
    assert of_kind(whole, EpisodeTakenOver) == [EpisodeTakenOver(worker="second")]
    assert of_kind(whole, LogRestored)
    async with open_store(store) as opened:
        assert (await opened.read(episode_log(fork)))[0].seq == at + 1


async def test_a_fork_that_nobody_had_claimed_when_the_server_lost_it_is_forked_again(
    server: PrivateServer, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWORLD_RESTORE_AFTER_S", "2")
    async with Runtime(bus="memory://", store=store) as runtime:
        parent = await runtime.run(SWARM, "Add.")
        log = await log_of(runtime, parent.id)
    whole: list[Event] = []
    async with Runtime(bus=server.url, store=store, slots=0) as runtime:
        fork = await runtime.fork(parent.id, at=20)
        await restart_empty(server)
        async with open_bus(server.url) as bus, anyio.create_task_group() as tasks:
            tasks.start_soon(Worker(bus, name="w").run)
            with anyio.fail_after(20):
                assert (await runtime.result(fork)).answer == parent.answer
            whole += await bus.read(episode_log(fork))
            tasks.cancel_scope.cancel()
    assert whole[:20] == log[:20]
    assert whole[20].data == EpisodeForked(parent=episode_log(parent.id), at=20)
