"""The target's token at a position: a pure function of logits, parameters, request seed and absolute position.

A token is chosen as argmax(log-probability + Gumbel noise) over the tokens that the filters keep (the Gumbel-max
trick: Gumbel 1954; Maddison et al. 2014), which samples from their distribution. The noise belongs to
(seed, position, token id) and not to the order of calls, so whoever evaluates a position gets the same token.

The position is that of the chosen token: the row of the last of n tokens chooses the token at position n.
"""

from __future__ import annotations

import math
import sys
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pilotfish.errors import PilotfishError
from pilotfish.request import SamplingParams

Bits = NDArray[np.uint64]
Ids = NDArray[np.int32]
Logits = NDArray[np.float32]
Scores = NDArray[np.float64]

_Words = TypeVar("_Words", np.uint64, Bits)

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_NEAR = 8.0  # nats below the likeliest token: how far the first heat of `choose` reaches


def _splitmix64(start: np.uint64, index: _Words) -> _Words:
    """Output number `index` of the SplitMix64 stream that starts at `start` (Steele, Lea and Flood 2014)."""
    z = start + (index + np.uint64(1)) * _GAMMA
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: _Words = z ^ (z >> np.uint64(31))
    return mixed


def noise_bits(seed: int, position: int, token_ids: Ids) -> Bits:
    """[n] 64 random bits for each token id: stream(stream(stream(seed)[0])[position])[token id].

    The first step keeps seeds that differ by a multiple of the stream's increment from sharing positions.
    """
    with np.errstate(over="ignore"):  # NumPy warns when a scalar wraps around, as it must here
        key = _splitmix64(_splitmix64(np.uint64(seed), np.uint64(0)), np.uint64(position))
    return _splitmix64(key, token_ids.astype(np.uint64))


def _to_gumbel(bits: Bits) -> Scores:
    # The top 52 bits: with 53, adding a half would round the largest value up to 1, whose noise is infinite.
    uniform = ((bits >> np.uint64(12)).view(np.int64) + 0.5) * 2.0**-52
    noise: Scores = -np.log(-np.log(uniform))
    return noise


def gumbel(seed: int, position: int, token_ids: Ids) -> Scores:
    """[n] standard Gumbel noise -log(-log(u)), u = (top 52 bits + 1/2) / 2^52, between -3.6 and 36.8."""
    return _to_gumbel(noise_bits(seed, position, token_ids))


def _highest(scores: Scores, k: int) -> NDArray[np.bool_]:
    """Mask of the k highest scores; of equal ones the first."""
    if k >= len(scores):
        return np.ones(len(scores), np.bool_)
    lowest = np.partition(scores, -k)[-k]
    mask: NDArray[np.bool_] = scores >= lowest
    surplus = np.count_nonzero(mask) - k
    if surplus:
        mask[np.flatnonzero(scores == lowest)[-surplus:]] = False
    return mask


def _nucleus_size(scores: Scores, p: float) -> int:
    """How many of the highest scores it takes to hold a share p of the probability (Holtzman et al. 2019, equation 2).

    Tokens with less than (1 - p) / n of it are not needed: together they hold less than 1 - p, so the others reach
    p. Only those others are sorted.
    """
    weights = np.exp(scores)
    total = weights.sum()
    descending = np.sort(weights[weights >= (1.0 - p) * total / len(weights)])[::-1]
    return int(np.searchsorted(np.cumsum(descending), p * total)) + 1


def _filtered(logits: Logits, params: SamplingParams) -> tuple[Ids, Scores]:
    """Kept token ids, ascending, and their (logit - highest) / temperature: log-probabilities up to a constant."""
    highest = logits.max()
    if not np.isfinite(highest):  # NaN comes through max
        raise PilotfishError(f"the target's highest logit is {highest}; it must be finite")
    scores = logits.astype(np.float64)
    scores -= highest
    with np.errstate(over="ignore"):  # a tiny temperature sends a score to -inf, which is its limit
        scores /= params.temperature
    # Both of these keep the head of one descending order, so they may be applied together.
    keep = scores >= (math.log(params.min_p) if params.min_p else -sys.float_info.max)  # -inf is never kept
    if params.top_k:
        keep &= _highest(scores, params.top_k)
    ids = np.flatnonzero(keep).astype(np.int32)
    scores = scores[ids]
    if params.top_p < 1:
        keep = _highest(scores, _nucleus_size(scores, params.top_p))
        ids, scores = ids[keep], scores[keep]
    return ids, scores


def support(logits: Logits, params: SamplingParams) -> tuple[Ids, Scores]:
    """Token ids that may be sampled, ascending, and their log-probabilities, for a temperature above 0.

    Order and meaning are vLLM's: divide by the temperature; `min_p` keeps tokens with at least min_p times the highest
    probability; `top_k` keeps the k likeliest of these; `top_p` the shortest run of the likeliest of these that
    reaches p of their probability. Where the cut of top_k or top_p falls between equal tokens the lowest ids are
    kept (vLLM keeps all tokens equal to the k-th). Raises PilotfishError if the highest logit is not finite.
    """
    ids, scores = _filtered(logits, params)
    return ids, scores - math.log(np.exp(scores).sum())


def choose(logits: Logits, params: SamplingParams, seed: int, position: int) -> int:
    """The token for `position`: argmax at temperature 0, else argmax(log-probability + noise); ties to the lowest id.

    Raises PilotfishError if the highest logit is not finite.
    """
    if params.temperature == 0:
        token = int(np.argmax(logits))
        if not np.isfinite(logits[token]):  # argmax finds a NaN before anything else
            raise PilotfishError(f"the target's highest logit is {logits[token]}; it must be finite")
        return token
    ids, scores = _filtered(logits, params)
    bits = noise_bits(seed, position, ids)
    # The likely tokens run a first heat. A token more than _NEAR below the likeliest can beat the winner's sum only
    # with noise above sum + _NEAR; comparing bits finds those few without two logarithms for each of the vocabulary.
    near = scores > -_NEAR
    best = float((scores[near] + _to_gumbel(bits[near])).max())
    needed = math.exp(-math.exp(-(best + _NEAR))) - 2.0**-40  # as a uniform; the margin is far above any rounding
    finalists = np.flatnonzero(near | (bits >= np.uint64(needed * 2.0**64)))
    return int(ids[finalists[np.argmax(scores[finalists] + _to_gumbel(bits[finalists]))]])
