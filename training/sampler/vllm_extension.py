"""What runs inside vLLM's own processes: the gate in its server, the receiver in its workers.

The one file that may import vllm. It is named on vLLM's command line (`--middleware`,
`--worker-extension-cls`) and must import in vLLM's environment, which may hold nothing else of ours.
"""

# vLLM is typed in part only, and absent where it isn't installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from aworld_runtime.training.sampler.gate import App, Engine, PolicyGate, Scope
from aworld_runtime.training.sampler.transfer import Rendezvous, TensorInfo, WeightGroup

BACKEND = "aworld_gloo"
"""The name in vLLM's `--weight-transfer-config`."""


class VllmGate(PolicyGate):
    """The gate, as vLLM's middleware."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._engine: VllmEngine | None = None

    def engine(self, scope: Scope) -> Engine:
        """Made at the first request: vLLM's client doesn't exist before."""
        if self._engine is None:
            self._engine = VllmEngine(scope["app"].state)
        return self._engine


class VllmEngine:
    """vLLM's engine, through its client in the server's process."""

    def __init__(self, state: Any) -> None:
        self._client = state.engine_client
        self._rendezvous: Rendezvous | None = None
        self.policy: str = state.openai_serving_models.base_model_paths[0].name
        self.ranks: int = self._client.vllm_config.parallel_config.world_size_across_dp

    async def abort(self) -> None:
        """Pause; waiting requests are aborted too."""
        await self._client.pause_generation(mode="abort")

    async def load(self, rendezvous: Rendezvous, tensors: list[TensorInfo]) -> None:
        """Receive over the trainer's group, joined when it is a new one."""
        if rendezvous != self._rendezvous:
            self._rendezvous = None
            await self._client.shutdown_weight_transfer_engine()
            init = WeightTransferInitRequest(init_info=dict(rendezvous))
            await self._client.init_weight_transfer_engine(init)
            self._rendezvous = rendezvous
        try:
            await self._client.start_weight_update()
            update = WeightTransferUpdateRequest(update_info={"tensors": tensors})
            await self._client.update_weights(update)
            await self._client.finish_weight_update()
        except Exception:
            self._rendezvous = None  # the group is in an unknown state
            raise
        # Without this, cached keys of the old weights serve prompts that begin alike.
        if not await self._client.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    async def resume(self) -> None:
        """Schedule requests again."""
        await self._client.resume_generation()


@dataclass
class GlooInit(WeightTransferInitInfo):
    """Where the group meets."""

    host: str
    port: int
    size: int
    deadline: float


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):
    """What comes next."""

    tensors: Sequence[TensorInfo]


class GlooEngine(WeightTransferEngine[GlooInit, GlooUpdate]):
    """vLLM's receiving end: its built-in ones need a GPU."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate
    _group: WeightGroup | None = None

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        """Join the trainer's group, after its rank 0."""
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        meeting = Rendezvous(**asdict(init_info))
        self._group = WeightGroup.join(meeting, rank=rank)

    def start_weight_update(self) -> None:
        """Let each layer undo its repacking, so that it can be loaded afresh."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive; unlike the base's, it asks no accelerator, of which a CPU has none."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: GlooUpdate) -> None:
        """Load the tensors as they come."""
        if self._group is None:
            raise RuntimeError("the weight group has not been joined")
        for name, tensor in self._group.receive(update_info.tensors):
            cast("Any", self.model).load_weights([(name, tensor.to(self.device))])

    def finish_weight_update(self) -> None:
        """Repack each layer."""
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_layers(self.model)

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None


def _repack_tied_layers(model: Any) -> None:
    """Repack layers that share another's weight, as an output layer tied to the embedding does.

    vLLM loads the shared weight by its first owner and leaves the second as it was. On a CPU that one
    multiplies by a packed copy of its own: without this, by the old weights for ever.
    """
    owners: set[int] = set()
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.numel() == 0:
            continue
        if weight.data_ptr() in owners and hasattr(layer, "quant_method"):
            layer.quant_method.process_weights_after_loading(layer)
        owners.add(weight.data_ptr())


class WorkerExtension:
    """Its import, in each worker, makes the receiver known to vLLM."""


WeightTransferEngineFactory.register_engine(BACKEND, GlooEngine)
