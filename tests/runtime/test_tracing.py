"""An episode's log as spans, and their way to a collector."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from anyio.to_thread import run_sync
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from aworld_runtime.archive.archiver import Archiver
from aworld_runtime.bus import open_bus
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.cli import main
from aworld_runtime.errors import ConfigError, ExportError
from aworld_runtime.events import (
    AnswerProposed,
    DeliveryDeadLettered,
    EpisodeClaimed,
    EpisodeForked,
    EpisodeTakenOver,
    Event,
    MessagePosted,
    ModelCompleted,
    ModelFailed,
    ModelRequested,
    ToolCalled,
    ToolFailed,
    ToolReturned,
)
from aworld_runtime.messages import ToolCall, Usage
from aworld_runtime.names import episode_log
from aworld_runtime.store.open import open_store
from aworld_runtime.tracing.export import CursorFile, Exporter
from aworld_runtime.tracing.otlp import Collector
from aworld_runtime.tracing.spans import Span, spans
from tests.episodes import adding_program, request_episode, run_episode
from tests.handmade import EPISODE, Log, at
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio

TRACE = 0x01A22D04A65B75DBB2854DA33B3BEDD5


def named(found: Sequence[Span], name: str) -> Span:
    (span,) = [span for span in found if span.name == name]
    return span


def one_agent() -> Log:
    """A completion that calls a tool, one that answers, and the end."""
    log = Log()
    log.add("worker", EpisodeClaimed(worker="w1"), log.requested)
    message = log.asked("solver", log.requested)  # 3
    first = log.add(
        "solver", ModelRequested(model="openai/gpt-5", prompt_sha256="", seed=7), message
    )
    call = ToolCall(id="c1", name="add", arguments={"a": 1})
    usage = Usage(prompt_tokens=10, completion_tokens=2)
    log.add(
        "solver",
        ModelCompleted(tool_calls=(call,), finish_reason="tool_calls", usage=usage),
        message,
        first,
    )
    called = log.add("solver", ToolCalled(call=call), message)  # 6
    log.handled("solver", message)
    returned = log.add("add", ToolReturned(name="add", content=3), called, called, to="solver")
    second = log.add("solver", ModelRequested(model="openai/gpt-5", prompt_sha256=""), returned)
    log.add("solver", ModelCompleted(text="3", usage=usage), returned, second)
    log.add("solver", AnswerProposed(text="3"), returned)
    log.handled("solver", returned)  # 12
    return log


def test_spans_of_one_agent_are_those_of_the_conventions() -> None:
    found = spans(one_agent().finished())
    assert [span.name for span in found] == [
        "chat gpt-5",
        "execute_tool add",
        "chat gpt-5",
        "invoke_agent solver",
        "invoke_workflow my.agents:solver",
    ]
    chat, tool, _, agent, whole = found
    common = {"gen_ai.agent.name": "solver", "gen_ai.conversation.id": EPISODE}
    assert (chat.kind, chat.start, chat.end) == ("client", at(4), at(5))
    assert chat.attributes == common | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-5",
        "gen_ai.request.seed": 7,
        "gen_ai.response.finish_reasons": ("tool_calls",),
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 2,
        "aworld.seq": 4,
    }
    assert (tool.kind, tool.start, tool.end) == ("internal", at(6), at(8))
    assert tool.attributes == common | {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "add",
        "gen_ai.tool.call.id": "c1",
        "gen_ai.tool.type": "function",
        "aworld.seq": 6,
    }
    assert (agent.start, agent.end) == (at(3), at(12))
    assert agent.attributes == common | {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 4,
        "aworld.seq": 3,
    }
    assert (whole.start, whole.end, whole.error) == (at(1), at(13), None)
    assert whole.attributes == {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.workflow.name": "my.agents:solver",
        "gen_ai.conversation.id": EPISODE,
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 4,
        "aworld.run.id": "r1",
        "aworld.attempt": 1,
        "aworld.reason": "answered",
        "aworld.seq": 1,
    }
    assert [moment.name for moment in whole.moments] == ["episode.claimed"]
    assert {span.parent_id for span in (chat, tool)} == {agent.span_id}
    assert (agent.parent_id, whole.parent_id) == (whole.span_id, None)
    assert {span.trace_id for span in found} == {TRACE}
    assert len({span.span_id for span in found}) == 5


def test_the_same_log_gives_the_same_spans_however_often_it_is_read() -> None:
    events = one_agent().finished()
    assert spans(events) == spans(events)


def test_callers_trace_is_continued() -> None:
    log = Log(traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
    (whole,) = spans(log.finished())
    assert whole.trace_id == int("ab" * 16, 16)
    assert whole.parent_id == int("cd" * 8, 16)


def test_agent_that_another_one_asks_is_its_child_and_one_that_the_rules_ask_is_not() -> None:
    log = Log()
    first = log.asked("boss", log.requested)
    inner = log.asked("helper", first, by="boss")
    log.handled("boss", first)
    answer = log.add("helper", AnswerProposed(text="3"), inner)
    log.handled("helper", inner)
    last = log.asked("judge", answer)
    log.add("judge", AnswerProposed(text="3"), last)
    log.handled("judge", last)
    found = spans(log.finished())
    whole = found[-1]
    assert named(found, "invoke_agent boss").parent_id == whole.span_id
    assert (
        named(found, "invoke_agent helper").parent_id == named(found, "invoke_agent boss").span_id
    )
    assert named(found, "invoke_agent judge").parent_id == whole.span_id


def test_agent_that_did_nothing_about_a_delivery_has_no_span() -> None:
    log = Log()
    log.handled("listener", log.requested)
    assert [span.name for span in spans(log.finished())] == ["invoke_workflow my.agents:solver"]


def test_failures_have_a_type_and_say_what_happened_only_where_content_is_wanted() -> None:
    log = Log()
    message = log.asked("solver", log.requested)
    asked = log.add("solver", ModelRequested(model="m", prompt_sha256=""), message)
    log.add("solver", ModelFailed(error="ModelTimeoutError", message="late"), message, asked)
    called = log.add("solver", ToolCalled(call=ToolCall(id="c1", name="add")), message)
    log.add("add", ToolFailed(name="add", error="ToolError", message="bad"), called, called)
    log.add(
        "solver",
        DeliveryDeadLettered(seq=2, error="ValueError", message="no", attempts=1),
        message,
    )
    events = log.finished("failed", "solver: ValueError: no")
    expected = [
        ("chat m", "ModelTimeoutError", "late"),
        ("execute_tool add", "ToolError", "bad"),
        ("invoke_agent solver", "ValueError", "no"),
        ("invoke_workflow my.agents:solver", "failed", "solver: ValueError: no"),
    ]
    for content in (False, True):
        found = spans(events, content=content)
        assert [(s.name, s.attributes["error.type"], s.error) for s in found] == [
            (name, kind, text if content else "") for name, kind, text in expected
        ]


def test_call_that_a_dead_worker_made_ends_with_its_answer_after_the_takeover() -> None:
    log = Log()
    message = log.asked("solver", log.requested)
    asked = log.add("solver", ModelRequested(model="m", prompt_sha256=""), message)
    log.add("worker", EpisodeTakenOver(worker="w2"), log.requested)
    log.add("solver", ModelCompleted(text="3"), message, asked)
    log.add("solver", AnswerProposed(text="3"), message)
    log.handled("solver", message)
    found = spans(log.finished())
    assert (named(found, "chat m").start, named(found, "chat m").end) == (at(3), at(5))
    assert [moment.name for moment in found[-1].moments] == ["episode.taken_over"]


def test_what_goes_on_when_the_episode_ends_is_interrupted() -> None:
    log = Log()
    message = log.asked("solver", log.requested)
    log.add("solver", ModelRequested(model="m", prompt_sha256=""), message)
    chat, agent, whole = spans(log.finished("time_limit", "too late"))
    assert chat.attributes["error.type"] == "interrupted"
    assert agent.error is None
    assert whole.attributes["error.type"] == "time_limit"
    assert {chat.end, agent.end, whole.end} == {at(4)}


def test_fork_says_what_it_continues() -> None:
    log = Log()
    log.events = [
        Event.of(
            EpisodeForked(parent="episode:1", at=7),
            source="fork/1",
            episode_id=EPISODE,
            time=at(1),
        ).at(8)
    ]
    (whole,) = spans(log.finished())
    assert whole.name == "invoke_workflow"
    assert whole.attributes["aworld.forked_from"] == "episode:1"
    assert whole.attributes["aworld.forked_at"] == 7


def test_spans_of_a_log_without_its_beginning_hang_together() -> None:
    events = one_agent().finished()[2:]
    found = spans(events)
    assert [span.name for span in found][-1] == "invoke_agent solver"
    assert {span.trace_id for span in found} == {TRACE}


async def test_content_is_what_the_model_was_sent() -> None:
    program, model, _ = adding_program()
    async with open_bus("memory://") as bus:
        events = await run_episode(bus, request_episode(), program)
    found = spans(events)
    assert {span.parent_id for span in found} <= {None, *(span.span_id for span in found)}
    chats = [span for span in spans(events, content=True) if span.name == "chat scripted"]
    sent = [json.loads(str(chat.attributes["gen_ai.input.messages"])) for chat in chats]
    assert [[m["role"] for m in messages] for messages in sent] == [
        [m.role for m in request.messages] for request in model.requests
    ]
    assert sent[0][0]["parts"] == [{"type": "text", "content": "Add."}]
    assert sent[1][3]["parts"] == [{"type": "tool_call_response", "id": "c1", "result": "30"}]
    names = {name for span in found for name in span.attributes}
    assert not {name for name in names if "messages" in name or "arguments" in name}


# --- the way to a collector ----------------------------------------------------------------------------------------


@dataclass
class Receiver:
    """A collector that keeps what it gets, as often as it gets it."""

    url: str = ""
    refuse: bool = False
    got: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Trace and span id, hex."""
    requests: int = 0
    spans: list[OtlpSpan] = field(default_factory=list[OtlpSpan])

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
                self.got += [(s.trace_id.hex(), s.span_id.hex()) for s in scope.spans]


