"""Samplers: the inference engines that serve the policy, each a process behind one HTTP API."""

from __future__ import annotations

from typing import Literal

from aworld_runtime.errors import ConfigError
from aworld_runtime.training.sampler import transformers, vllm
from aworld_runtime.training.sampler.base import PolicyState, SamplerProcess, SamplerSettings

__all__ = ["PolicyState", "SamplerKind", "SamplerProcess", "SamplerSettings", "choose_sampler"]

SamplerKind = Literal["auto", "vllm", "transformers"]


def choose_sampler(
    kind: SamplerKind = "auto", settings: SamplerSettings | None = None
) -> tuple[type[SamplerProcess], str]:
    """The sampler to start, and a line that says which and why. `auto` prefers vLLM."""
    has_vllm = vllm.is_installed(settings or SamplerSettings())
    has_transformers = transformers.is_installed()
    if kind == "vllm" and not has_vllm:
        raise ConfigError("sampler=vllm: vllm is not installed here; use transformers or auto")
    if kind == "transformers" and not has_transformers:
        raise ConfigError("sampler=transformers needs pip install 'aworld-rt[train]'")
    if kind != "transformers" and has_vllm:
        return vllm.VllmSampler, "sampler: vllm" + (" (installed)" if kind == "auto" else "")
    if has_transformers:
        why = " (vllm is not installed)" if kind == "auto" else ""
        return transformers.TransformersSampler, f"sampler: transformers{why}"
    raise ConfigError("no sampler is installed: pip install 'aworld-rt[train]'")
