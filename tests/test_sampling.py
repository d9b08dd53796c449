import itertools
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish import sampling
from pilotfish.errors import PilotfishError
from pilotfish.params import SamplingParams
from pilotfish.sampling import choose, gumbel, noise_bits, support

U64 = 2**64
GAMMA = 0x9E3779B97F4A7C15


def ids(count, start=0):
    return np.arange(start, start + count, dtype=np.int32)


# The generator.


def slow_splitmix64(start, index):
    z = (start + (index + 1) * GAMMA) % U64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % U64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % U64
    return z ^ z >> 31


@pytest.mark.parametrize(
    ("start", "outputs"),
    [  # published outputs of splitmix64.c (S. Vigna) and of Java's SplittableRandom
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]),
        (
            1234567,
            [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821],
        ),
    ],
)
def test_splitmix64_known_answers(start, outputs):
    found = sampling._splitmix64(np.uint64(start), np.arange(5, dtype=np.uint64))
    assert found.tolist() == outputs
    assert [slow_splitmix64(start, index) for index in range(5)] == outputs


@given(st.integers(0, U64 - 1), st.integers(0, 2**31 - 1), st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_noise_bits_equal_their_definition_in_whole_numbers(seed, position, tokens):
    key = slow_splitmix64(slow_splitmix64(seed, 0), position)
    assert noise_bits(seed, position, np.array(tokens, np.int32)).tolist() == [slow_splitmix64(key, t) for t in tokens]


@pytest.mark.parametrize(
    ("seed", "position", "bits"),
    [  # fixed for ever: a change would change every sampled text
        (0, 0, [0x238275BC38FCBE91, 0xF89A2566B5822C54, 0x38259E5D0C3A4871, 0x53E64ECF15D269DE]),
        (1, 0, [0xB18A02F46D8D86C3, 0xF8C5B62C83F707E8, 0xB2FE25B565DE774A, 0xCE2558F72F06FA03]),
        (0, 1, [0x2F101FE21496EA20, 0xA00624088F65D5B6, 0x2EBF51C2D875E1A4, 0x433768D16CBCDE5F]),
        (U64 - 1, 131071, [0xF9BB24298B5288F8, 0x1FA0BD8675C8A3EF, 0x94195F72792CB664, 0x6467542D1552E233]),
    ],
)
def test_golden_noise_bits(seed, position, bits):
    tokens = np.array([0, 1, 49151, 151935], np.int32)
    assert noise_bits(seed, position, tokens).tolist() == bits
    uniforms = [((word >> 12) + 0.5) / 2**52 for word in bits]
    expected = [-math.log(-math.log(u)) for u in uniforms]
    np.testing.assert_allclose(gumbel(seed, position, tokens), expected, rtol=1e-12)


def test_noise_is_finite_at_both_ends():
    low, high = sampling._to_gumbel(np.array([0, U64 - 1], np.uint64))
    assert low == pytest.approx(-math.log(53 * math.log(2)), rel=1e-12)
    assert high == pytest.approx(53 * math.log(2), rel=1e-12)


def test_noise_of_a_token_does_not_depend_on_its_neighbours():
    whole = gumbel(5, 17, ids(5000))
    rng = np.random.default_rng(0)
    for _ in range(50):
        start = int(rng.integers(0, 4900))
        some = ids(int(rng.integers(1, 100)), start)
        assert np.array_equal(gumbel(5, 17, some), whole[some])
    shuffled = rng.permutation(ids(5000))
    assert np.array_equal(gumbel(5, 17, shuffled), whole[shuffled])
    assert np.array_equal(gumbel(5, 17, ids(5000)[::3]), whole[::3])


# The functions that are ours so that C++ can repeat them.


def test_exp_and_log_against_the_library():
    rng = np.random.default_rng(8)
    x = np.concatenate([-(rng.random(20_000) ** 4) * 64, [0.0, -64.0, -1e-300]])
    np.testing.assert_allclose(sampling._exp(x), [math.exp(value) for value in x], rtol=3e-9)
    near_one = 1 - 2.0 ** -rng.uniform(1, 53, 20_000)
    x = np.concatenate(
        [np.exp(rng.uniform(-700, 700, 20_000)), near_one, [sys.float_info.min, 2.0**-53, 0.5, 2.0, 36.8]]
    )
    np.testing.assert_allclose(sampling._log(x), [math.log(value) for value in x], rtol=1e-15)
    assert sampling._exp(np.zeros(1)) == 1 and sampling._log(np.ones(1)) == 0


def test_weights_are_whole_numbers():
    scores = np.array([0.0, -1.0, -28.4, -28.5, -1e300, -math.inf])
    highest, second, *others = sampling._weights(scores).tolist()
    assert highest == 2**40 and second == pytest.approx(math.exp(-1) * 2**40, rel=3e-9) and others == [1, 0, 0, 0]


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_limit(df, z=3.0902):
    """What chance exceeds with probability 1e-3 (Wilson and Hilferty 1931)."""
    return df * (1 - 2 / (9 * df) + z * math.sqrt(2 / (9 * df))) ** 3


def test_chi_square_limit_against_tables():
    assert chi_square_limit(15) == pytest.approx(37.70, rel=5e-3)
    assert chi_square_limit(255) == pytest.approx(330.5, rel=3e-3)


COUNT = 1 << 16
AXES = {
    "tokens": lambda: noise_bits(3, 5, ids(COUNT)),
    "positions": lambda: np.concatenate([noise_bits(3, position, ids(1, 9)) for position in range(COUNT // 8)]),
    "seeds": lambda: np.concatenate([noise_bits(seed, 5, ids(1, 9)) for seed in range(COUNT // 8)]),
    # The increment of the generator's own streams, where a careless key would repeat itself.
    "seeds a stream step apart": lambda: np.concatenate(
        [noise_bits(seed * GAMMA % U64, 5, ids(1, 9)) for seed in range(COUNT // 8)]
    ),
    "positions and tokens together": lambda: np.concatenate(
        [noise_bits(3, position, ids(1, COUNT // 8 - position)) for position in range(COUNT // 8)]
    ),
}


@pytest.mark.parametrize("axis", AXES)
def test_noise_is_uniform_and_neighbours_are_independent(axis):
    bits = AXES[axis]()
    for shift in (56, 30, 12):  # high, middle and lowest used bits
        cells = (bits >> np.uint64(shift)).astype(np.int64) & 255
        assert chi_square(np.bincount(cells, minlength=256), len(bits) / 256) < chi_square_limit(255)
        for distance in (1, 2, 64):
            pairs = (cells[:-distance] >> 4) * 16 + (cells[distance:] >> 4)
            assert chi_square(np.bincount(pairs, minlength=256), len(pairs) / 256) < chi_square_limit(255)
    assert len(np.unique(bits)) == len(bits)
    ones = (bits[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / math.sqrt(len(bits))


def test_noise_has_the_gumbel_law():
    noise = np.sort(gumbel(11, 2, ids(COUNT)))
    law = np.exp(-np.exp(-noise))
    distance = np.abs(law - (np.arange(COUNT) + 0.5) / COUNT).max()
    assert distance < 1.95 / math.sqrt(COUNT)  # Kolmogorov-Smirnov at 1e-3


def test_positions_and_seeds_never_share_noise():
    rows = [
        noise_bits(seed, position, ids(16)) for seed in (*range(40), GAMMA, 2 * GAMMA % U64) for position in range(40)
    ]
    assert len(np.unique(np.concatenate(rows))) == 42 * 40 * 16


# Filters, against a slow twin.


def slow_support(logits, params):
    """Kept ids in descending order with probabilities, and how close the cut of top_p came to a partial sum."""
    values = [float(value) for value in logits]
    scores = [(value - max(values)) / params.temperature for value in values]
    order = sorted(range(len(scores)), key=lambda token: (-values[token], token))
    floor = math.log(params.min_p) if params.min_p else -math.inf
    order = [token for token in order if scores[token] > -math.inf and scores[token] >= floor]
    if params.top_k:
        order = order[: params.top_k]
    margin = 1.0
    if params.top_p < 1:
        total = math.fsum(math.exp(scores[token]) for token in order)
        kept, held = [], 0.0
        for token in order:
            if held >= params.top_p * total:
                break
            kept.append(token)
            held = math.fsum(math.exp(scores[other]) for other in kept)
            margin = min(margin, abs(held / total - params.top_p))
        order = kept
    total = math.fsum(math.exp(scores[token]) for token in order)
    return {token: math.exp(scores[token]) / total for token in order}, margin


def assert_equals_slow_twin(logits, params):
    found, log_probs = support(logits, params)
    expected, margin = slow_support(logits, params)
    if margin < 1e-9:  # rounding may decide
        return
    assert found.dtype == np.int32 and log_probs.dtype == np.float64
    assert found.tolist() == sorted(expected)
    np.testing.assert_allclose(np.exp(log_probs), [expected[token] for token in found.tolist()], rtol=1e-9, atol=1e-300)


few_values = st.sampled_from([-math.inf, -3.0, -1.0, 0.0, 0.5, 1.0, 4.0])
rows = st.one_of(
    st.lists(few_values, min_size=1, max_size=12).filter(lambda row: max(row) > -math.inf),
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30),
)
sampled_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 7, 100]),
    # Not sums of the toy rows' probabilities, so that rounding seldom decides.
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 0.999999)),
    min_p=st.sampled_from([0.0, 0.0, 1e-4, 0.0123, 0.2345, 1.0]),
)


@settings(deadline=None, max_examples=200)
@given(rows, sampled_params)
def test_filters_equal_their_slow_twin(row, params):
    assert_equals_slow_twin(np.array(row, np.float32), params)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 0.9999999])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_top_p_on_a_larger_vocabulary(top_p, spread):
    logits = np.random.default_rng(1).normal(0, 1, 1501).astype(np.float32) * np.float32(spread)
    assert_equals_slow_twin(np.round(logits, 1), SamplingParams(temperature=0.9, top_p=top_p))


def kept(row, **params):
    return support(np.array(row, np.float32), SamplingParams(**{"temperature": 1.0, **params}))[0].tolist()


def log_row(*probabilities):
    return [math.log(p) for p in probabilities]


def test_ties_at_the_cut_go_to_the_lowest_ids():
    row = [1.0, 2.0, 1.0, 2.0, 1.0]
    assert kept(row, top_k=1) == [1]
    assert kept(row, top_k=3) == [0, 1, 3]
    assert kept(row, top_k=4) == [0, 1, 2, 3]
    equal = [0.0] * 10
    assert kept(equal, top_k=4) == [0, 1, 2, 3]
    assert [len(kept(equal, top_p=share / 10)) for share in range(1, 10)] == list(range(1, 10))
    assert kept(equal, top_p=0.31) == [0, 1, 2, 3]
    assert kept(equal, min_p=1.0) == list(range(10))
    assert kept([3.0, 5.0, 5.0], min_p=1.0) == [1, 2]
    # Less than 1, both by as much as a float64 can tell; the second is the likelier all the same.
    assert kept([0.0, 1e-45, 1.0], top_k=2) == [1, 2]


def test_filters_apply_in_order():
    row = log_row(0.4, 0.3, 0.2, 0.1)
    assert kept(row, top_p=0.69) == [0, 1]
    assert kept(row, top_p=0.71) == [0, 1, 2]
    # top_p measures what top_k left: 0.4 / 0.7 = 0.57.
    assert kept(row, top_k=2, top_p=0.57) == [0]
    assert kept(row, top_k=2, top_p=0.58) == [0, 1]
    # ... and what min_p left: 0.4 / 0.9 = 0.444.
    assert kept(row, min_p=0.3, top_p=0.443) == [0]
    assert kept(row, min_p=0.3, top_p=0.445) == [0, 1]
    # min_p is measured after the temperature: (0.2 / 0.4) ^ 2 = 0.25.
    assert kept(row, temperature=0.5, min_p=0.24) == [0, 1, 2]
    assert kept(row, temperature=0.5, min_p=0.26) == [0, 1]


def test_the_likeliest_token_always_stays():
    row = [0.0, 1.0, 1.0, -5.0]
    assert kept(row, top_p=1e-300) == kept(row, top_k=1) == kept(row, top_k=1, top_p=1e-9, min_p=1.0) == [1]


def test_masked_tokens_are_never_kept():
    row = [-math.inf, 1.0, -math.inf, 1.0]
    assert kept(row) == kept(row, top_k=3) == kept(row, top_p=0.999) == kept(row, min_p=0.5) == [1, 3]


@pytest.mark.parametrize("temperature", [1e-320, 1e-6, 100])
def test_extreme_temperatures(temperature):
    logits = np.array([-3e38, 2.0, 3e38, 3e38], np.float32)
    found, log_probs = support(logits, SamplingParams(temperature=temperature))
    assert set(found.tolist()) >= {2, 3} and np.isfinite(log_probs).all()
    assert log_probs[-2:] == pytest.approx([-math.log(2)] * 2)
    assert choose(logits, SamplingParams(temperature=temperature), 1, 1) in (2, 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[0.0, math.nan, 1.0], [0.0, math.inf], [-math.inf, -math.inf], [math.nan] * 3])
def test_a_broken_row_is_an_error(row, temperature):
    with pytest.raises(PilotfishError, match="highest logit is"):
        choose(np.array(row, np.float32), SamplingParams(temperature=temperature), 1, 1)


def test_a_rows_place_in_memory_changes_nothing():
    row = np.random.default_rng(3).normal(0, 3, 3001).astype(np.float32)
    params = SamplingParams(temperature=0.7, top_p=0.97)
    tokens, log_probs = support(row, params)
    for offset in range(1, 9):
        table = np.zeros((2, 3001 + offset), np.float32)
        table[1, offset:] = row
        moved = support(table[1, offset:], params)
        assert np.array_equal(moved[0], tokens) and np.array_equal(moved[1], log_probs)


# The choice.


def test_greedy_takes_the_lowest_of_equal_tokens():
    row = np.array([1.0, 3.0, 2.0, 3.0], np.float32)
    assert choose(row, SamplingParams(), 1, 1) == 1
    assert choose(row, SamplingParams(top_k=1, temperature=1.0), 1, 1) == 1


def slow_choose(logits, params, seed, position):
    tokens, log_probs = support(logits, params)
    return int(tokens[np.argmax(log_probs + gumbel(seed, position, tokens))])


@settings(deadline=None, max_examples=200)
@given(rows, sampled_params, st.integers(0, U64 - 1), st.integers(0, 2**20))
def test_choice_is_the_argmax_over_the_support(row, params, seed, position):
    logits = np.array(row, np.float32)
    assert choose(logits, params, seed, position) == slow_choose(logits, params, seed, position)


# 16 tokens: a total variation of 0.03 is found with probability 0.95 at false alarm 1e-3 (df = 15).
VOCAB = 16
ENOUGH = math.ceil(4.74 * math.sqrt(2 * 15) / (4 * 0.03**2))
LOGITS = np.random.default_rng(4).normal(0, 1.2, VOCAB).astype(np.float32)


def law_of(params):
    tokens, log_probs = support(LOGITS, params)
    law = np.zeros(VOCAB)
    law[tokens] = np.exp(log_probs)
    return law


def fits(tokens, law):
    counts = np.bincount(tokens, minlength=len(law))
    used = law > 0
    assert counts[~used].sum() == 0 and (len(tokens) * law[used]).min() >= 5
    return chi_square(counts[used], len(tokens) * law[used]) < chi_square_limit(used.sum() - 1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.5, top_k=9, top_p=0.9, min_p=0.02),
    ],
    ids=["all tokens", "filtered"],
)
def test_choices_follow_the_law(params):
    law = law_of(params)
    over_seeds = [choose(LOGITS, params, seed, 10) for seed in range(ENOUGH)]
    assert fits(over_seeds, law)
    over_positions = [choose(LOGITS, params, 10, position) for position in range(ENOUGH)]
    assert fits(over_positions, law)
    # The test has teeth: it refuses a law at a total variation of 0.03.
    shifted = law.copy()
    high, low = np.argsort(law)[[-1, -2]]
    shifted[high] -= 0.03
    shifted[low] += 0.03
    assert not fits(over_seeds, shifted)


def test_choices_of_neighbouring_positions_are_independent():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    params = SamplingParams(temperature=1.0)
    law = np.array([0.4, 0.3, 0.2, 0.1])
    pairs = [choose(logits, params, s, 7) * 4 + choose(logits, params, s, 8) for s in range(ENOUGH)]
    assert fits(pairs, np.outer(law, law).ravel())


# Locally typical sampling.


def slow_typical(row, p):
    """The definition, over floats: ascending |-log p - entropy| until the share is reached."""
    weights = [math.exp(x - max(row)) for x in row]
    probabilities = [w / math.fsum(weights) for w in weights]
    entropy = -math.fsum(q * math.log(q) for q in probabilities if q > 0)
    order = sorted(range(len(row)), key=lambda i: (abs(-math.log(probabilities[i]) - entropy), i))
    held, kept_ids = 0.0, []
    for i in order:
        kept_ids.append(i)
        held += probabilities[i]
        if held >= p:
            break
    return sorted(kept_ids)


def test_typical_tokens_are_those_of_mean_surprise():
    row = log_row(0.5, 0.2, 0.1, 0.1, 0.1)
    # The entropy is 1.36: 0.2 (1.61) is nearest, then 0.5 (0.69), then the tenths (2.3) by ascending id.
    assert kept(row, typical_p=0.1) == [1]
    assert kept(row, typical_p=0.21) == [0, 1]
    assert kept(row, typical_p=0.71) == [0, 1, 2]
    assert kept(row, typical_p=0.81) == [0, 1, 2, 3]
    assert kept(row, typical_p=1.0) == [0, 1, 2, 3, 4]


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1), st.floats(0.05, 0.95))
def test_typical_against_the_definition(seed, p):
    row = np.random.default_rng(seed).normal(0, 2, 60).astype(np.float32)
    assert kept(row, typical_p=p) == slow_typical([float(x) for x in row], p)


def test_typical_comes_after_the_other_filters():
    row = log_row(0.4, 0.3, 0.2, 0.1)
    first = kept(row, top_k=3, top_p=0.8)
    assert first == [0, 1, 2] and kept(row, top_k=3, top_p=0.8, typical_p=0.3) == [1]
    inner = slow_typical([row[i] for i in first], 0.3)
    assert [first[i] for i in inner] == [1]


def test_typical_with_an_empty_sea():
    row = [0.0] + [-50.0] * 5000
    assert kept(row, typical_p=0.999) == [0]


# The law as an array, and the chances of the ratio rules.


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"temperature": 0.3, "top_p": 0.9}, {"typical_p": 0.5}])
def test_probabilities_are_those_of_the_support(params):
    params = SamplingParams(**{"temperature": 1.0, **params})
    dense = sampling.probabilities(LOGITS, params)
    assert dense.sum() == pytest.approx(1, abs=1e-15) and dense == pytest.approx(law_of(params), abs=1e-15)


