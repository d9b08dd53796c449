"""The ratio rules through scheduler, KV and all parameters: the law of whole answers is the model's, by chi-square.

`SAMPLES` answers of three tokens over a vocabulary of eight. A total variation of e is found at a false alarm of 1e-3
with power .95 from N = 4.74 sqrt(2 df) / (4 e^2) samples on, here e = .029 for the 63 degrees of freedom of a pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from pilotfish.backends.native import NativeBackend
from pilotfish.drafters.base import DraftRequest, Price
from pilotfish.engine import Engine, Target
from pilotfish.history import History
from pilotfish.models.decoder import decoder_program
from pilotfish.params import SamplingParams
from pilotfish.sampling import probabilities
from pilotfish.tree import DraftTree, Rows, TreeBatch
from tiny import tiny_model

VOCAB = 8
SAMPLES = 16_000
PROMPT = [3, 1, 4, 1, 5]
ALARM = 3.09  # standard deviations: one in a thousand

Law = np.ndarray  # [vocab]


def _table(seed: int, spread: float) -> np.ndarray:
    """[vocab, vocab] what a drafter thinks follows each token."""
    table = np.exp(np.random.default_rng(seed).normal(0, spread, (VOCAB, VOCAB)))
    return table / table.sum(axis=1, keepdims=True)


@dataclass
class Sampled:
    """Draws trees of depth 2 from its table: at each node the children that `draw` gives."""

    draw: Callable[[np.random.Generator, Law], list[tuple[int, Law | None]]]
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))
    table: np.ndarray = field(default_factory=lambda: _table(1, 1.0))
    name: str = "sampled"

    def propose(self, requests: Sequence[DraftRequest], price: Price | None = None) -> list[DraftTree]:
        return [self._tree(request) for request in requests]

    def end(self, id: int) -> None:
        pass

    def _tree(self, request: DraftRequest) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        laws: list[Law | None] = []
        level = [(-1, request.tokens[-1])]
        for _ in range(min(2, request.max_depth)):
            below = []
            for node, token in level:
                for child, law in self.draw(self.rng, self.table[token]):
                    below.append((len(tokens), child))
                    tokens.append(child)
                    parents.append(node)
                    laws.append(law)
            level = below
        return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), self.name, tuple(laws))


def _one(rng: np.random.Generator, q: Law) -> list[tuple[int, Law | None]]:
    return [(int(rng.choice(VOCAB, p=q)), q)]


def _two_without_replacement(rng: np.random.Generator, q: Law) -> list[tuple[int, Law | None]]:
    first = int(rng.choice(VOCAB, p=q))
    rest = q.copy()
    rest[first] = 0
    rest /= rest.sum()
    return [(first, q), (int(rng.choice(VOCAB, p=rest)), rest)]


def _likeliest_and_one_drawn(rng: np.random.Generator, q: Law) -> list[tuple[int, Law | None]]:
    top = int(q.argmax())
    rest = q.copy()
    rest[top] = 0
    rest /= rest.sum()
    return [(top, None), (int(rng.choice(VOCAB, p=rest)), rest)]


def _one_of_a_false_law(rng: np.random.Generator, q: Law) -> list[tuple[int, Law | None]]:
    """Says that it drew from q but takes the better of two draws."""
    return [(max(int(rng.choice(VOCAB, p=q)), int(rng.choice(VOCAB, p=q)), key=lambda token: q[token]), q)]


@pytest.fixture(scope="module")
def target() -> Target:
    config, tensors = tiny_model("llama", 5, vocab_size=VOCAB)
    backend = NativeBackend(threads=2)
    program = decoder_program(config, 64)
    return Target(program, backend.prepare(program, backend.load(tensors)), backend.new_kv(program.kv, 160), 160)


def _model_law(target: Target, params: SamplingParams) -> np.ndarray:
    """[vocab, vocab, vocab] of the three tokens after the prompt."""

    def after(output: list[int]) -> Law:
        batch = TreeBatch.build([Rows([*PROMPT, *output], 0, [0])])
        logits = target.executable.forward(batch, target.kv, True).logits
        assert logits is not None
        history = History(params, PROMPT, VOCAB)
        history.walk(output)
        return probabilities(history.process(logits[0]), params)

    law = np.zeros((VOCAB, VOCAB, VOCAB))
    first = after([])
    for a in np.flatnonzero(first):
        second = after([int(a)])
        for b in np.flatnonzero(second):
            law[a, b] = first[a] * second[b] * after([int(a), int(b)])
    return law


def _answers(
    target: Target,
    params: SamplingParams,
    draw: Callable[..., list[tuple[int, Law | None]]] | None,
    samples: int = SAMPLES,
) -> np.ndarray:
    """[vocab, vocab, vocab] how often each answer came."""
    engine = Engine(target, draw and Sampled(draw), 12, max_num_seqs=64, token_budget=1024)
    requests = [engine.add(PROMPT, replace(params, seed=seed))[0] for seed in range(samples)]
    for _ in engine.run():
        pass
    assert engine.drafting.failures == 0
    assert draw is None or np.mean([request.counts.accepted for request in requests]) > 0.1
    counts = Counter(tuple(request.output) for request in requests)
    found = np.zeros((VOCAB, VOCAB, VOCAB))
    for output, count in counts.items():
        found[output] = count
    return found


def _deviation(found: np.ndarray, law: np.ndarray) -> float:
    """Chi-square in standard deviations (Wilson and Hilferty 1931); cells that expect less than 5 are one."""
    expected = law.ravel() * found.sum()
    observed = found.ravel()
    assert observed[expected == 0].sum() == 0, "an answer that can not be"
    rare = expected < 5
    pairs = [*zip(observed[~rare], expected[~rare], strict=True)]
    if expected[rare].sum() >= 5:
        pairs.append((observed[rare].sum(), expected[rare].sum()))
    chi = sum((o - e) ** 2 / e for o, e in pairs)
    df = len(pairs) - 1
    return float(((chi / df) ** (1 / 3) - (1 - 2 / (9 * df))) / (2 / (9 * df)) ** 0.5)


ADJUSTED = {"top_k": 6, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "logit_bias": {2: 1.0}}


@pytest.mark.parametrize(
    ("rule", "draw", "parameters"),
    [
        ("ratio", _one, {}),
        ("block", _one, ADJUSTED),
        ("multi", _two_without_replacement, ADJUSTED),
        ("multi", _likeliest_and_one_drawn, {"banned_token_ids": [6]}),
    ],
)
def test_answers_follow_the_models_law(
    target: Target,
    rule: str,
    draw: Callable[..., list[tuple[int, Law | None]]],
    parameters: dict[str, object],
) -> None:
    params = SamplingParams(max_tokens=3, temperature=1.0, acceptance=rule, **parameters)  # type: ignore[arg-type]
    law, found = _model_law(target, params), _answers(target, params, draw)
    assert _deviation(found.sum(axis=2), law.sum(axis=2)) < ALARM
    assert _deviation(found.sum(axis=0), law.sum(axis=0)) < ALARM


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_false_law_is_found(target: Target, rule: str) -> None:
    params = SamplingParams(max_tokens=3, temperature=1.0, acceptance=rule)
    law, found = _model_law(target, params), _answers(target, params, _one_of_a_false_law, 8000)
    assert _deviation(found.sum(axis=2), law.sum(axis=2)) > 2 * ALARM


def test_match_needs_no_laws(target: Target) -> None:
    """The drafter of a false law changes nothing here: seed by seed the answers are those without drafts."""
    params = SamplingParams(max_tokens=3, temperature=1.0)
    drafted = _answers(target, params, _one_of_a_false_law, 1000)
    plain = _answers(target, params, None, 1000)
    assert (plain == drafted).all()
