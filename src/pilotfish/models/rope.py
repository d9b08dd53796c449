"""Rotary position embedding: how fast each pair of a head turns, and the tables of cosines and sines."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pilotfish.config import ModelConfig, RopeScaling
from pilotfish.errors import InputError
from pilotfish.program import Floats

Doubles = NDArray[np.float64]


def rope_tables(config: ModelConfig, context: int) -> tuple[Floats, Floats]:
    """Cosines and sines [context, head_dim / 2] of position times frequency (Su et al. 2021, equation 15).

    Computed in float64 and rounded once. YaRN's attention factor multiplies both tables, so that it reaches the
    scores through q and k without an operation of its own.
    """
    angles = np.outer(np.arange(context, dtype=np.float64), inverse_frequencies(config))
    magnitude = attention_factor(config.rope_scaling)
    return (np.cos(angles) * magnitude).astype(np.float32), (np.sin(angles) * magnitude).astype(np.float32)


def inverse_frequencies(config: ModelConfig) -> Doubles:
    """Radians per position of each rotated pair [head_dim / 2], stretched as `config.rope_scaling` says.

    Raises InputError when the scaling's numbers make no sense.
    """
    pairs = config.head_dim // 2
    plain: Doubles = config.rope_theta ** -(np.arange(pairs, dtype=np.float64) / pairs)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.factors:
        divisors = np.array(scaling.factors, np.float64)
        if len(divisors) != pairs:
            raise InputError(f"the model has {len(divisors)} rope factors; its head_dim needs {pairs}")
        if not (np.isfinite(divisors) & (divisors > 0.0)).all():
            raise InputError("a rope factor of the model is not a positive number")
        return plain / divisors
    if scaling.kind == "factors":
        raise InputError(f"the model's rope scaling names factors but has none; its head_dim needs {pairs}")
    if not (math.isfinite(scaling.factor) and scaling.factor > 0.0):
        raise InputError(f"the model's rope scaling factor is {scaling.factor}; it must be positive")
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.original_context < 1:
        raise InputError(
            f"the model's {scaling.kind} rope scaling has an original context of {scaling.original_context}; "
            "it must be at least 1"
        )
    kept = _kept_llama3(plain, scaling) if scaling.kind == "llama3" else _kept_yarn(config, scaling)
    return plain * kept + plain / scaling.factor * (1.0 - kept)


def attention_factor(scaling: RopeScaling | None) -> float:
    """What q and k are multiplied by: 1 but for YaRN (Peng et al. 2023, equation 22, on each of the two)."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1.0 else 1.0


def _kept_llama3(plain: Doubles, scaling: RopeScaling) -> Doubles:
    """Share of each frequency that stays: linear in the turns it makes within the original context (Llama 3.1)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if not high > low:
        raise InputError(
            f"the model's rope scaling has high_freq_factor {high} and low_freq_factor {low}; the first must be larger"
        )
    turns = scaling.original_context * plain / (2.0 * math.pi)
    return np.clip((turns - low) / (high - low), 0.0, 1.0)


def _kept_yarn(config: ModelConfig, scaling: RopeScaling) -> Doubles:
    """Share of each frequency that stays.

    The paper ramps over turns (equation 18); every released model was trained with the authors' code, which ramps over
    the pair's index between the two indices whose turns are `beta_fast` and `beta_slow`, rounded outwards.
    """
    if not (scaling.beta_fast > 0.0 and scaling.beta_slow > 0.0):
        raise InputError(
            f"the model's rope scaling has beta_fast {scaling.beta_fast} and beta_slow {scaling.beta_slow}; "
            "both must be positive"
        )
    if not config.rope_theta > 1.0:
        raise InputError(f"the model's rope_theta is {config.rope_theta}; yarn scaling needs more than 1")

    def index(turns: float) -> float:
        log_turns = math.log(scaling.original_context / (turns * 2.0 * math.pi))
        return config.head_dim * log_turns / (2.0 * math.log(config.rope_theta))

    low = max(math.floor(index(scaling.beta_fast)), 0)
    high = min(math.ceil(index(scaling.beta_slow)), config.head_dim - 1)
    ramp = (np.arange(config.head_dim // 2, dtype=np.float64) - low) / ((high - low) or 0.001)
    return 1.0 - np.clip(ramp, 0.0, 1.0)
