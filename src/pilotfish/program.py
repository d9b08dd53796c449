"""Programs: a model as a flat list of operations over named row buffers, and what an interpreter of them offers.

Builders (models/) write programs, interpreters (backends/) run them. All buffers are float32 [rows, width].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pilotfish.quant import Tensor
from pilotfish.tree import TreeBatch

Floats = NDArray[np.float32]

BLOCK_SIZE = 16  # slots in a block: one tile of K, whose 16 scores come out in 16 lanes
ROW_GROUP = 16  # rows of a matrix that lie together
CHUNK_SIZE = 256  # absolute positions that attention reduces at a time (numeric contract, design section 5)


@dataclass(frozen=True)
class Embed:
    """out = weight[token]."""

    weight: str
    out: str


@dataclass(frozen=True)
class Feed:
    """out = the next of the rows given to the pass from outside [rows, width]: what a Tap of another program kept."""

    out: str


@dataclass(frozen=True)
class Norm:
    """out = x / sqrt(mean(x^2) + eps) * weight (RMS norm, Zhang and Sennrich 2019, equation 4)."""

    x: str
    weight: str
    eps: float
    out: str


@dataclass(frozen=True)
class Part:
    """One matrix [outputs, inputs] of a Linear; its outputs go to columns `column`... of the buffer `out`."""

    weight: str
    bias: str | None = None
    column: int = 0


@dataclass(frozen=True)
class Linear:
    """out[:, column : column + outputs] (+)= x @ weight.T + bias, for each part; `add` accumulates (residual)."""

    x: str
    parts: tuple[Part, ...]
    out: str
    add: bool = False


@dataclass(frozen=True)
class RopeKV:
    """Rotate q and k of `qkv` = [q heads | k heads | v heads] in place and write k and v to their slots.

    With `q_norm` and `k_norm` [head_dim] each head is RMS-normalised before it is rotated (Qwen3).
    """

    qkv: str
    layer: int
    q_norm: str | None = None
    k_norm: str | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class Attention:
    """out = softmax(q k^T / sqrt(head_dim)) v over the positions a row sees; grouped heads."""

    qkv: str
    layer: int
    out: str


@dataclass(frozen=True)
class GatedAct:
    """out = silu(gate) * up with x = [gate | up]."""

    x: str
    out: str


@dataclass(frozen=True)
class Tap:
    """Keep a copy of x, one row for each row of the batch, in the result's `taps`."""

    x: str


@dataclass(frozen=True)
class Gather:
    """Keep only the rows whose head output is wanted: later operations see `out` with those rows."""

    x: str
    out: str


@dataclass(frozen=True)
class Head:
    """Logits x @ weight.T, and for each row the lowest output that reaches their maximum."""

    x: str
    weight: str


Op = Embed | Feed | Norm | Linear | RopeKV | Attention | GatedAct | Tap | Gather | Head


@dataclass(frozen=True)
class KVShape:
    """What one model keeps for each slot."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def bytes_per_block(self) -> int:
        return self.layers * self.kv_heads * self.head_dim * 2 * 2 * BLOCK_SIZE  # K and V, two bytes each


@dataclass(frozen=True)
class Program:
    """Operations in order, the widths of their buffers, and the shapes attention needs."""

    ops: tuple[Op, ...]
    widths: Mapping[str, int]
    num_heads: int
    kv: KVShape
    vocab_size: int
    rope_cos: Floats = field(repr=False)  # [context, head_dim / 2]
    rope_sin: Floats = field(repr=False)  # [context, head_dim / 2]
    head_size: int | None = None  # outputs of the head where it has not one for each token of the vocabulary

    @property
    def context_length(self) -> int:
        return len(self.rope_cos)

    @property
    def num_logits(self) -> int:
        return self.vocab_size if self.head_size is None else self.head_size


@dataclass(frozen=True)
class Result:
    """What a forward pass gives back; `wanted` = len(batch.logit_rows)."""

    argmax: NDArray[np.int32]  # [wanted]; -1 where the highest logit is not finite
    logits: Floats | None  # [wanted, num_logits]
    taps: tuple[Floats, ...] = ()  # each [rows, width]


class KV(Protocol):
    """The keys and values of one model, indexed by block ids that all models of an engine share."""

    def move(self, blocks: Sequence[int], src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy slot src[i] to dst[i], in order, in every layer; `blocks` is the request's block table."""

    @property
    def nbytes(self) -> int: ...


class Executable(Protocol):
    """A program bound to weights."""

    def forward(self, batch: TreeBatch, kv: KV, logits: bool, feeds: Sequence[Floats] = ()) -> Result:
        """One pass through the weights. Writes the KV of every row; gives logits only when asked.

        `feeds` are the rows [rows, width] that the program's Feeds take, one for each, in order.
        """


class Backend(Protocol):
    """An interpreter of programs."""

    name: str

    @property
    def description(self) -> str:
        """What computes, in words: for benchmarks."""

    def load(self, tensors: Mapping[str, Tensor]) -> Mapping[str, object]:
        """Bring tensors into the layout of this backend's kernels, value for value."""

    def replace_rows(self, weight: object, first: int, rows: Tensor) -> None:
        """Put other rows into a loaded matrix of their format, from `first` on, a multiple of ROW_GROUP.

        The rows that are left of the last ROW_GROUP may become zeros. No pass may run meanwhile.
        """

    def new_kv(self, shape: KVShape, num_blocks: int) -> KV: ...

    def prepare(self, program: Program, weights: Mapping[str, object]) -> Executable: ...
