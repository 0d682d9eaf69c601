"""Weights from the trainer to a sampler's processes: a gloo group of their own, beside all others.

Rank 0 is the trainer; a sampler's workers follow. Tensors travel packed in buckets, in the order of
a description that goes ahead over HTTP, so a receiver needs no more memory than one bucket. Both ends
run this file; it needs torch and nothing else of ours, because vLLM may live in another environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any, Self, TypedDict, cast

import torch
from torch import distributed

_STORE: Any = cast("Any", distributed).TCPStore

BUCKET_BYTES = 64 * 1024 * 1024
ALIGNMENT = 16
"""Each tensor starts at a multiple of it, so that its bytes can be viewed as its type."""


class TensorInfo(TypedDict):
    """What a receiver must know of a tensor before its bytes come."""

    name: str
    dtype: str
    shape: list[int]


class Rendezvous(TypedDict):
    """Where the group meets."""

    host: str
    port: int
    size: int
    deadline: float
    """Seconds within which every operation ends or fails."""


def describe(weights: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype) -> list[TensorInfo]:
    """The tensors as they will be sent: floating-point ones as `dtype`."""
    return [
        TensorInfo(
            name=name,
            dtype=str(dtype if tensor.is_floating_point() else tensor.dtype).split(".")[1],
            shape=list(tensor.shape),
        )
        for name, tensor in weights
    ]


@dataclass(frozen=True)
class _Slot:
    """A tensor's place in its bucket."""

    info: TensorInfo
    start: int
    end: int

    def view(self, bucket: torch.Tensor) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self.info["dtype"])
        return bucket[self.start : self.end].view(dtype).view(self.info["shape"])


def _buckets(tensors: Sequence[TensorInfo]) -> Iterator[list[_Slot]]:
    bucket: list[_Slot] = []
    start = 0
    for info in tensors:
        dtype: torch.dtype = getattr(torch, info["dtype"])
        size = prod(info["shape"]) * dtype.itemsize
        if bucket and start + size > BUCKET_BYTES:
            yield bucket
            bucket, start = [], 0
        bucket.append(_Slot(info, start, start + size))
        start = -(-(start + size) // ALIGNMENT) * ALIGNMENT
    if bucket:
        yield bucket


class WeightGroup:
    """One end of the way."""

    def __init__(self, store: Any, rendezvous: Rendezvous, *, rank: int) -> None:
        gloo = cast("Any", distributed.ProcessGroupGloo)
        options = gloo._Options()  # noqa: SLF001 - its only name
        options._timeout = timedelta(seconds=rendezvous["deadline"])  # noqa: SLF001
        # Left to itself gloo looks up this machine's name, which need not resolve.
        device = gloo.create_device(hostname=rendezvous["host"])
        options._devices = [device]  # noqa: SLF001
        self._group: Any = gloo(store, rank, rendezvous["size"], options)

    @classmethod
    def join(cls, rendezvous: Rendezvous, *, rank: int) -> Self:
        """A receiver's end."""
        store = _STORE(
            rendezvous["host"],
            rendezvous["port"],
            is_master=False,
            timeout=timedelta(seconds=rendezvous["deadline"]),
        )
        return cls(store, rendezvous, rank=rank)

    def send(
        self, weights: Sequence[tuple[str, torch.Tensor]], tensors: Sequence[TensorInfo]
    ) -> None:
        """Send to every receiver; `tensors` describes the weights, in the same order."""
        values = iter(weights)
        sending: distributed.Work | None = None
        for bucket in _buckets(tensors):
            packed = torch.empty(bucket[-1].end, dtype=torch.uint8)
            for slot in bucket:
                slot.view(packed).copy_(next(values)[1].detach())
            if sending is not None:  # the copy above ran while the last bucket travelled
                sending.wait()
            sending = self._group.broadcast(packed, 0)
        if sending is not None:
            sending.wait()

    def receive(self, tensors: Sequence[TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors as they come; each is valid until the next is asked for."""
        for bucket in _buckets(tensors):
            packed = torch.empty(bucket[-1].end, dtype=torch.uint8)
            self._group.broadcast(packed, 0).wait()
            for slot in bucket:
                yield slot.info["name"], slot.view(packed)

    def close(self) -> None:
        """Let go of the connections."""
        self._group.abort()


class Leader:
    """The trainer's end: opens the meeting point, and the group once a sampler comes."""

    def __init__(self, *, host: str, size: int, deadline: float) -> None:
        self._store = _STORE(
            host,
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline),
        )
        self.rendezvous = Rendezvous(host=host, port=self._store.port, size=size, deadline=deadline)
        self._group: WeightGroup | None = None

    def send(
        self, weights: Sequence[tuple[str, torch.Tensor]], tensors: Sequence[TensorInfo]
    ) -> None:
        """Blocks until every receiver has the weights."""
        if self._group is None:
            self._group = WeightGroup(self._store, self.rendezvous, rank=0)
        self._group.send(weights, tensors)

    def close(self) -> None:
        """Let go of the connections; waiting operations fail."""
        if self._group is not None:
            self._group.close()
            self._group = None
