"""Builders: rotary tables against transformers, the decoder's program and its tensors, and what they refuse."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pilotfish.config import RopeScaling
from pilotfish.errors import InputError
from pilotfish.models.decoder import decoder_program, expected_shapes
from pilotfish.models.rope import attention_factor, inverse_frequencies, rope_tables
from pilotfish.program import Attention, Embed, Gather, Head, Linear, Norm, Program, RopeKV, Tap
from tiny import GOLDEN_CASES, golden_model, tiny_model

DATA = Path(__file__).parent / "data"
CONFIG, TENSORS = tiny_model("qwen3", seed=1, num_layers=3)


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_frequencies_are_those_of_transformers(case: str) -> None:
    config, _ = golden_model(case)
    with np.load(DATA / "logits_tiny.npz") as golden:
        want, magnitude = golden[f"{case}/inv_freq"], float(golden[f"{case}/attention_factor"])
    # transformers computes them in float32 with a handful of operations.
    np.testing.assert_allclose(inverse_frequencies(config), want, rtol=8 * 2.0**-24)
    assert attention_factor(config.rope_scaling) == pytest.approx(magnitude, rel=1e-9)


def test_tables_are_exact_far_out_and_carry_the_attention_factor() -> None:
    config = replace(CONFIG, rope_scaling=RopeScaling("yarn", 4.0, original_context=256, attention_factor=1.25))
    cos, sin = rope_tables(config, 100_000)
    assert cos.shape == sin.shape == (100_000, config.head_dim // 2)
    assert cos.dtype == sin.dtype == np.float32
    angle = 99_999 * inverse_frequencies(config)
    np.testing.assert_array_equal(cos[-1], (1.25 * np.cos(angle)).astype(np.float32))
    np.testing.assert_array_equal(sin[-1], (1.25 * np.sin(angle)).astype(np.float32))
    np.testing.assert_allclose(cos**2 + sin**2, 1.25**2, rtol=1e-6)


def test_factors_overrule_the_rule() -> None:
    llama3 = replace(CONFIG, rope_scaling=RopeScaling("llama3", 8.0, original_context=64))
    plain = inverse_frequencies(replace(CONFIG, rope_scaling=None))
    factors = tuple(plain / inverse_frequencies(llama3))
    assert len(set(factors)) > 3
    for kind in ("factors", "linear"):
        given = replace(CONFIG, rope_scaling=RopeScaling(kind, 2.0, factors=factors))
        np.testing.assert_allclose(inverse_frequencies(given), inverse_frequencies(llama3), rtol=1e-15)


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        (RopeScaling("linear", factor=0.0), "factor is 0.0"),
        (RopeScaling("yarn", factor=float("nan"), original_context=64), "factor is nan"),
        (RopeScaling("yarn", factor=4.0), "original context of 0"),
        (RopeScaling("llama3", factor=4.0), "original context of 0"),
        (RopeScaling("llama3", 4.0, 64, low_freq_factor=4.0), "high_freq_factor 4.0"),
        (RopeScaling("yarn", 4.0, 64, beta_slow=0.0), "beta_slow 0.0"),
        (RopeScaling("factors"), "has none"),
        (RopeScaling("factors", factors=(1.0, 2.0)), "2 rope factors; its head_dim needs 8"),
        (RopeScaling("factors", factors=(1.0,) * 7 + (0.0,)), "not a positive number"),
    ],
)
def test_senseless_scaling_is_refused(scaling: RopeScaling, says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        rope_tables(replace(CONFIG, rope_scaling=scaling), 16)


def names_of(program: Program) -> set[str]:
    """Every weight the program reads."""
    names: set[str] = set()
    for op in program.ops:
        if isinstance(op, Embed | Norm | Head):
            names.add(op.weight)
        elif isinstance(op, Linear):
            names |= {name for part in op.parts for name in (part.weight, part.bias) if name is not None}
        elif isinstance(op, RopeKV):
            names |= {name for name in (op.q_norm, op.k_norm) if name is not None}
    return names


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_program_reads_exactly_the_expected_tensors_and_known_buffers(case: str) -> None:
    config, tensors = golden_model(case)
    program = decoder_program(config, 64)
    assert names_of(program) == set(dict(expected_shapes(config))) == set(tensors)
    assert program.context_length == 64
    buffers = {getattr(op, field) for op in program.ops for field in ("x", "out", "qkv") if hasattr(op, field)}
    assert buffers == set(program.widths)
    for op in program.ops:
        if isinstance(op, Linear):
            ends = [part.column + tensors[part.weight].shape[0] for part in op.parts]
            assert [part.column for part in op.parts] == [0, *ends[:-1]]
            assert ends[-1] == program.widths[op.out]


def test_views_keep_layer_indices_and_taps_follow_the_layers_run() -> None:
    program = decoder_program(CONFIG, 64, layers=[0, 2], taps=[0, 1, 2])
    assert [op.layer for op in program.ops if isinstance(op, Attention)] == [0, 2]
    assert program.kv.layers == 3
    kinds = [type(op) for op in program.ops if isinstance(op, Embed | Attention | Tap | Gather)]
    assert kinds == [Embed, Tap, Attention, Tap, Attention, Tap, Gather]
    assert decoder_program(CONFIG, 64, layers=[0, 1, 2]).ops == decoder_program(CONFIG, 64).ops


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"context": 0}, "a context of 0 tokens"),
        ({"context": CONFIG.context_length + 1}, "the model has 1 to 1024"),
        ({"layers": [1, 0]}, "layers [1, 0]"),
        ({"layers": [1, 1]}, "layers [1, 1]"),
        ({"layers": [0, 3]}, "within 0 to 2"),
        ({"layers": [-1]}, "layers [-1]"),
        ({"taps": [4]}, "within 0 to 3"),
        ({"layers": [1], "taps": [2]}, "within 0 to 1"),
    ],
)
def test_programs_that_do_not_fit_the_model_are_refused(asked: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        decoder_program(CONFIG, **{"context": 64, **asked})  # type: ignore[arg-type]
