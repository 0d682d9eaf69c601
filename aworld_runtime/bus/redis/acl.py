"""Who may do what at the server: one user for each role, with no more than the role needs.

    worker            runs episodes: all logs and mail, the queue of episodes; calls of tools, broadcasts
    trainer           requests episodes and follows them, for training or `aworld run`; archives, cleans up
    tool:NAME         takes the calls of this tool and answers them by mail to episodes; reads no log and appends to none
    archiver          `aworld archive`: reads logs and the feed, frees what is over, puts back what was lost
    operator          an observer who sends mail (cancel, pause, resume) and settles dead letters
    observer          reads logs, queues and who is there

A script runs with the rights of its caller, command by command. What a script names as a key counts as read and
written, hence the rules that allow EVALSHA alone. Nobody may FLUSHALL, CONFIG, KEYS, DEBUG, SCRIPT FLUSH, or
anything else that isn't named here.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from aworld_runtime.bus.base import DEAD_MAIL
from aworld_runtime.bus.redis.keys import Patterns, QueueKeys
from aworld_runtime.errors import ConfigError
from aworld_runtime.names import EPISODES_QUEUE, episode_log, tool_queue

CONNECTION = (
    "ping info time select asking client|id client|unblock script|load cluster|slots"
    " unsubscribe punsubscribe"
)
"""What every client does, whatever it is for."""
PASSWORD_BYTES = 32
ANY = "*"
TOOL = "tool:"


@dataclass(frozen=True)
class Rule:
    """Commands, and the keys and channels they may be used on: of one rule, all of them."""

    commands: str
    read: Sequence[bytes] = ()
    write: Sequence[bytes] = ()
    """Not read."""
    both: Sequence[bytes] = ()
    channels: Sequence[bytes] = ()

    def text(self) -> str:
        """As a server reads it."""
        keys = [("%R~", key) for key in self.read] + [("%W~", key) for key in self.write]
        keys += [("~", key) for key in self.both] + [("&", name) for name in self.channels]
        parts = [f"+{command}" for command in self.commands.split()]
        return f"({' '.join([*parts, *(kind + key.decode() for kind, key in keys)])})"


@dataclass(frozen=True)
class User:
    """One role's, with a password that is nowhere else."""

    role: str
    name: str
    password: str
    rules: tuple[Rule, ...]

    def line(self) -> str:
        """Its line in the server's ACL file; of the password, the hash."""
        digest = hashlib.sha256(self.password.encode()).hexdigest()
        base = [f"+{command}" for command in CONNECTION.split()]
        rules = [rule.text() for rule in self.rules]
        return " ".join(
            ["user", self.name, "on", f"#{digest}", "resetchannels", "-@all", *base, *rules]
        )


def users(namespace: str, roles: Iterable[str]) -> list[User]:
    """A user for each role.

    Raises:
        ConfigError: no such role.
    """
    patterns = Patterns(namespace)
    return [
        User(
            role=role,
            name=f"{namespace}-{role.replace(':', '-')}",
            password=secrets.token_urlsafe(PASSWORD_BYTES),
            rules=tuple(_rules(patterns, role)),
        )
        for role in dict.fromkeys(roles)
    ]


def acl_file(made: Iterable[User]) -> str:
    """The server's `aclfile`. Who gives no password may do nothing."""
    lines = ["user default off resetchannels -@all", *(user.line() for user in made)]
    return "\n".join(lines) + "\n"


def _rules(keys: Patterns, role: str) -> list[Rule]:
    if role in ROLES:
        return ROLES[role](keys)
    tool = role.removeprefix(TOOL)
    if not role.startswith(TOOL) or not re.fullmatch(r"[\w.-]+", tool):
        raise ConfigError(f"role={role!r}: use {', '.join(ROLES)} or tool:NAME")
    return [
        *_consumes(keys.queue(tool_queue(tool))),
        *_sends_mail(keys, episode_log(ANY)),
        *_announces(keys),
        *_looks_at_nodes(keys),
        Rule("evalsha", both=[keys.reply(ANY)]),
        Rule("set", write=[keys.reply(ANY)]),
        Rule("publish", channels=[keys.reply(ANY)]),
        Rule("sadd", write=[keys.dead_queues]),
    ]


def _worker(keys: Patterns) -> list[Rule]:
    log = keys.log(ANY)
    mail, readable = [log.mail, log.control], [key for key in log if key != log.feed]
    return [
        *_consumes(keys.queue(EPISODES_QUEUE)),
        *_puts(keys, EPISODES_QUEUE),
        *_puts(keys, tool_queue(ANY)),
        *_sends_mail(keys),
        *_announces(keys),
        *_looks_at_nodes(keys),
        *_broadcasts(keys),
        *_writes_logs(keys),
        Rule("xlen xrange xrevrange xread ttl xinfo|stream hmget", read=readable),
        Rule("xdel", write=mail),
        Rule("publish subscribe", channels=[log.log, *mail]),
        # Mail that can't be read, or is forged.
        Rule("xadd", write=[keys.queue(DEAD_MAIL).dead]),
        Rule("sadd", write=[keys.dead_queues]),
    ]


