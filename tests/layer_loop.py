"""A small step loop for drafters that share the target's KV: what the engine does, with everything in the open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pilotfish.backends.native import choose
from pilotfish.drafters.base import Drafter, DraftRequest, Host, Price
from pilotfish.models.decoder import decoder_program
from pilotfish.params import SamplingParams
from pilotfish.program import BLOCK_SIZE, Backend, Floats
from pilotfish.tree import DraftTree, Rows, TreeBatch

BLOCKS = 96


class Letters:
    """A tokenizer whose ids are bytes."""

    def encode(self, text: str, special: bool) -> list[int]:
        return [byte % 128 for byte in text.encode()]


def tiny_host(backend: Backend, config: Any, tensors: Any, context: int | None = None, blocks: int = BLOCKS) -> Host:
    program = decoder_program(config, context or config.context_length)
    weights = backend.load(tensors)
    kv = backend.new_kv(program.kv, blocks)
    return Host(config, program, backend.prepare(program, weights), weights, kv, blocks, backend, Letters(), 8)


@dataclass
class Running:
    id: int
    tokens: list[int]
    blocks: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    computed: int = 0
    rows: list[Floats] = field(default_factory=list)  # logits behind each new token
    prompt: int = 0

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)


class Loop:
    """Steps several sequences at once. `cut` makes another tree of what was drafted before it is verified."""

    def __init__(
        self,
        host: Host,
        drafter: Drafter | None,
        budget: int = 4,
        cut: Callable[[DraftTree], DraftTree] = lambda tree: tree,
        price: Price | None = None,
        split: bool = False,
    ) -> None:
        self.host, self.drafter, self.budget = host, drafter, budget
        self.cut, self.price, self.split = cut, price, split
        self.drafted = self.accepted = self.steps = self.split_passes = 0

    def prefill(self, sequences: Sequence[Running]) -> None:
        """Everything but the last token."""
        rows = [Rows(one.tokens[:-1], 0, one.blocks, logits=False) for one in sequences]
        self.host.executable.forward(TreeBatch.build(rows), self.host.kv, False)
        for one in sequences:
            one.computed = len(one.tokens) - 1

    def step(self, sequences: Sequence[Running]) -> None:
        trees = [DraftTree.empty()] * len(sequences)
        if self.drafter is not None:
            asked = [
                DraftRequest(
                    one.id, one.tokens, self.budget, self.budget, blocks=one.blocks, params=one.params, seed=one.seed
                )
                for one in sequences
            ]
            trees = [self.cut(tree) for tree in self.drafter.propose(asked, self.price)]
        rows = [
            Rows([one.tokens[-1]], len(one.tokens) - 1, one.blocks, tree)
            for one, tree in zip(sequences, trees, strict=True)
        ]
        batch = TreeBatch.build(rows)
        result = None
        if self.split:
            drafter: Any = self.drafter
            result = drafter.target_pass(batch, True, [one.id for one in sequences], trees)
            self.split_passes += result is not None
        if result is None:
            result = self.host.executable.forward(batch, self.host.kv, True)
        assert result.logits is not None
        self.steps += 1
        for index, (one, tree) in enumerate(zip(sequences, trees, strict=True)):
            first = int(batch.logit_starts[index])
            self._commit(one, tree, result.logits[first : first + 1 + len(tree)])

    def _commit(self, one: Running, tree: DraftTree, logits: Floats) -> None:
        end, node, path = len(one.tokens), -1, []
        new: list[int] = []
        while True:
            row = logits[1 + node]
            one.rows.append(row.copy())
            new.append(choose(row, one.params, one.seed, end + len(new)))
            child = tree.child(node, new[-1])
            if child is None:
                break
            path.append(child)
            node = child
        moves = [(end + at, end + depth) for depth, at in enumerate(path) if at != depth]
        self.host.kv.move(one.blocks, [src for src, _ in moves], [dst for _, dst in moves])
        one.tokens += new
        one.computed = len(one.tokens) - 1
        self.drafted += len(tree)
        self.accepted += len(path)


def committed_kv(host: Host, one: Running) -> list[np.ndarray]:
    """Bits of keys and values of all layers in the slots that hold committed KV."""
    kv: Any = host.kv
    found = []
    for layer in range(host.program.kv.layers):
        keys, values = kv.keys(layer)[one.blocks], kv.values(layer)[one.blocks]
        slots = len(one.blocks) * BLOCK_SIZE
        found.append(keys.transpose(0, 3, 1, 2).reshape(slots, -1)[: one.computed].copy())
        found.append(values.transpose(0, 2, 1, 3).reshape(slots, -1)[: one.computed].copy())
    return found