@contextmanager
def receiving() -> Generator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.requests += 1
            if not receiver.refuse:
                receiver.take(body)
            self.send_response(400 if receiver.refuse else 200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PrivateServer]:
    async with PrivateServer(tmp_path_factory.mktemp("bus")) as server:
        yield server


@contextmanager
def exporter(folder: Path, *arguments: str) -> Generator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "aworld_runtime.cli", "otel", *arguments]
    with (folder / "otel.log").open("a") as log:
        process = subprocess.Popen(command, cwd=folder, stderr=log, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
async def test_killed_exporter_goes_on_where_it_was_and_loses_nothing(
    tmp_path: Path, server: PrivateServer
) -> None:
    program, _, _ = adding_program()
    expected: Counter[tuple[str, str]] = Counter()
    with receiving() as receiver:
        bus_url = f"{server.url}?namespace=traced"
        flags = ("--bus", bus_url, "--follow", "--endpoint", receiver.url)

        async def episode() -> None:
            events = await run_episode(bus, request_episode(), program)
            expected.update((f"{s.trace_id:032x}", f"{s.span_id:016x}") for s in spans(events))

        async with open_bus(bus_url) as bus:
            with exporter(tmp_path, *flags) as process:
                await episode()
                await wait_until(lambda: set(receiver.got) == set(expected), 15, "spans come")
                receiver.refuse = True
                await episode()
                refused = receiver.requests + 1
                await wait_until(lambda: receiver.requests >= refused, 15, "spans are refused")
                process.kill()
            receiver.refuse = False
            await episode()
            with exporter(tmp_path, *flags):
                await wait_until(lambda: set(receiver.got) == set(expected), 15, "the rest comes")
    assert Counter(receiver.got) == expected


async def test_episode_is_sent_once_it_is_in_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, _, _ = adding_program()
    requested = request_episode()
    url = f"sqlite:///{tmp_path}/s.db"
    async with open_bus("memory://") as bus, open_store(url) as store:
        events = await run_episode(bus, requested, program)
        async with Archiver(bus, store) as archiver:
            await archiver.drain()
    with receiving() as receiver:
        flags = ("--store", url, "--endpoint", receiver.url, "--json")
        for which in ((), ("--episode", "last")):
            assert await run_sync(main, ["otel", *flags, *which]) == 0
            assert json.loads(capsys.readouterr().out) == {
                "episodes": 1,
                "spans": len(spans(events)),
                "endpoint": receiver.url,
            }
    assert len(receiver.got) == 2 * len(spans(events))
    assert len(set(receiver.got)) == len(spans(events))


async def test_what_a_fork_shares_is_exported_with_its_parent_alone() -> None:
    """On a server a fork's log begins with copies of it."""
    program, _, _ = adding_program()
    parent = request_episode()
    forked = EpisodeForked(parent=episode_log(parent.episode_id or ""), at=20)
    again = parent.model_copy(update={"episode_id": "f", "id": "f"})
    async with open_bus("memory://") as bus:
        shared = (await run_episode(bus, parent, program))[:20]
        opening = [Event.of(forked, source="r/1", episode_id="f").at(21), again.at(22)]
        await bus.restore(episode_log("f"), [*shared, *opening])
        whole = await run_episode(bus, again, program)
        with receiving() as receiver, closing(Collector(receiver.url)) as collector:
            await Exporter(bus, collector).export(episode_log("f"))
    expected = {(f"{s.trace_id:032x}", f"{s.span_id:016x}") for s in spans(whole[20:])}
    assert set(receiver.got) == expected
    assert len(expected) < len(spans(whole))


async def test_collector_that_refuses_is_named_with_its_reason_when_patience_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_bus("memory://") as bus:
        program, _, _ = adding_program()
        requested = request_episode()
        await run_episode(bus, requested, program)
        with receiving() as receiver:
            receiver.refuse = True
            with closing(Collector(receiver.url)) as collector:
                exporter = Exporter(bus, collector, patience_s=1.0)
                with pytest.raises(ExportError, match=f"{receiver.url} .*400, reason: Bad Request"):
                    await exporter.export(episode_log(requested.episode_id or ""))
    assert exporter.sent == 0
    assert "does not take spans yet: Failed to export spans batch code: 400" in caplog.text


@pytest.mark.slow
async def test_an_episode_that_the_bus_alone_has_is_found_by_last_and_by_its_beginning(
    server: PrivateServer, capsys: pytest.CaptureFixture[str]
) -> None:
    program, _, _ = adding_program()
    bus_url = f"{server.url}?namespace=unstored"
    async with open_bus(bus_url) as bus:
        older = episode_log("older")
        notes = [Event.of(MessagePosted(content=text), source="a/1") for text in "12"]
        await bus.append(older, 0, notes[:1])
        first, newest = [await run_episode(bus, request_episode(), program) for _ in range(2)]
        async with bus.feed() as feed:
            _, second, *_ = await anext(feed)
        await bus.trim_feed(second.cursor)
        await bus.append(older, 1, notes[1:])
    with receiving() as receiver:
        flags = ("otel", "--bus", bus_url, "--endpoint", receiver.url, "--episode")
        for which, events in (("last", newest), ((first[0].episode_id or "")[:-1], first)):
            receiver.got.clear()
            assert await run_sync(main, [*flags, which]) == 0
            sent = {(f"{s.trace_id:032x}", f"{s.span_id:016x}") for s in spans(events)}
            assert set(receiver.got) == sent
        capsys.readouterr()
        for which, told in (("nope", "with --store"), ("0", "begins the ids of")):
            assert await run_sync(main, [*flags, which]) == 2
            assert told in capsys.readouterr().err


async def test_span_arrives_with_its_parent_times_and_moments() -> None:
    log = one_agent()
    with receiving() as receiver, closing(Collector(receiver.url)) as collector:
        await collector.send(spans(log.finished()))
    *_, agent, whole = receiver.spans
    assert (whole.name, whole.kind, whole.parent_span_id) == (
        "invoke_workflow my.agents:solver",
        1,
        b"",
    )
    assert agent.parent_span_id == whole.span_id
    assert whole.start_time_unix_nano == int(at(1).timestamp()) * 10**9
    assert [event.name for event in whole.events] == ["episode.claimed"]


def test_cursors_of_several_collectors_share_a_file(tmp_path: Path) -> None:
    file = CursorFile(tmp_path / "deep" / "otel.json")
    assert file.read("a") is None
    file.write("a", "1")
    file.write("b", "2")
    file.write("a", "3")
    assert (file.read("a"), file.read("b")) == ("3", "2")
    (tmp_path / "deep" / "otel.json").write_text("[")
    with pytest.raises(ConfigError, match="name another with --cursor"):
        file.read("a")
