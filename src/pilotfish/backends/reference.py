"""The oracle: programs in plain NumPy float32. Slow, short, and what the other interpreters are measured against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from pilotfish.program import (
    BLOCK_SIZE,
    KV,
    Attention,
    Embed,
    Feed,
    Floats,
    GatedAct,
    Gather,
    Head,
    KVShape,
    Linear,
    Norm,
    Program,
    Result,
    RopeKV,
    Tap,
)
from pilotfish.quant import Tensor
from pilotfish.tree import Ints, TreeBatch

Flat = NDArray[np.int64]  # indices of slots in a KV tensor whose blocks lie one after the other


class ReferenceKV:
    """Keys and values in float32 [layers, blocks * BLOCK_SIZE, kv_heads, head_dim].

    Slots start as NaN: whatever reads one that was never written shows it.
    """

    def __init__(self, shape: KVShape, num_blocks: int) -> None:
        full = (shape.layers, num_blocks * BLOCK_SIZE, shape.kv_heads, shape.head_dim)
        self.keys: Floats = np.full(full, np.nan, np.float32)
        self.values: Floats = np.full(full, np.nan, np.float32)

    def move(self, blocks: Sequence[int], src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy slot src[i] to dst[i], in order, in every layer; `blocks` is the request's block table."""
        table = np.asarray(blocks, np.int32)
        # One by one: a slot may be the target of one copy and the source of a later one.
        for source, target in zip(_flat(table, np.asarray(src)), _flat(table, np.asarray(dst)), strict=True):
            self.keys[:, target] = self.keys[:, source]
            self.values[:, target] = self.values[:, source]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class ReferenceBackend:
    """Interprets programs with one NumPy expression per operation."""

    name = "reference"
    description = "reference (NumPy)"

    def load(self, tensors: Mapping[str, Tensor]) -> Mapping[str, object]:
        """Every tensor dequantised to float32, embeddings included."""
        return {name: tensor.dequantize() for name, tensor in tensors.items()}

    def replace_rows(self, weight: object, first: int, rows: Tensor) -> None:
        """See Backend."""
        cast(Floats, weight)[first : first + rows.shape[0]] = rows.dequantize()

    def new_kv(self, shape: KVShape, num_blocks: int) -> ReferenceKV:
        return ReferenceKV(shape, num_blocks)

    def prepare(self, program: Program, weights: Mapping[str, object]) -> ReferenceExecutable:
        return ReferenceExecutable(program, cast(Mapping[str, Floats], weights))


class ReferenceExecutable:
    """A program bound to float32 weights."""

    def __init__(self, program: Program, weights: Mapping[str, Floats]) -> None:
        self.program = program
        self.weights = weights

    def forward(self, batch: TreeBatch, kv: KV, logits: bool, feeds: Sequence[Floats] = ()) -> Result:
        """One pass through the weights. Writes the KV of every row; gives logits only when asked.

        Raises ValueError when `feeds` are not what the program's Feeds take.
        """
        assert isinstance(kv, ReferenceKV)
        program, weights = self.program, self.weights
        written = _written(batch)
        sights = _sights(batch)
        cos, sin = (table[batch.positions, None, :] for table in (program.rope_cos, program.rope_sin))
        fed = iter(_checked_feeds(program, batch, feeds))
        buffers: dict[str, Floats] = {}
        taps: list[Floats] = []
        scores: Floats = np.zeros((0, program.num_logits), np.float32)
        for op in program.ops:
            match op:
                case Embed():
                    buffers[op.out] = weights[op.weight][batch.tokens]
                case Feed():
                    buffers[op.out] = next(fed).copy()  # a Linear may add to it
                case Norm():
                    buffers[op.out] = _rms_norm(buffers[op.x], weights[op.weight], op.eps)
                case Linear():
                    x = buffers[op.x]
                    if op.out not in buffers:
                        buffers[op.out] = np.full((len(x), program.widths[op.out]), np.nan, np.float32)
                    for part in op.parts:
                        y = x @ weights[part.weight].T
                        if part.bias is not None:
                            y += weights[part.bias]
                        columns = buffers[op.out][:, part.column : part.column + y.shape[1]]
                        columns[...] = columns + y if op.add else y
                case RopeKV():
                    q, k, v = self._heads(buffers[op.qkv])
                    if op.q_norm is not None and op.k_norm is not None:
                        q[...] = _rms_norm(q, weights[op.q_norm], op.eps)
                        k[...] = _rms_norm(k, weights[op.k_norm], op.eps)
                    q[...] = _rotate(q, cos, sin)
                    k[...] = _rotate(k, cos, sin)
                    kv.keys[op.layer, written] = k
                    kv.values[op.layer, written] = v
                case Attention():
                    q, _, _ = self._heads(buffers[op.qkv])
                    keys, values = kv.keys[op.layer], kv.values[op.layer]
                    out = [_attend(q[s.first : s.last], keys[s.slots], values[s.slots], s.seen) for s in sights]
                    buffers[op.out] = np.concatenate(out)
                case GatedAct():
                    gate, up = np.split(buffers[op.x], 2, axis=1)
                    buffers[op.out] = _silu(gate) * up
                case Tap():
                    taps.append(buffers[op.x].copy())
                case Gather():
                    buffers[op.out] = buffers[op.x][batch.logit_rows]
                case Head():
                    scores = buffers[op.x] @ weights[op.weight].T
        best = scores.argmax(axis=1)  # finds a NaN before anything else
        finite = np.isfinite(scores[np.arange(len(best)), best])
        return Result(np.where(finite, best, -1).astype(np.int32), scores if logits else None, tuple(taps))

    def _heads(self, qkv: Floats) -> tuple[Floats, Floats, Floats]:
        """Views [rows, heads, head_dim] of the q, k and v columns."""
        heads = qkv.reshape(len(qkv), -1, self.program.kv.head_dim)
        first_k = self.program.num_heads
        first_v = first_k + self.program.kv.kv_heads
        return heads[:, :first_k], heads[:, first_k:first_v], heads[:, first_v:]


