"""Rows laid out for one forward pass: no padding, and every shared prefix once.

Rows of a group begin with the same prompt, and groups with the same system text. Sorted by their tokens, each row shares
a prefix with the row before it; only the rest, its segment, is laid out. What a token attends to is then the path from
its row's beginning, wherever that lies:

    row a   S S S A A a a a            flat   S S S A A a a a | b b | B B c c c
    row b   S S S A A b b              row b's keys: 0 1 2 3 4, then its own two
    row c   S S S B B c c c            row c's keys: 0 1 2, then its own five

This is exact: a causal transformer gives the same hidden state for the same prefix, and the gradients of all rows that
share a token sum at it. A row ends before its last trained token, which only needs to be predicted. Attention is cut in
blocks of at most `BLOCK` queries of one segment, so its cost follows tokens * length of a row, not the pack's square.
"""

# torch and transformers annotate themselves only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from aworld_runtime.events import common_prefix

BLOCK = 96
"""Most queries of an attention block: a rollout's own turns fit in one, and a long prompt is cut to skip masked pairs."""


@dataclass(frozen=True, slots=True)
class Pack:
    """P tokens of a few rows; N trained tokens, which are U different (prefix, token) pairs."""

    input_ids: Tensor
    """[1, P] int64."""
    position_ids: Tensor
    """[1, P] int64: each token's position in its row."""
    queries: Tensor
    """[B, S] int64 flat positions of each attention block's queries; 0 where padded."""
    keys: Tensor
    """[B, K] int64 flat positions of what they may attend to, in row order; 0 where padded."""
    attends: Tensor
    """[B, S, K] bool."""
    outputs: Tensor
    """[P] int64: where in the flattened [B * S] queries each token is."""
    predictors: Tensor
    """[U] int64 flat positions whose next token is trained."""
    targets: Tensor
    """[U] int64 those next tokens."""
    unique: Tensor
    """[N] int64: which of the U pairs each trained token is."""
    sequence: Tensor
    """[N] int64: the number of its row, in the order that `pack` was given."""

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]

    def to(self, device: torch.device) -> Self:
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self)})


def pack(rows: Sequence[Sequence[int]], trained: Sequence[Sequence[int]]) -> Pack:
    """Lay out `rows` (token ids), of which the positions `trained` (each > 0) are predicted.

    Any order is right; the order of `prefix_order` shares the most.
    """
    flat: list[int] = []
    positions: list[int] = []
    segments: list[tuple[int, list[int]]] = []
    pairs: dict[tuple[int, int], int] = {}
    unique: list[int] = []
    sequence: list[int] = []
    previous: Sequence[int] = ()
    path: list[int] = []
    for number, (row, targets) in enumerate(zip(rows, trained, strict=True)):
        needed = row[: targets[-1]] if targets else row[:1]
        shared = common_prefix(previous, needed)
        path = [*path[:shared], *range(len(flat), len(flat) + len(needed) - shared)]
        flat.extend(needed[shared:])
        positions.extend(range(shared, len(needed)))
        if len(needed) > shared:
            segments.append((shared, path))
        for position in targets:
            pair = (path[position - 1], row[position])
            unique.append(pairs.setdefault(pair, len(pairs)))
            sequence.append(number)
        previous = needed
    queries, keys, attends, outputs = _blocks(segments, len(flat))
    return Pack(
        input_ids=torch.tensor([flat]),
        position_ids=torch.tensor([positions]),
        queries=queries,
        keys=keys,
        attends=attends,
        outputs=outputs,
        predictors=_integers([position for position, _ in pairs]),
        targets=_integers([token for _, token in pairs]),
        unique=_integers(unique),
        sequence=_integers(sequence),
    )


def _blocks(
    segments: Sequence[tuple[int, list[int]]], tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut segments (first own position, flat path of the row) in blocks of queries."""
    blocks = [
        (start, min(start + size, len(path)), path)
        for shared, path in segments
        for size in [_even_size(len(path) - shared)]
        for start in range(shared, len(path), size)
    ]
    size = max(stop - start for start, stop, _ in blocks)
    queries = torch.zeros(len(blocks), size, dtype=torch.int64)
    keys = torch.zeros(len(blocks), max(stop for _, stop, _ in blocks), dtype=torch.int64)
    last_key = torch.zeros(len(blocks), size, dtype=torch.int64)
    outputs = torch.zeros(tokens, dtype=torch.int64)
    for number, (start, stop, path) in enumerate(blocks):
        own = torch.tensor(path[start:stop])
        queries[number, : stop - start] = own
        keys[number, :stop] = torch.tensor(path[:stop])
        last_key[number, : stop - start] = torch.arange(start, stop)
        outputs[own] = number * size + torch.arange(stop - start)
    # A padded query attends to the first key: a row of the softmax without any would be NaN.
    attends = torch.arange(keys.shape[1]) <= last_key[:, :, None]
    return queries, keys, attends, outputs


def _even_size(length: int) -> int:
    """The size that cuts `length` in equal blocks of at most `BLOCK`: a small rest would be padded to a full one."""
    return -(-length // -(-length // BLOCK))


def _integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def prefix_order(rows: Sequence[Sequence[int]]) -> list[int]:
    """The order of rows in which each shares the most with the one before it."""
    return sorted(range(len(rows)), key=lambda index: (tuple(rows[index]), index))


def partition(rows: Sequence[Sequence[int]], parts: int) -> list[range]:
    """Cut ordered rows in `parts` runs (some may be empty) whose largest number of packed tokens is smallest."""
    low, high = max(map(len, rows), default=0), sum(map(len, rows))
    while low < high:
        middle = (low + high) // 2
        if len(cut(rows, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    runs = cut(rows, high)
    return runs + [range(len(rows), len(rows))] * (parts - len(runs))


def cut(rows: Sequence[Sequence[int]], tokens: int) -> list[range]:
    """Cut ordered rows in the fewest runs of at most `tokens` packed tokens; a longer row stands alone."""
    runs: list[range] = []
    start, used = 0, 0
    for index, row in enumerate(rows):
        own = len(row) - (common_prefix(rows[index - 1], row) if index > start else 0)
        if index > start and used + own > tokens:
            runs.append(range(start, index))
            start, used, own = index, 0, len(row)
        used += own
    return [*runs, range(start, len(rows))] if rows else runs