def test_probabilities_at_temperature_zero():
    assert sampling.probabilities(np.array([1.0, 3.0, 3.0], np.float32), SamplingParams()).tolist() == [0, 1, 0]


def test_chances_follow_their_law_and_are_fresh():
    law = np.array([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    first = [sampling.Chance(seed, 3)(law) for seed in range(ENOUGH)]
    assert fits(first, law)
    chance = sampling.Chance(1, 1)
    later = [chance(law) for _ in range(ENOUGH)]
    assert fits(later, law)
    pairs = [a * len(law) + b for a, b in itertools.pairwise(later)]
    assert fits(pairs, np.outer(law, law).ravel())
    again = sampling.Chance(1, 1)
    assert [again(law) for _ in range(50)] == later[:50]
    assert [sampling.Chance(1, 2)(law) for _ in range(1)] + later[:30] != later[:31]


def test_chances_are_not_the_noise_of_tokens():
    """No call of a step draws the word that makes the noise of a token at its position."""
    noise = {int(bits) for at in range(50) for bits in noise_bits(7, at, ids(1000))}
    with np.errstate(over="ignore"):
        keys = [sampling.Chance(7, at)._key for at in range(50)]
        words = {int(bits) for key in keys for bits in sampling._splitmix64(key, np.arange(20, dtype=np.uint64))}
    assert len(words) == 1000 and not noise & words
