"""What stands in for tokenizers, grammars and drafters in tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pilotfish.drafters.base import DraftRequest, Price
from pilotfish.errors import RequestError
from pilotfish.history import Grammar
from pilotfish.output import Detokenizer
from pilotfish.params import StructuredOutput
from pilotfish.tree import DraftTree
from tiny import random_tree

VOCAB = 128


class EvenSum:
    """A grammar for tests: a token may follow if the sum of the last two is even; after token 5 nothing may.

    Of what follows 11 it says that it is 7, which need not be so: forced tokens are guesses.
    """

    def __init__(self, vocab: int, tokens: Sequence[int] = ()) -> None:
        self.vocab = vocab
        self.tokens = list(tokens)

    def allowed(self) -> np.ndarray:
        last = self.tokens[-1] if self.tokens else 0
        return np.array([self.ended or (last + token) % 2 == 0 for token in range(self.vocab)])

    def mask(self) -> np.ndarray:
        return np.packbits(self.allowed(), bitorder="little")

    def legal(self, tokens: Sequence[int]) -> int:
        twin, count = self.copy(), 0
        for token in tokens:
            if twin.ended or not twin.allowed()[token]:
                break
            twin.push(token)
            count += 1
        return count

    def push(self, token: int) -> None:
        if self.ended or not self.allowed()[token]:
            raise RequestError(f"{token} may not follow")
        self.tokens.append(token)

    def rewind(self, count: int) -> None:
        assert 0 < count <= len(self.tokens)
        del self.tokens[len(self.tokens) - count :]

    def forced(self) -> list[int]:
        return [7] if self.tokens[-1:] == [11] else []

    def copy(self) -> EvenSum:
        return EvenSum(self.vocab, self.tokens)

    @property
    def ended(self) -> bool:
        return self.tokens[-1:] == [5]


class Letters:
    """A tokenizer and its detokenizer: each id is one letter; every structured output is an EvenSum."""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id % 26)

    def finish(self) -> str:
        return ""

    def new_detokenizer(self, answers: bool | None) -> Detokenizer:
        return self

    def spellings(self, word: str) -> list[list[int]]:
        return [[ord(letter) - ord("a") for letter in word]]

    def grammar(self, structured: StructuredOutput) -> Grammar:
        return EvenSum(VOCAB)


@dataclass
class Oracle:
    """Random trees that hide a stretch of the true continuation, so that branches are accepted to any depth."""

    truth: dict[int, list[int]]  # request -> prompt and plain output
    rng: np.random.Generator
    name: str = "oracle"
    ended: list[int] = field(default_factory=list)

    def propose(self, requests: Sequence[DraftRequest], price: Price | None = None) -> list[DraftTree]:
        return [self._tree(request) for request in requests]

    def end(self, id: int) -> None:
        self.ended.append(id)

    def _tree(self, request: DraftRequest) -> DraftTree:
        future = self.truth[request.id][len(request.tokens) :][: request.max_depth]
        nodes = int(self.rng.integers(0, request.budget + 1))
        tree = random_tree(self.rng, nodes, VOCAB)
        tokens, parents = tree.tokens.copy(), tree.parents
        node = -1
        for token in future:
            children = np.flatnonzero(parents == node)
            if len(children) == 0 or self.rng.random() < 0.2:
                break
            node = int(self.rng.choice(children))
            twins = children[tokens[children] == token]
            tokens[twins] = tokens[node]
            tokens[node] = token
        deep = DraftTree(tokens, parents, self.name)
        return deep if not nodes or deep.depths().max() <= request.max_depth else DraftTree.empty()
