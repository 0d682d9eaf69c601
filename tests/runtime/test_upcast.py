"""Events that older code wrote: read as today's code would have written them, or refused by name.

`golden/v1` and `golden/v2` hold what `PostSent` looked like before: as `letter.sent` with other fields. `v1/episode.jsonl` is
the log of an episode of that time. A type of our own whose stored form changes leaves its golden file there, too.
"""
# ruff: noqa: ARG002 - nodes have a given signature

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest
from pydantic import JsonValue

from aworld_runtime.errors import MalformedEventError
from aworld_runtime.events import EpisodeFinished, Event, EventData, MessagePosted, Registry
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.node import Program
from aworld_runtime.payloads import part
from aworld_runtime.replay.replay import replay
from aworld_runtime.trajectory import episode_of

GOLDEN = Path(__file__).parent / "golden"
OLD = sorted(GOLDEN.glob("v*/*.json"))


class PostSent(EventData):
    """Was `letter.sent`, to one person (version 1), then to several (2); urgent or not in both."""

    type = "post.sent"
    formerly = ("letter.sent",)
    schema_version = 3
    recipients: tuple[str, ...]
    text: str
    priority: Literal["normal", "high"] = "normal"

    @classmethod
    def upcast(cls, data: dict[str, JsonValue], version: int) -> dict[str, JsonValue]:
        if version < 2:
            data["recipients"] = [data.pop("to")]
        if version < 3:
            data["priority"] = "high" if data.pop("urgent", False) else "normal"
        return data


class FormChanged(EventData):
    """Its older versions can't be read, each in another way."""

    type = "form.changed"
    schema_version = 5
    value: int

    @classmethod
    def upcast(cls, data: dict[str, JsonValue], version: int) -> dict[str, JsonValue]:
        match version:
            case 1:
                return super().upcast(data, version)
            case 2:
                raise SystemError("the tables are gone")
            case 3:
                return {"value": "many"}
            case _:
                return None  # pyright: ignore[reportReturnType] - what nobody should do


class Clerk:
    role = "clerk"
    subscriptions = ("episode.requested",)

    async def handle(self, ctx: Context, event: Event) -> None:
        text = f"It is {await ctx.now():%H:%M:%S.%f}: come."
        ctx.emit(PostSent(recipients=("Ann",), text=text, priority="high"), to="carrier")
        ctx.emit(PostSent(recipients=("Bob",), text="No hurry."), to="carrier")


class Carrier:
    role = "carrier"
    subscriptions = ("post.",)

    async def handle(self, ctx: Context, event: Event) -> None:
        sent = [e.data for e in ctx.history if isinstance(e.data, PostSent)]
        if sent[-1].priority == "normal":
            names = [name + "!" * (d.priority == "high") for d in sent for name in d.recipients]
            ctx.emit(EpisodeFinished(answer=", ".join(names)))


def decode(event: Mapping[str, JsonValue]) -> Event:
    return Registry().decode(json.dumps(event).encode())


def written(data: JsonValue, **fields: JsonValue) -> dict[str, JsonValue]:
    """An event as it was kept."""
    body = Registry().encode(Event.of(MessagePosted(content=""), source="clerk/1"))
    return json.loads(body) | fields | {"data": data}


@pytest.mark.parametrize("path", OLD, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_every_older_version_wrote_is_read_as_todays(path: Path) -> None:
    event = Registry().decode(path.read_bytes())
    expected = PostSent(recipients=("Ann",), text="Come soon.", priority="high")
    assert event.data == expected
    assert (event.type, event.schema_version) == ("post.sent", 3)


def test_what_was_read_is_written_as_todays() -> None:
    registry = Registry()
    old = registry.decode((GOLDEN / "v1/letter.sent.json").read_bytes())
    today = json.loads((GOLDEN / "v3/post.sent.json").read_bytes())
    assert json.loads(registry.encode(old)) == today
    assert registry.decode(registry.encode(old)) == old


def test_large_content_that_stands_apart_is_read_in_its_old_form_too() -> None:
    fields = written({"to": "Ann", "text": "long " * 50_000}, type="letter.sent")
    raw = json.dumps(fields, separators=(",", ":")).encode()
    del fields["data"]
    stub, blob = part(raw, json.dumps(fields, separators=(",", ":")).encode())
    event = Registry().decode(stub, blobs={blob.sha256: blob.content})
    assert event.data == PostSent(recipients=("Ann",), text="long " * 50_000)


async def test_an_episode_of_the_first_version_replays_with_todays_code() -> None:
    lines = (GOLDEN / "v1/episode.jsonl").read_bytes().splitlines()
    raw = [json.loads(line) for line in lines]
    assert sum(event["type"] == "letter.sent" for event in raw) == 2
    registry = Registry()
    events = [
        registry.decode(json.dumps(event).encode(), seq=seq)
        for event in raw
        for seq in [event.pop("seq")]
    ]
    report = await replay(events, Program(nodes=(Clerk(), Carrier())))
    assert report.identical, report.divergence
    assert report.handlers == 3
    assert episode_of(events).answer == "Ann!, Bob"


def test_the_version_of_data_is_written_unless_it_is_the_first() -> None:
    sent = Event.of(PostSent(recipients=(), text=""), source="clerk/1")
    posted = Event.of(MessagePosted(content=""), source="clerk/1")
    assert b'"schema_version":3,' in Registry().encode(sent)
    assert b"schema_version" not in Registry().encode(posted)


@pytest.mark.parametrize(
    "name, version, told",
    [
        ("post.sent", 4, r"post\.sent has schema version 4, newer than 3: upgrade .*PostSent$"),
        ("message.posted", 2, r"message\.posted has schema version 2, newer than 1: upgrade"),
        ("post.sent", 0, "post.sent has schema version 0"),
        ("post.sent", "2", "post.sent has schema version '2'"),
        ("form.changed", 1, r"FormChanged\.upcast: .*it has no upcast from version 1"),
        ("form.changed", 2, r"FormChanged\.upcast: SystemError: the tables are gone"),
        (
            "form.changed",
            3,
            r"version 3 can't be read as version 5: .*FormChanged\.upcast: .*valid",
        ),
        ("form.changed", 4, r"FormChanged\.upcast: ValidationError"),
    ],
)
def test_a_version_that_cannot_be_read_is_told_with_its_type(
    name: str, version: JsonValue, told: str
) -> None:
    event = written({"value": 1}, type=name, schema_version=version)
    with pytest.raises(MalformedEventError, match=f"(?s){told}"):
        decode(event)


def test_data_of_an_older_version_that_is_no_object_is_malformed() -> None:
    with pytest.raises(MalformedEventError, match="no object"):
        decode(written(["Ann"], type="letter.sent"))


def test_two_classes_of_one_name_are_refused_when_a_registry_is_made() -> None:
    """In a process of its own: classes can't be undone."""
    program = """
from aworld_runtime.errors import ConfigError
from aworld_runtime.events import EventData, Registry
def define(where):
    class Sent(EventData):
        type = "post.sent"
        __module__ = where
    return Sent
first, again, as_a_script = define("post"), define("post"), define("__main__")
assert Registry().types["post.sent"] is as_a_script
class Mailed(EventData):
    type = "mail.sent"
    formerly = ("post.sent",)
try:
    Registry()
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    assert "event type 'post.sent' is claimed by __main__.define.<locals>.Sent" in done.stdout
    assert "by __main__.Mailed: give one of them another name" in done.stdout
