"""Settings: one tree, from the environment. Nothing else reads the environment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import AliasChoices, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from aworld_runtime.errors import ConfigError
from aworld_runtime.models.client import ModelDefaults


class _Environment(BaseSettings):
    """A part of it."""

    @classmethod
    def from_env(cls) -> Self:
        """Read the environment.

        Raises:
            ConfigError: a wrong value, or an unknown variable, whose value may be a key and isn't shown.
        """
        try:
            return cls()
        except ValidationError as error:
            fault = error.errors(include_url=False, include_context=False)[0]
            name = "_".join(str(part) for part in fault["loc"]).upper()
            prefix = cls.model_config.get("env_prefix", "")
            given = "" if fault["type"] == "extra_forbidden" else f"={fault['input']!r:.50}"
            raise ConfigError(f"{prefix}{name}{given}: {fault['msg']}") from None


class Settings(_Environment):
    """What the environment (`AWORLD_…`) says, and defaults for the rest. Keys are never shown."""

    model_config = SettingsConfigDict(env_prefix="AWORLD_", frozen=True, extra="forbid")

    bus: str = "memory://"
    """URL of the event bus."""
    bus_key: SecretStr | None = None
    """Signs events on the bus: at least 16 random characters, or what `aworld acl` prints for a role. Several, with commas
    between: the first signs, all verify."""
    bus_key_file: Path | None = None
    """The same in a file, one a line."""
    store: str = "sqlite:///.aworld/aworld.db"
    """URL of the store."""
    retire_after_s: float = 60.0
    """Seconds that an ended log stays on the bus once it is in the store; after that it is read from there."""
    restore_after_s: float = Field(default=6.0, ge=0.0)
    """Seconds, after a bus server came back without its data, in which owners put back what they know, before the
    rest is restored from the store. Three leases."""
    llm_model_name: str | None = None
    llm_base_url: str | None = None
    llm_api_key: SecretStr | None = None
    openai_api_key: SecretStr | None = Field(
        default=None, validation_alias=AliasChoices("OPENAI_API_KEY")
    )
    """Used for OpenAI's own address when `llm_api_key` is not set."""

    @property
    def bus_keys(self) -> tuple[str, ...]:
        """The keys for `open_bus`, the one that signs first.

        Raises:
            ConfigError: the file can't be read.
        """
        text = self.bus_key.get_secret_value() if self.bus_key is not None else ""
        if self.bus_key_file is not None:
            try:
                text += "\n" + self.bus_key_file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"AWORLD_BUS_KEY_FILE={self.bus_key_file}: {error}") from error
        return tuple(key for key in re.split(r"[,\s]+", text) if key)

    @property
    def llm(self) -> ModelDefaults:
        """What model clients fall back to."""
        return ModelDefaults(
            model_name=self.llm_model_name,
            base_url=self.llm_base_url,
            api_key=self.llm_api_key,
            openai_api_key=self.openai_api_key,
        )


class LogSettings(_Environment):
    """How this process, and those it starts, write their log lines (`AWORLD_LOG_…`)."""

    model_config = SettingsConfigDict(env_prefix="AWORLD_LOG_", frozen=True, extra="ignore")

    format: Literal["text", "json"] | None = None
    level: Literal["debug", "info", "warning", "error"] | None = None


class RankSettings(_Environment):
    """A learner rank's place, as torchrun says it; alone without one."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
