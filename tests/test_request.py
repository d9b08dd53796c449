"""Requests and what is counted for them."""

import numpy as np
import pytest

from pilotfish.errors import InputError
from pilotfish.params import SamplingParams
from pilotfish.request import Request, SpeculationCounts
from pilotfish.tree import DraftTree


def test_request_output_follows_the_prompt():
    prompt = [5, 6, 7]
    request = Request(0, prompt, SamplingParams(), seed=1)
    assert request.tokens == prompt and request.output == [] and request.finish_reason is None
    request.tokens.extend([8, 9])
    assert request.output == [8, 9] and prompt == [5, 6, 7]


def test_requests_share_nothing():
    first, second = (Request(0, [1], SamplingParams(), seed=1) for _ in range(2))
    first.tokens.append(2)
    first.counts.add(DraftTree.chain([1, 2, 3], "ngram"), [0])
    assert second.tokens == [1] and second.counts.drafted == 0 and first != second


def test_an_empty_prompt_is_refused():
    with pytest.raises(InputError, match="prompt is empty"):
        Request(0, [], SamplingParams(), seed=1)


def test_speculation_counts():
    counts = SpeculationCounts()
    assert counts.acceptance_length == 0 and counts.acceptance_rate == 0
    counts.add(DraftTree.empty(), [])
    assert counts.acceptance_length == 1 and counts.by_drafter == {}
    counts.add(DraftTree.chain([1, 2, 3, 4], "ngram"), [0, 1, 2, 3])
    counts.add(DraftTree(np.array([1, 2]), np.array([-1, -1]), "suffix"), [])
    counts.add(DraftTree(np.array([1, 2, 3, 4]), np.array([-1, -1, 0, 1]), "ngram"), [1])
    assert (counts.target_steps, counts.drafted, counts.accepted) == (4, 10, 5)
    assert counts.acceptance_length == 9 / 4 and counts.acceptance_rate == 0.5
    assert (counts.by_drafter["ngram"].drafted, counts.by_drafter["ngram"].accepted) == (8, 5)
    assert (counts.by_drafter["suffix"].drafted, counts.by_drafter["suffix"].accepted) == (2, 0)
    assert counts.drafted_at == [3, 2, 1, 1] and counts.accepted_at == [2, 1, 1, 1]