def _trainer(keys: Patterns) -> list[Rule]:
    log, queue = keys.log(ANY), keys.queue(ANY)
    everything = [*log, *queue, keys.staging(ANY, ANY), keys.feed_id, keys.dead_queues]
    everything += [keys.reply(ANY), keys.nodes]
    channels = [log.log, log.mail, log.control, keys.logs, keys.reply(ANY), keys.broadcast(ANY)]
    return [
        Rule(
            "evalsha eval eval_ro del exists expire get hdel hget hgetall hmget hset hsetnx persist pexpire pttl"
            " rename sadd set smembers srem ttl unlink xack xadd xclaim xdel xgroup|create"
            " xgroup|delconsumer xinfo|consumers xinfo|groups xinfo|stream xlen xpending xrange xread"
            " xreadgroup xrevrange xtrim zadd zcard zrange zrangebyscore zrem",
            both=everything,
        ),
        Rule("publish subscribe psubscribe", channels=channels),
    ]


def _archiver(keys: Patterns) -> list[Rule]:
    log = keys.log(ANY)
    return [
        *_reads_logs(keys),
        *_writes_logs(keys),
        *_puts(keys, EPISODES_QUEUE),
        *_announces(keys),
        *_looks_at_nodes(keys),
        Rule("ttl", read=_without_mail(keys)),
        Rule("publish", channels=[log.log]),
        # Logs that are over go, with their mail; so does what all have read of the feed.
        Rule("unlink xtrim pexpire hset", write=[*log]),
        Rule("hget", read=[log.blobs]),
    ]


def _observer(keys: Patterns) -> list[Rule]:
    queue = keys.queue(ANY)
    return [
        *_reads_logs(keys),
        *_looks_at_nodes(keys),
        Rule("get", read=[keys.feed_id]),
        Rule("eval_ro xlen xrange zcard", read=[*queue]),
        Rule("smembers", read=[keys.dead_queues]),
        Rule("subscribe", channels=[keys.broadcast(ANY)]),
    ]


def _operator(keys: Patterns) -> list[Rule]:
    queue = keys.queue(ANY)
    return [
        *_observer(keys),
        *_sends_mail(keys),
        Rule("evalsha", both=[queue.work, queue.dead]),
        Rule("xadd", write=[queue.work]),
        Rule("xdel", write=[queue.dead]),
    ]


ROLES: Mapping[str, Callable[[Patterns], list[Rule]]] = {
    "worker": _worker,
    "trainer": _trainer,
    "archiver": _archiver,
    "operator": _operator,
    "observer": _observer,
}
"""Beside `tool:NAME`."""


def _consumes(queue: QueueKeys) -> list[Rule]:
    return [
        Rule(
            "evalsha eval eval_ro exists xack xclaim xdel xgroup|create xgroup|delconsumer"
            " xinfo|consumers xinfo|groups xlen xpending xrange xreadgroup xadd zadd zcard zrange"
            " zrangebyscore zrem",
            both=[*queue],
        )
    ]


def _puts(keys: Patterns, name: str) -> list[Rule]:
    """Adds work, some of it for later; takes none."""
    queue = keys.queue(name)
    return [
        Rule("evalsha", both=[queue.work, queue.delayed]),
        Rule("eval_ro xlen zcard", read=[queue.work, queue.delayed]),
        Rule("xadd", write=[queue.work]),
        Rule("zadd zrangebyscore zrange zrem", both=[queue.delayed]),
    ]


def _sends_mail(keys: Patterns, name: str = ANY) -> list[Rule]:
    log = keys.log(name)
    mail = [log.mail, log.control]
    return [
        Rule("evalsha", both=[*mail, log.log]),
        Rule("xlen ttl", read=[*mail, log.log]),
        Rule("xadd expire", write=mail),
        Rule("publish", channels=mail),
    ]


def _reads_logs(keys: Patterns) -> list[Rule]:
    log = keys.log(ANY)
    return [
        Rule("xlen xrange xrevrange xread xinfo|stream hmget", read=_without_mail(keys)),
        Rule("exists", read=[log.feed, log.log]),
        Rule("subscribe psubscribe", channels=[log.log, keys.logs]),
    ]


def _writes_logs(keys: Patterns) -> list[Rule]:
    """Appends, and puts back what the server lost."""
    log, staging = keys.log(ANY), keys.staging(ANY, ANY)
    return [
        Rule("evalsha", both=[*log, staging]),
        Rule("xadd hsetnx expire persist", write=[*log, staging]),
        Rule("rename unlink", both=[staging, log.log]),
        Rule("get set", both=[log.feed_id]),
    ]


def _without_mail(keys: Patterns) -> list[bytes]:
    log = keys.log(ANY)
    return [key for key in log if key not in (log.mail, log.control)]


def _announces(keys: Patterns) -> list[Rule]:
    return [
        Rule("evalsha", both=[keys.nodes]),
        Rule("hset hdel pexpire", write=[keys.nodes]),
        Rule("pttl", read=[keys.nodes]),
    ]


def _looks_at_nodes(keys: Patterns) -> list[Rule]:
    return [Rule("evalsha", both=[keys.nodes]), Rule("hgetall", read=[keys.nodes])]


def _broadcasts(keys: Patterns) -> list[Rule]:
    return [Rule("publish subscribe", channels=[keys.broadcast(ANY)])]
