"""Which model, in one line: `LLMClient("openai/gpt-5")`, or by fields.

Here names become addresses, and specs become models. The packages that speak to providers load when
a model is made, not before. Nothing here reads the environment: what it says (`config.Settings`)
comes in as `ModelDefaults`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import SecretStr

from aworld_runtime.errors import ConfigError
from aworld_runtime.messages import Completion, Data, ModelSpec
from aworld_runtime.models.base import ChatModel, ModelRequest
from aworld_runtime.offline import expect_online

PROVIDERS = {
    "anthropic": "https://api.anthropic.com/v1",
    "deepseek": "https://api.deepseek.com/v1",
    "ollama": "http://localhost:11434/v1",
    "openai": "https://api.openai.com/v1",
    "qwen": "https://dashscope.aliyuncs.com/compatible-mode/v1",
    "tgi": "http://localhost:8080/v1",
    "vllm": "http://localhost:8000/v1",
}
"""Provider → address of its OpenAI-compatible API."""
HOSTED = frozenset(url for url in PROVIDERS.values() if url.startswith("https:"))
"""Addresses that answer nobody without a key."""


class ModelDefaults(Data):
    """What a client falls back to. Keys are never shown."""

    model_name: str | None = None
    base_url: str | None = None
    api_key: SecretStr | None = None
    openai_api_key: SecretStr | None = None
    """For OpenAI's own address only: other engines have no business with it."""


NO_DEFAULTS = ModelDefaults()


@dataclass(frozen=True)
class LLMClient:
    """A model's name, address and settings. Immutable; is itself a `ChatModel`, connected on use.

    `LLMClient("provider/model")` knows the addresses of `PROVIDERS`; any other engine that speaks
    OpenAI's format needs `base_url`.
    """

    model_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    base_url: str | None = None
    temperature: float = 1.0
    max_tokens: int = 512
    timeout_s: float = 120.0
    _model: list[ChatModel] = field(
        default_factory=list[ChatModel], init=False, repr=False, compare=False
    )

    @property
    def name(self) -> str:
        """Model name, as logged."""
        return self.model_name or ""

    @property
    def policy(self) -> str | None:
        """None: a policy in training has a spec of its own."""
        return None

    def spec(self, defaults: ModelDefaults = NO_DEFAULTS) -> ModelSpec:
        """The same as JSON that may cross processes: without the key.

        Raises:
            ConfigError: no model name.
        """
        model = self.model_name or defaults.model_name
        if not model:
            raise ConfigError("no model: give model_name, or set AWORLD_LLM_MODEL_NAME")
        named = model.partition("/")[0] in PROVIDERS
        base_url = self.base_url or (None if self.model_name and named else defaults.base_url)
        return ModelSpec(
            model=model,
            base_url=base_url,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            timeout_s=self.timeout_s,
        )

    def connect(self, defaults: ModelDefaults = NO_DEFAULTS) -> ChatModel:
        """The model itself; close it after use.

        Raises:
            ConfigError: no model name, no address, or no key where one is needed.
        """
        return from_spec(self.spec(defaults), api_key=self.api_key, defaults=defaults)

    async def complete(self, request: ModelRequest) -> Completion:
        """Ask for one completion; see `ChatModel`."""
        expect_online(f"model {self.name}")
        if not self._model:
            self._model.append(self.connect())
        return await self._model[0].complete(request)

    async def aclose(self) -> None:
        """Release connections. The next use makes new ones."""
        while self._model:
            await self._model.pop().aclose()


def from_spec(
    spec: ModelSpec, *, api_key: str | None = None, defaults: ModelDefaults = NO_DEFAULTS
) -> ChatModel:
    """The model that `spec` describes; close it after use.

    Raises:
        ConfigError: the spec lacks what this kind of model needs.
    """
    if spec.policy is not None:
        from aworld_runtime.models.policy import PolicyModel

        return PolicyModel(spec)
    from aworld_runtime.models.openai import OpenAIModel

    provider, model, base_url = located(spec)
    return OpenAIModel(
        spec.model_copy(update={"model": model, "base_url": base_url}),
        api_key or _key(base_url, defaults),
        exact_tokens=provider == "vllm",
    )


def located(spec: ModelSpec) -> tuple[str, str, str]:
    """Provider, and the model's name and address there. A name may hold slashes of its own.

    Raises:
        ConfigError: no address, and no known provider.
    """
    provider, slash, model = spec.model.partition("/")
    if slash and provider in PROVIDERS:
        return provider, model, spec.base_url or PROVIDERS[provider]
    if spec.base_url is None:
        raise ConfigError(
            f"model {spec.model!r}: give base_url, or a name such as 'openai/MODEL';"
            f" known providers: {', '.join(sorted(PROVIDERS))}"
        )
    return "", spec.model, spec.base_url


def _key(base_url: str, defaults: ModelDefaults) -> str | None:
    key = defaults.api_key
    if key is None and base_url == PROVIDERS["openai"]:
        key = defaults.openai_api_key
    if key is None and base_url in HOSTED:
        variables = "AWORLD_LLM_API_KEY"
        if base_url == PROVIDERS["openai"]:
            variables = f"OPENAI_API_KEY or {variables}"
        raise ConfigError(f"no API key for {base_url}: set {variables}, or give api_key")
    return key.get_secret_value() if key is not None else None
