"""Penalties, bias and masks of a row, against a slow twin that looks at the whole text of every row anew."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles import EvenSum
from pilotfish.errors import RequestError
from pilotfish.history import History
from pilotfish.params import SamplingParams

VOCAB = 12
END_IDS = {3, 9}
F = np.float32


def twin(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    bad_words: list[list[int]],
    mask: np.ndarray | None,
) -> np.ndarray:
    """The rule, token by token, in the words of vLLM's documents."""
    counts = Counter(output)
    row = []
    for token in range(VOCAB):
        x = F(logits[token])
        if token in params.logit_bias:
            x = F(x + F(params.logit_bias[token]))
        if token in counts or token in prompt:
            r = F(params.repetition_penalty)
            x = F(x / r) if x > 0 else F(x * r)
        if token in counts:
            x = F(x - F(F(params.frequency_penalty) * F(counts[token])))
            x = F(x - F(params.presence_penalty))
        banned = token in params.banned_token_ids
        banned |= params.allowed_token_ids is not None and token not in params.allowed_token_ids
        banned |= len(output) < params.min_tokens and token in END_IDS
        banned |= any(token == word[-1] and [*output, token][-len(word) :] == list(word) for word in bad_words if word)
        banned |= mask is not None and not mask[token]
        row.append(F(-np.inf) if banned else x)
    return np.array(row, F)


tokens = st.integers(0, VOCAB - 1)
any_params = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.2]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -0.7, 1.1, 100.0]), max_size=4),
    banned_token_ids=st.lists(tokens, max_size=3),
    allowed_token_ids=st.one_of(st.none(), st.lists(tokens, min_size=1, max_size=9)),
    min_tokens=st.integers(0, 4),
)


@settings(deadline=None, max_examples=300)
@given(
    params=any_params,
    prompt=st.lists(tokens, min_size=1, max_size=8),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=3),
    constrained=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_row_of_every_walk(
    params: SamplingParams, prompt: list[int], bad_words: list[list[int]], constrained: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    grammar = EvenSum(VOCAB) if constrained else None
    history = History(params, prompt, VOCAB, END_IDS, bad_words, grammar)
    committed: list[int] = []

    def legal_path(length: int) -> list[int]:
        state = EvenSum(VOCAB, committed)
        path: list[int] = []
        while len(path) < length and not (constrained and state.ended):
            choices = np.flatnonzero(state.allowed()) if constrained else np.arange(VOCAB)
            path.append(int(rng.choice(choices)))
            state.push(path[-1]) if constrained else None
        return path

    for _ in range(12):
        path = legal_path(int(rng.integers(0, 5)))
        history.walk(path)
        mask = EvenSum(VOCAB, [*committed, *path]).allowed() if constrained else None
        assert history.ended == (constrained and [*committed, *path][-1:] == [5])
        logits = np.round(rng.normal(0, 3, VOCAB), 1).astype(F)
        before = logits.copy()
        expected = twin(logits, params, prompt, [*committed, *path], bad_words, mask)
        if expected.max() == -np.inf:
            with pytest.raises(RequestError, match="no token is left"):
                history.process(logits)
        else:
            assert history.process(logits).tobytes() == expected.tobytes()
        assert logits.tobytes() == before.tobytes(), "the row itself is kept: log-probabilities are the model's"
        if rng.random() < 0.4:
            history.commit()
            committed += path
        if rng.random() < 0.2:
            history = history.copy()
        if constrained and committed[-1:] == [5]:
            break


def test_copies_go_their_own_ways() -> None:
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=1.5)
    first = History(params, [1, 2], VOCAB, grammar=EvenSum(VOCAB))
    second = first.copy()
    first.walk([4, 4])
    second.walk([2])
    row = np.ones(VOCAB, F)
    assert first.process(row)[4] == F(F(1 / 1.5) - 2) and second.process(row)[4] == 1
    assert second.process(row)[2] == F(F(1 / 1.5) - 1)


def test_legal_looks_at_masks_from_the_committed_tokens() -> None:
    params = SamplingParams(banned_token_ids=[8])
    history = History(params, [1], VOCAB, grammar=EvenSum(VOCAB))
    history.walk([2])
    history.commit()
    history.walk([4, 6])
    assert history.legal([4, 4, 3]) == 2
    assert history.legal([4, 8, 2]) == 1
    assert history.legal([]) == 0
    history.walk([4, 6])
    assert History(SamplingParams(allowed_token_ids=[1, 2]), [1], VOCAB).legal([1, 2, 3, 1]) == 2


def test_forced_tokens_follow_the_committed_ones() -> None:
    history = History(SamplingParams(), [1], VOCAB, grammar=EvenSum(VOCAB, [11]))
    assert history.forced() == [7]
    history.walk([1])
    assert history.forced() == [7]
    assert History(SamplingParams(banned_token_ids=[1]), [1], VOCAB).forced() == []


def test_many_tokens() -> None:
    """More distinct tokens than slots at the start, in prompt and output."""
    vocab = 5000
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, vocab, 300).tolist()
    output = rng.integers(0, vocab, 700).tolist()
    params = SamplingParams(repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.1)
    history = History(params, prompt, vocab)
    history.walk(output)
    logits = rng.normal(0, 3, vocab).astype(F)
    counts = np.bincount(output, minlength=vocab)
    seen = (counts > 0) | (np.bincount(prompt, minlength=vocab) > 0)
    expected = np.where(seen, np.where(logits > 0, logits / F(1.2), logits * F(1.2)), logits)
    expected = np.where(counts > 0, expected - F(0.1) * counts.astype(F) - F(0.4), expected)
    assert history.process(logits).tobytes() == expected.astype(F).tobytes()
    history.walk(output[:10])
    history.walk([])
    fresh = History(params, prompt, vocab)
    assert history.process(logits).tobytes() == fresh.process(logits).tobytes()


def test_a_grammar_that_refuses_is_the_requests_error() -> None:
    history = History(SamplingParams(), [1], VOCAB, grammar=EvenSum(VOCAB))
    with pytest.raises(RequestError, match="3 may not follow"):
        history.walk([2, 3])
