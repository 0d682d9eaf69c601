"""Put a configuration together: defaults, then the file, then the command line; a wrong key or value is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from pydantic import BaseModel, ValidationError

from aworld_runtime.errors import ConfigError
from aworld_runtime.training.config import TrainConfig


def load_config(
    *, file: Path | None, settings: Sequence[str], given: Mapping[str, Any]
) -> TrainConfig:
    """`given` (flags) wins over `settings` (`key=value`), which win over `file`.

    Raises:
        ConfigError: names the key, its value, what is allowed, and the line where it came from a file.
    """
    tree: dict[str, Any] = {}
    lines: dict[tuple[str, ...], int] = {}
    if file is not None:
        tree, lines = _read(file)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"{setting!r}: expected key=value, such as steps=50 or learner.lr=1e-5"
            )
        try:
            _put(tree, key.split("."), value or None if _is_text(key) else _scalar(value))
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{setting!r}: {_one_line(error)}") from error
    for key, value in given.items():
        _put(tree, [key], value)
    try:
        return TrainConfig.model_validate(tree)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        path = tuple(str(part) for part in fault["loc"])
        where = f" ({file}, line {lines[path]})" if path in lines else ""
        name = ".".join(path)
        if fault["type"] == "extra_forbidden":
            known = ", ".join(_keys(path[:-1]))
            raise ConfigError(f"unknown key {name!r}{where}; known keys: {known}") from None
        raise ConfigError(f"{name}={fault['input']!r}{where}: {fault['msg']}") from None


def _is_text(key: str) -> bool:
    """Whether it takes any text, such as a path: YAML would end it at ` #`, or take it for a number."""
    if (field := TrainConfig.model_fields.get(key)) is None:
        return False
    return bool({str, Path} & {field.annotation, *get_args(field.annotation)})


def _scalar(value: str) -> Any:
    """What YAML reads, and 1e-5 as the number it looks like."""
    try:
        return float(value) if "e" in value.lower() else yaml.safe_load(value)
    except ValueError:
        return yaml.safe_load(value)


def _put(tree: dict[str, Any], path: Sequence[str], value: object) -> None:
    for part in path[:-1]:
        inner = tree.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{'.'.join(path)}: {part!r} holds a value, not keys")
        tree = cast("dict[str, Any]", inner)
    tree[path[-1]] = value


def _read(file: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    try:
        text = file.read_text()
        node = cast("yaml.Node | None", yaml.compose(text, Loader=yaml.SafeLoader))
        tree = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"--config {file}: can't be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--config {file}: is not YAML: {_one_line(error)}") from error
    if tree is None:
        return {}, {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"--config {file}: expected keys and values, found a {type(tree).__name__}"
        )
    lines: dict[tuple[str, ...], int] = {}
    _lines(node, (), lines)
    return cast("dict[str, Any]", tree), lines


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _lines(
    node: yaml.Node | None, path: tuple[str, ...], lines: dict[tuple[str, ...], int]
) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
            here = (*path, str(key.value))
            lines[here] = key.start_mark.line + 1
            _lines(value, here, lines)


def _keys(path: Sequence[str]) -> list[str]:
    model: type[BaseModel] = TrainConfig
    for part in path:
        inner = model.model_fields[part].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            model = inner
    return sorted(model.model_fields)
