"""Parts of a decoder as programs of their own: layer-skipped views, and a target in two halves.

Whoever has computed the first layers of a row, as a drafter that exits early has, need not compute them again: the
second half takes the row's residual stream from a Feed. Tap and Feed copy bits, and the bits of a row do not depend on
which rows stand beside it, so the halves give what the whole gives, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pilotfish.config import ModelConfig
from pilotfish.models.decoder import decoder_program
from pilotfish.program import KV, Backend, Embed, Feed, Floats, Gather, Program, Result
from pilotfish.tree import Ints, TreeBatch


def view(config: ModelConfig, whole: Program, layers: Sequence[int], taps: Sequence[int] = ()) -> Program:
    """`decoder_program` with these layers and taps and the tables of angles of `whole`, which take time and memory.

    Raises InputError when layers or taps do not fit the model.
    """
    return replace(decoder_program(config, 1, layers, taps), rope_cos=whole.rope_cos, rope_sin=whole.rope_sin)


def fed(program: Program) -> Program:
    """The program with its residual stream [rows, hidden] from outside instead of the embedding."""
    first = program.ops[0]
    if not isinstance(first, Embed):
        raise ValueError("the program does not begin with an embedding")
    return replace(program, ops=(Feed(first.out), *program.ops[1:]))


def headless(program: Program) -> Program:
    """The program without what follows the last layer: it writes KV and taps, and gives no logits."""
    kinds = [type(op) for op in program.ops]
    if Gather not in kinds:
        raise ValueError("the program has no head")
    return replace(program, ops=program.ops[: kinds.index(Gather)])


def rows_of(batch: TreeBatch, keep: NDArray[np.bool_]) -> TreeBatch:
    """The batch of the rows with `keep` [rows], in their order, of which no logits are wanted."""
    lengths = np.diff(batch.path_starts)
    return TreeBatch(
        tokens=batch.tokens[keep],
        positions=batch.positions[keep],
        slots=batch.slots[keep],
        prefix_lens=batch.prefix_lens[keep],
        path_starts=_starts(lengths[keep]),
        path_slots=batch.path_slots[np.repeat(keep, lengths)],
        row_starts=np.concatenate([[0], np.cumsum(keep)])[batch.row_starts].astype(np.int32),
        block_tables=batch.block_tables,
        logit_rows=np.zeros(0, np.int32),
        logit_starts=np.zeros(batch.num_requests + 1, np.int32),
    )


def _starts(lengths: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@dataclass(frozen=True)
class States:
    """Rows of a batch whose first layers have been computed: their KV in those layers is in their slots."""

    rows: Ints  # [known], ascending
    hidden: Floats  # [known, hidden] the residual stream after those layers


class SplitExecutable:
    """A decoder in two halves, cut before layer `at`: rows whose first half is known skip it."""

    def __init__(
        self, config: ModelConfig, whole: Program, at: int, backend: Backend, weights: Mapping[str, object]
    ) -> None:
        """Raises InputError unless 0 < at < layers."""
        self.at = at
        self._early = backend.prepare(headless(view(config, whole, range(at), (at,))), weights)
        self._late = backend.prepare(fed(view(config, whole, range(at, config.num_layers))), weights)

    def forward(self, batch: TreeBatch, kv: KV, logits: bool, known: States) -> Result:
        """What the whole program gives for the batch, bit for bit, KV of all rows included.

        For that to be true, the states must be those that the whole program would have after its first half, and the
        rows' KV of the first half must stand in the slots that the batch names.
        """
        unknown = np.ones(batch.num_rows, np.bool_)
        unknown[known.rows] = False
        hidden = np.empty((batch.num_rows, known.hidden.shape[1]), np.float32)
        hidden[known.rows] = known.hidden
        if unknown.any():
            (hidden[unknown],) = self._early.forward(rows_of(batch, unknown), kv, False).taps
        return self._late.forward(batch, kv, logits, (hidden,))
