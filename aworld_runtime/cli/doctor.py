"""`aworld doctor`: what is installed, and what to do about what isn't."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from aworld_runtime.cli.shared import add_json
from aworld_runtime.errors import AWorldError
from aworld_runtime.urls import shown

OLDEST = (3, 11)
EXTRAS = {
    "redis": (("redis", "hiredis"), "event bus between processes"),
    "mongo": (("pymongo",), "MongoDB as the store"),
    "mcp": (("mcp",), "tools of MCP servers"),
    "viewer": (("starlette", "uvicorn"), "web server of the transformers sampler"),
    "telemetry": (
        ("prometheus_client", "opentelemetry"),
        "metrics, and spans for a collector",
    ),
    "train": (("torch", "transformers", "tokenizers", "safetensors"), "training"),
}
"""Extra → the packages it brings, and what for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for."""

    name: str
    ok: bool
    detail: str
    todo: str = ""
    needed: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show what is installed. 1: something that everything needs is wrong."
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    findings = list(_look())
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            mark = "ok     " if finding.ok else "WRONG  " if finding.needed else "missing"
            todo = f" → {finding.todo}" if finding.todo and not finding.ok else ""
            print(f"{mark}  {finding.name:<{width}}  {finding.detail}{todo}")
    return int(any(finding.needed and not finding.ok for finding in findings))


def _look() -> Iterator[Finding]:
    from aworld_runtime.version import code_version

    version = platform.python_version()
    oldest = ".".join(map(str, OLDEST))
    yield Finding(
        "python", sys.version_info >= OLDEST, version, f"use Python {oldest} or newer", needed=True
    )
    yield Finding("aworld-rt", ok=True, detail=code_version())
    yield from _settings()
    for extra, (packages, purpose) in EXTRAS.items():
        absent = [name for name in packages if not _has(name)]
        detail = f"{purpose} (no {', '.join(absent)})" if absent else purpose
        yield Finding(f"extra {extra}", not absent, detail, f"pip install 'aworld-rt[{extra}]'")
    yield _server()
    yield Finding(
        "sampler vllm", _has("vllm"), "fast inference", "scripts/install, where it has a build"
    )
    in_process = _has("torch") and _has("transformers")
    yield Finding(
        "sampler transformers", in_process, "inference anywhere", "pip install 'aworld-rt[train]'"
    )
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    yield Finding("disk", free > 1, f"{free:.1f} GiB free here", "free some: logs and weights")


def _settings() -> Iterator[Finding]:
    """The store and bus that commands use when none is named."""
    from aworld_runtime.config import Settings

    try:
        settings = Settings.from_env()
    except AWorldError as error:
        yield Finding("settings", ok=False, detail=str(error), todo="mend it", needed=True)
        return
    yield Finding("bus", ok=True, detail=shown(settings.bus))
    yield _store(settings.store)
    key = settings.llm_api_key or settings.openai_api_key
    yield Finding(
        "model key",
        key is not None,
        "set" if key else "for hosted models",
        "set OPENAI_API_KEY, or AWORLD_LLM_API_KEY with AWORLD_LLM_BASE_URL",
    )


def _store(url: str) -> Finding:
    if urlsplit(url).scheme != "sqlite":
        return Finding("store", ok=True, detail=shown(url))
    from aworld_runtime.store.sqlite import path_of

    try:
        folder = path_of(url).absolute().parent
    except AWorldError as error:
        return Finding("store", ok=False, detail=str(error), todo="mend it", needed=True)
    while not folder.exists():
        folder = folder.parent
    writable = os.access(folder, os.W_OK)
    todo = f"make {folder} writable, or set AWORLD_STORE"
    return Finding("store", writable, url, todo, needed=True)


def _server() -> Finding:
    from aworld_runtime.bus.server import find_server_binary

    try:
        return Finding("bus server", ok=True, detail=str(find_server_binary()))
    except AWorldError as error:
        return Finding(
            "bus server", ok=False, detail="private bus of local workers", todo=str(error)
        )


def _has(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None
