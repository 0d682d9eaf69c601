"""Chat messages to token ids and back, light enough for every worker process.

`ChatTokenizer` needs `tokenizers` and `jinja2`, not transformers and not torch. Beside rendering a
conversation from scratch it *extends* one: the next prompt is the ids the engine had, prompt and
sampled, plus the tokens of the new messages. Decoding a turn and tokenizing it again would give
other ids than were sampled, and logprobs that belong to neither.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from aworld_runtime.errors import ConfigError, TemplateError

if TYPE_CHECKING:
    from jinja2 import Template

SENTINEL = "aworldturn7c1fe2"
"""Stands in for an assistant's turn, to see what a template puts after one."""

ChatMessage = Mapping[str, Any]
"""A message of the OpenAI shape: `role`, `content`, and what else the template reads."""


class ChatTokenizer:
    """The tokenizer and chat template of a model folder."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                f"token ids need the package {error.name!r}: pip install 'aworld-rt[train]'"
            ) from error
        self.folder = Path(folder)
        if not (self.folder / "tokenizer.json").is_file():
            raise ConfigError(f"{self.folder} holds no tokenizer.json")
        self._tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self._settings = _read_json(self.folder / "tokenizer_config.json")
        self._special = {
            name: token
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (token := _token_text(self._settings.get(name))) is not None
        }
        self.eos_ids = self._find_eos_ids()
        """Tokens that end a turn."""

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of a whole conversation, as the template writes it."""
        return self._encode(
            self._render_text(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        )

    def extend(
        self,
        previous_ids: Sequence[int],
        messages: Sequence[ChatMessage],
        *,
        new_from: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The next prompt: `previous_ids`, then the messages from `new_from` on.

        `previous_ids` are the last turn's prompt and sampled ids, exactly as the engine had them;
        `messages[new_from - 1]` is that turn. Its end-of-turn token is added if the engine stopped
        without it, for example by length. `TemplateError` where the template writes earlier turns
        in another way once new ones follow: then the conversation has to be rendered anew.
        """
        if not 0 < new_from <= len(messages) or messages[new_from - 1].get("role") != "assistant":
            raise TemplateError(f"messages[{new_from - 1}] is no assistant's turn to extend")
        before = messages[: new_from - 1]
        turn = {"role": "assistant", "content": SENTINEL}
        text = self._render_text([*before, turn, *messages[new_from:]], tools=tools)
        head, found, tail = text.partition(SENTINEL)
        if not found or SENTINEL in tail:
            raise TemplateError("the chat template does not write an assistant's content once")
        if head != self._render_text(before, tools=tools):
            raise TemplateError(
                "the chat template writes the prompt of an earlier turn differently"
            )
        self._check_kept(messages, tools)
        new = self._encode(tail)
        if self._tokenizer.decode(new, skip_special_tokens=False) != tail:
            raise TemplateError(f"the tokenizer does not keep the text between turns: {tail!r}")
        if previous_ids and new and new[0] in self.eos_ids and previous_ids[-1] == new[0]:
            del new[0]
        return [*previous_ids, *new]

    def encode(self, text: str) -> list[int]:
        """The ids of plain text; names of special tokens in it become those tokens."""
        return self._encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    @cached_property
    def _template(self) -> Template:
        return _compile(_template_source(self.folder, self._settings))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _render_text(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        from jinja2 import TemplateError as JinjaError

        try:
            return self._template.render(
                messages=list(messages),
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except (JinjaError, TypeError) as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from error

    def _check_kept(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Refuse a template that drops parts of earlier turns, such as their reasoning."""
        text = self._render_text(messages, tools=tools)
        for message in messages:
            content = message.get("content")
            if message.get("role") != "assistant" or not isinstance(content, str):
                continue
            if content.strip() not in text:
                raise TemplateError("the chat template rewrites earlier assistant turns")

    def _find_eos_ids(self) -> frozenset[int]:
        ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value: int | list[int] | None = _read_json(self.folder / name).get("eos_token_id")
            if value is not None:
                ids.update([value] if isinstance(value, int) else value)
            if ids:
                break
        if "eos_token" in self._special:
            token = self._tokenizer.token_to_id(self._special["eos_token"])
            ids.update([] if token is None else [token])
        return frozenset(ids)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _token_text(value: str | dict[str, Any] | None) -> str | None:
    """A special token's text; older files keep a whole description of it."""
    return value["content"] if isinstance(value, dict) else value


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template: str | list[dict[str, str]] | None = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is None:
        raise ConfigError(f"{folder} holds no chat template")
    return template


def _compile(source: str) -> Template:
    """The environment that model authors write their templates for: that of transformers."""
    try:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ConfigError(
            f"chat templates need the package {error.name!r}: pip install 'aworld-rt[train]'"
        ) from error
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    names = cast("dict[str, Any]", environment.globals)
    names.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment.from_string(source)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError as JinjaError

    raise JinjaError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
