"""How often a view of the target with fewer layers would draft the target's own token, over a text of the target's.

The text is what the target goes on with after a few prompts. Every row of it is judged as it would be in drafting: a
run of rows is a chain of drafts, which sees the target's KV before it and the view's own KV from its first row on. So
one pass over all rows tells the acceptance of drafts at depths 1 to CHAIN, averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pilotfish.config import ModelConfig
from pilotfish.models.split import fed, view
from pilotfish.program import BLOCK_SIZE, KV, Backend, Executable, Floats, Program
from pilotfish.tree import Ints, Rows, TreeBatch

PROMPTS = (
    "def read_lines(path):\n    with open(path) as file:\n",
    "The capital of France is Paris, a city that",
    'Extract name and age. "Ann is 31 years old." -> {"name":',
    "Question: How does a bicycle stay upright?\nAnswer:",
    "English: The weather is fine today.\nGerman:",
    "Once there was a fisherman who lived by the sea. Every morning he",
)
PROMPT_TOKENS = 24  # of a prompt at most
NEW_TOKENS = 12  # for each prompt
CHAIN = 4


@dataclass(frozen=True)
class Run:
    """A view that has been run over the text (layer_search.Trial)."""

    layers: tuple[int, ...]  # that ran
    states: tuple[Floats, ...]  # [rows, hidden] before each of them, and after the last
    match: float

    @property
    def influence(self) -> Mapping[int, float]:
        """1 - cosine of a row before and after each layer, averaged over rows."""
        return {layer: _turn(*self.states[at : at + 2]) for at, layer in enumerate(self.layers)}


class TargetText:
    """The target's text, its KV in a cache of its own, and views that are run over it (layer_search.Text)."""

    def __init__(
        self,
        config: ModelConfig,
        program: Program,
        executable: Executable,
        backend: Backend,
        weights: Mapping[str, object],
        prompts: Sequence[Sequence[int]],
    ) -> None:
        """Lets the target continue the prompts, which are cut where the context is short.

        Raises ValueError when the context has no room for a token behind a prompt of one.
        """
        self._config, self._program, self._backend, self._weights = config, program, backend, weights
        new = min(NEW_TOKENS, program.context_length // 2)
        if new < 1:
            raise ValueError(f"a context of {program.context_length} tokens has no room for a text")
        texts = [list(prompt)[: min(PROMPT_TOKENS, program.context_length - new)] for prompt in prompts]
        each = -(-max(len(text) + new for text in texts) // BLOCK_SIZE)  # blocks of a text
        scratch = -(-new // BLOCK_SIZE)
        tables = [range(at * (each + scratch), (at + 1) * (each + scratch)) for at in range(len(texts))]
        self._kv: KV = backend.new_kv(program.kv, len(texts) * (each + scratch))
        self._continue(executable, texts, tables, new)
        self._batch = _chains(texts, tables, new, each * BLOCK_SIZE)
        self._wanted: Ints = np.concatenate([text[-new:] for text in texts]).astype(np.int32)

    def _continue(self, executable: Executable, texts: list[list[int]], tables: Sequence[range], new: int) -> None:
        starts = [0] * len(texts)
        for _ in range(new):
            rows = [Rows(text[start:], start, table) for text, start, table in zip(texts, starts, tables, strict=True)]
            starts = [len(text) for text in texts]
            result = executable.forward(TreeBatch.build(rows), self._kv, False)
            for text, token in zip(texts, result.argmax.tolist(), strict=True):
                text.append(max(token, 0))

    def run(self, skipped: frozenset[int], base: object | None) -> Run:
        """One pass of the view without `skipped`, from the first layer on in which it differs from the run `base`."""
        layers = tuple(layer for layer in range(self._config.num_layers) if layer not in skipped)
        shared: tuple[Floats, ...] = ()
        if isinstance(base, Run):
            same = 0
            while same < min(len(layers), len(base.layers)) and layers[same] == base.layers[same]:
                same += 1
            shared = base.states[: same + 1]
        rest = layers[max(0, len(shared) - 1) :]
        if not rest:  # only the last layers are left out: one layer must run before the head
            rest, shared = layers[-1:], shared[:-1]
        program = view(self._config, self._program, rest, range(len(rest) + 1))
        executable = self._backend.prepare(fed(program) if shared else program, self._weights)
        result = executable.forward(self._batch, self._kv, False, shared[-1:])
        return Run(layers, shared[:-1] + result.taps, float(np.mean(result.argmax == self._wanted)))


def _chains(texts: Sequence[Sequence[int]], tables: Sequence[range], new: int, first_slot: int) -> TreeBatch:
    """For each text the rows before its last `new` tokens, in chains of CHAIN; their KV goes behind `first_slot`."""
    count = len(texts)
    in_chain = np.arange(new) % CHAIN  # rows of its chain before each row
    slots = first_slot + np.arange(new)
    path = np.concatenate([slots[at - before : at + 1] for at, before in enumerate(in_chain)])
    positions = np.concatenate([len(text) - new - 1 + np.arange(new) for text in texts])
    rows = count * new

    def ints(values: object) -> Ints:
        return np.ascontiguousarray(values, np.int32)

    return TreeBatch(
        tokens=ints(np.concatenate([text[-new - 1 : -1] for text in texts])),
        positions=ints(positions),
        slots=ints(np.tile(slots, count)),
        prefix_lens=ints(positions - np.tile(in_chain, count)),
        path_starts=ints(np.concatenate([[0], np.cumsum(np.tile(in_chain + 1, count))])),
        path_slots=ints(np.tile(path, count)),
        row_starts=ints(np.arange(count + 1) * new),
        block_tables=ints([list(table) for table in tables]),
        logit_rows=ints(np.arange(rows)),
        logit_starts=ints(np.arange(count + 1) * new),
    )


def _turn(before: Floats, after: Floats) -> float:
    dots = np.einsum("rh,rh->r", before, after, dtype=np.float64)
    norms = np.linalg.norm(before, axis=1).astype(np.float64) * np.linalg.norm(after, axis=1)
    return float(np.mean(1.0 - dots / np.maximum(norms, 1e-30)))