@dataclass(frozen=True)
class _Sight:
    """What the rows first..last of one request see: a mask over the slots that at least one of them sees."""

    first: int
    last: int
    slots: Flat  # [slots]
    seen: NDArray[np.bool_]  # [rows, slots]


def _checked_feeds(program: Program, batch: TreeBatch, feeds: Sequence[Floats]) -> Sequence[Floats]:
    wanted = [(batch.num_rows, program.widths[op.out]) for op in program.ops if isinstance(op, Feed)]
    found = [feed.shape for feed in feeds]
    if found != wanted or any(feed.dtype != np.float32 for feed in feeds):
        raise ValueError(f"the feeds have the shapes {found}; the program takes float32 of {wanted}")
    return feeds


def _flat(table: Ints, slots: NDArray[np.integer]) -> Flat:
    flat: Flat = table[slots // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + slots % BLOCK_SIZE
    return flat


def _written(batch: TreeBatch) -> Flat:
    """[rows], where each row's KV goes."""
    owner = np.repeat(np.arange(batch.num_requests), np.diff(batch.row_starts))
    flat: Flat = batch.block_tables[owner, batch.slots // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
    return flat + batch.slots % BLOCK_SIZE


def _sights(batch: TreeBatch) -> list[_Sight]:
    sights = []
    for request in range(batch.num_requests):
        first, last = batch.row_starts[request : request + 2].tolist()
        if first == last:
            continue
        prefixes = batch.prefix_lens[first:last]
        starts = batch.path_starts[first : last + 1]
        path = batch.path_slots[starts[0] : starts[-1]]
        seen = np.arange(max(prefixes.max(), path.max(initial=-1) + 1)) < prefixes[:, None]
        seen[np.repeat(np.arange(last - first), np.diff(starts)), path] = True
        # Slots that nobody sees may hold anything, NaN too, and 0 * NaN would reach the output: leave them out.
        slots = np.flatnonzero(seen.any(axis=0))
        sights.append(_Sight(first, last, _flat(batch.block_tables[request], slots), seen[:, slots]))
    return sights


def _attend(q: Floats, k: Floats, v: Floats, seen: NDArray[np.bool_]) -> Floats:
    """Softmax attention of q [rows, heads, d] over k and v [slots, kv_heads, d] -> [rows, heads * d]."""
    rows, heads, width = q.shape
    kv_heads = k.shape[1]
    # The heads of a group share k and v: [kv_heads, group, rows, d] @ [kv_heads, 1, d, slots].
    grouped = q.transpose(1, 0, 2).reshape(kv_heads, heads // kv_heads, rows, width)
    scores = grouped @ k.transpose(1, 2, 0)[:, None] * np.float32(width**-0.5)
    scores = np.where(seen, scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = weights @ v.transpose(1, 0, 2)[:, None] / weights.sum(axis=-1, keepdims=True)
    out: Floats = mixed.reshape(heads, rows, width).transpose(1, 0, 2).reshape(rows, heads * width)
    return out


def _rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    out: Floats = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight
    return out


def _rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Turn the pairs (i, i + d / 2) of x [rows, heads, d]."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _silu(x: Floats) -> Floats:
    small = np.exp(-np.abs(x))  # never overflows
    out: Floats = x * np.where(x >= 0.0, np.float32(1.0), small) / (np.float32(1.0) + small)
    return out
