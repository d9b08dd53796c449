"""The target's token at a position: a pure function of logits, parameters, request seed and absolute position.

A token is chosen as argmax(log-probability + Gumbel noise) over the tokens that the filters keep (the Gumbel-max
trick: Gumbel 1954; Maddison et al. 2014), which samples from their distribution. The noise belongs to
(seed, position, token id) and not to the order of calls, so whoever evaluates a position gets the same token.

The position is that of the chosen token: the row of the last of n tokens chooses the token at position n.

This file is the rule, written to be read; csrc/sampler.h (`backends.native.choose`) gives the same tokens fast. So that
both can agree on every bit, what decides is made of single IEEE operations on float64, whole numbers and comparisons:
exp and log are polynomials of our own, and probabilities are added as whole numbers, whose sums know no order.
"""

from __future__ import annotations

import math
import sys
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pilotfish.errors import PilotfishError
from pilotfish.params import SamplingParams

Bits = NDArray[np.uint64]
Ids = NDArray[np.int32]
Logits = NDArray[np.float32]
Scores = NDArray[np.float64]

_Words = TypeVar("_Words", np.uint64, Bits)

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")  # n * high is exact
_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
# 2^f for |f| <= 1/2 within 2e-9 of its size: of all such polynomials with 1 at 0 the one of least greatest error.
_POWER_OF_2 = (
    1.0,
    float.fromhex("0x1.62e430af272cfp-1"),
    float.fromhex("0x1.ebfbdc3c3035cp-3"),
    float.fromhex("0x1.c6aee88e6a27bp-5"),
    float.fromhex("0x1.3b2d4cf1dc324p-7"),
    float.fromhex("0x1.5f3e530815329p-10"),
    float.fromhex("0x1.41fbbc11c4bd0p-13"),
)
_WEIGHTLESS = -29.0  # a score whose weight rounds to 0
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD  # of the float64 next to sqrt(1/2)


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


def _log(x: Scores) -> Scores:
    """Natural logarithms of positive normal numbers, within 1e-15 of their size.

    x = 2^n m with m in [sqrt(1/2), sqrt(2)); log(m) = 2 artanh(s), s = (m - 1) / (m + 1), by its Taylor series.
    """
    bits = x.view(np.int64)
    n = (bits - _SQRT_HALF_BITS) >> 52
    f = (bits - (n << 52)).view(np.float64) - 1.0
    s = f / (f + 2.0)
    z = s * s
    series = np.full_like(z, 1.0 / 17.0)
    for k in range(15, 1, -2):
        series = series * z + 1.0 / k
    twice = s + s
    logs: Scores = n * _LN2_HIGH + (n * _LN2_LOW + (twice + twice * (z * series)))
    return logs


def _exp(x: Scores) -> Scores:
    """Exponentials of numbers from -64 to 0, within 3e-9 of their size: 2^n 2^f, 2^f by a polynomial."""
    t = x * _LOG2_E
    n = np.rint(t)
    f = t - n
    power = np.full_like(f, _POWER_OF_2[-1])
    for coefficient in _POWER_OF_2[-2::-1]:
        power = power * f + coefficient
    exponentials: Scores = np.ldexp(power, n.astype(np.int32))
    return exponentials


def _weights(scores: Scores) -> Bits:
    """round(2^40 e^score) for scores up to 0: probabilities up to a factor, sums of 2^23 of them fit 63 bits."""
    weights: Bits = np.rint(_exp(np.maximum(scores, -64.0)) * 2.0**40).astype(np.uint64)
    return weights


def _to_gumbel(bits: Bits) -> Scores:
    # The top 52 bits: with 53, adding a half would round the largest value up to 1, whose noise is infinite.
    uniform = ((bits >> np.uint64(12)).view(np.int64) + 0.5) * 2.0**-52
    return -_log(-_log(uniform))


def gumbel(seed: int, position: int, token_ids: Ids) -> Scores:
    """[n] standard Gumbel noise -log(-log(u)), u = (top 52 bits + 1/2) / 2^52, between -3.6 and 36.8."""
    return _to_gumbel(noise_bits(seed, position, token_ids))


def broken_row(logits: Logits) -> PilotfishError:
    """What to raise when the highest logit is not finite; a NaN counts as the highest."""
    return PilotfishError(f"the target's highest logit is {logits.max()}; it must be finite")


def _nucleus_size(weights: Bits, p: float) -> int:
    """How many of the first weights it takes to hold a share p of all (Holtzman et al. 2019, equation 2)."""
    held = np.cumsum(weights)
    total = int(held[-1])
    return int(np.searchsorted(held, np.uint64(min(math.ceil(p * float(total)), total)))) + 1


def _typical(scores: Scores, weights: Bits, p: float) -> NDArray[np.int64]:
    """Indices of the tokens of least |surprise - mean surprise| that hold a share p (Meister et al. 2023).

    A surprise is -score up to a constant, so the distance needs no normaliser. The mean is taken of whole numbers, in
    units of 2^-16; halves of 32 bits keep the sum of their products from overflowing.
    """
    products = weights * np.rint(-scores * 2.0**16).astype(np.uint64)
    high, low = int((products >> np.uint64(32)).sum()), int((products & np.uint64(0xFFFFFFFF)).sum())
    mean = ((high << 32) + low) / int(weights.sum()) / 2.0**16
    order = np.argsort(np.abs(-scores - mean), kind="stable")
    return np.sort(order[: _nucleus_size(weights[order], p)])


