"""`aworld acl`: an access list for the bus's server, one user for each role."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from aworld_runtime.cli.shared import add_json, table
from aworld_runtime.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aworld_runtime.bus.redis.acl import User


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make an ACL file for a Redis or Valkey server (its setting `aclfile`), in which each role may do what it needs,"
        " and who gives no password nothing. It holds hashes; the passwords are shown this once."
    )
    parser.add_argument("--namespace", default="aworld", help="of the bus (default aworld)")
    parser.add_argument(
        "--role",
        action="append",
        metavar="ROLE",
        help="worker, trainer, archiver, operator, observer or tool:NAME; repeatable"
        " (default: all but tools)",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="a new file (default: stdout)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        from aworld_runtime.bus.redis.acl import ROLES, acl_file, users
    except ImportError as error:
        raise ConfigError(
            "access lists need the extra 'redis': pip install 'aworld-rt[redis]'"
        ) from error
    made = users(arguments.namespace, arguments.role or ROLES)
    bus_keys = _bus_keys(made)
    text = acl_file(made)
    if arguments.output is not None:
        _write_new(Path(arguments.output), text)
    if arguments.json:
        passwords = [
            {"role": u.role, "user": u.name, "password": u.password}
            | ({"bus_key": bus_keys[u.role]} if u.role in bus_keys else {})
            for u in made
        ]
        kept = {"file": arguments.output} if arguments.output is not None else {"acl": text}
        print(json.dumps({"users": passwords, **kept}))
    elif arguments.output is not None:
        print(_secrets(made, bus_keys))
    else:
        print(text, end="")
        print(_secrets(made, bus_keys), file=sys.stderr)
    return 0


def _bus_keys(made: Sequence[User]) -> dict[str, str]:
    """For tools, where this process knows the master key: what signs as that tool alone. All else needs the master's."""
    from aworld_runtime.bus.redis.acl import TOOL
    from aworld_runtime.config import Settings
    from aworld_runtime.signatures import ROLE_KEY, role_key

    masters = [key for key in Settings.from_env().bus_keys if not key.startswith(ROLE_KEY)]
    tools = [user.role for user in made if user.role.startswith(TOOL)]
    return {role: role_key(masters[0], role.removeprefix(TOOL)) for role in tools if masters}


def _write_new(file: Path, text: str) -> None:
    """For its owner's eyes alone. Never over another: the passwords of that one would be worth nothing."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"--output {file}: {error.strerror}; name a new file") from error
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(text)


def _secrets(made: Sequence[User], bus_keys: Mapping[str, str]) -> str:
    head = ("ROLE", "USER", "PASSWORD", *(("AWORLD_BUS_KEY",) if bus_keys else ()))
    return table(
        head, [(u.role, u.name, u.password, bus_keys.get(u.role, ""))[: len(head)] for u in made]
    )