def _filtered(logits: Logits, params: SamplingParams) -> tuple[Ids, Scores]:
    """Kept token ids, ascending, and their (logit - highest) / temperature: log-probabilities up to a constant."""
    highest = logits.max()
    if not np.isfinite(highest):
        raise broken_row(logits)
    with np.errstate(over="ignore"):  # a tiny temperature sends a score to -inf, which is its limit
        scores = (logits.astype(np.float64) - np.float64(highest)) / params.temperature
    # A min_p too small to be a normal number filters nothing; a score of -inf is never kept.
    least = _log(np.array(params.min_p, np.float64)) if params.min_p >= sys.float_info.min else -sys.float_info.max
    if params.top_p < 1 or params.typical_p < 1:
        least = max(least, _WEIGHTLESS)  # cuts that are made by weight never reach these: do not sort them
    ids = np.flatnonzero(scores >= least)
    if params.top_k or params.top_p < 1:
        # By logits and not by scores, which rounding can make equal.
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        if params.top_k:
            ids = ids[: params.top_k]
        if params.top_p < 1:
            ids = ids[: _nucleus_size(_weights(scores[ids]), params.top_p)]
        ids.sort()
    if params.typical_p < 1:
        ids = ids[_typical(scores[ids], _weights(scores[ids]), params.typical_p)]
    return ids.astype(np.int32), scores[ids]


def support(logits: Logits, params: SamplingParams) -> tuple[Ids, Scores]:
    """Token ids that may be sampled, ascending, and their log-probabilities, for a temperature above 0.

    Order and meaning are vLLM's: divide by the temperature; `min_p` keeps tokens with at least min_p times the highest
    probability; `top_k` keeps the k likeliest of these; `top_p` the shortest run of the likeliest of these that
    reaches p of their probability; `typical_p`, which vLLM lacks, comes last, as in Hugging Face's order. Where a cut
    falls between equal tokens the lowest ids are kept (vLLM keeps all tokens equal to the k-th). Raises PilotfishError
    if the highest logit is not finite.
    """
    ids, scores = _filtered(logits, params)
    return ids, scores - math.log(np.exp(scores).sum())


def probabilities(logits: Logits, params: SamplingParams) -> Scores:
    """[vocab] what `choose` samples from, as float64 that sum to 1; a point mass at temperature 0.

    Raises PilotfishError if the highest logit is not finite.
    """
    dense = np.zeros(len(logits))
    if params.temperature == 0:
        dense[choose(logits, params, 0, 0)] = 1.0
        return dense
    ids, log_probabilities = support(logits, params)
    kept = np.exp(log_probabilities)
    dense[ids] = kept / kept.sum()
    return dense


class Chance:
    """Random outcomes for the rules that need more than the noise of the tokens (verify.py), in order of call.

    They are keyed by (seed, position of the first token that the step decides), from another stream than `gumbel`, so
    they depend on nothing that a drafter sees, and steps do not share any.
    """

    def __init__(self, seed: int, position: int) -> None:
        with np.errstate(over="ignore"):
            self._key = _splitmix64(_splitmix64(np.uint64(seed), np.uint64(1)), np.uint64(position))
        self._calls = 0

    def __call__(self, probabilities: Scores) -> int:
        """An index drawn with these probabilities [n], up to a factor; never one of probability 0."""
        with np.errstate(over="ignore"):
            bits = int(_splitmix64(self._key, np.uint64(self._calls)))
        self._calls += 1
        held = np.cumsum(probabilities)
        # Strictly above u < 1 times all: an entry of probability 0 holds no more than the one before it.
        return int(np.searchsorted(held, (bits >> 11) * 2.0**-53 * held[-1], side="right"))


def choose(logits: Logits, params: SamplingParams, seed: int, position: int) -> int:
    """The token for `position`: argmax at temperature 0, else argmax(log-probability + noise); ties to the lowest id.

    Raises PilotfishError if the highest logit is not finite.
    """
    if params.temperature == 0:
        token = int(np.argmax(logits))
        if not np.isfinite(logits[token]):  # argmax finds a NaN before anything else
            raise broken_row(logits)
        return token
    ids, scores = _filtered(logits, params)
    return int(ids[np.argmax(scores + gumbel(seed, position, ids))])


def log_probabilities(logits: Logits, top: int) -> tuple[float, Ids]:
    """The log of the normaliser of a row, log(sum of e^logit), and the ids of its `top` likeliest tokens.

    A token's log-probability is float64(logit) - normaliser: the model's own, at temperature 1 and before penalties,
    masks and filters, as with OpenAI and vLLM's raw_logprobs. Ids come by descending logit, equal ones by ascending
    id; there are min(top, vocab). The normaliser is a sum of weights that are rounded to multiples of 2^-40 of the
    highest, so for n tokens, n up to 2^18, it is within n 2^-41 + 3e-9 (8e-8 for 151,936), and its own float64
    rounding, of the exact one. Raises PilotfishError if the highest logit is not finite.
    """
    highest = logits.max()
    if not np.isfinite(highest):
        raise broken_row(logits)
    total = _weights(logits.astype(np.float64) - np.float64(highest)).sum()
    normaliser = float(highest) + float(_log(np.array(float(total) * 2.0**-40)))
    return normaliser, np.argsort(-logits, kind="stable")[:top].astype(np.int32)
