"""Frozen descriptions of a model and of an engine. Loaders make them, nothing changes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pilotfish.errors import InputError

Architecture = Literal["llama", "qwen2", "qwen3"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    `linear` divides every frequency by `factor`; `llama3` and `yarn` blend by wavelength
    (Llama 3.1 model card; Peng et al. 2023, "YaRN", equations 22-25). `factors` [head_dim / 2], where a file
    carries them, are ready-made divisors and overrule the rule.
    """

    kind: Literal["linear", "llama3", "yarn", "factors"]
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder of the llama family. Rotary pairs are always (i, i + head_dim / 2)."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    attention_bias: bool = False  # biases on q, k and v
    output_bias: bool = False  # a bias on o as well
    qk_norm: bool = False  # RMS norm of each head's q and k before the rotation
    sliding_window: int | None = None
    name: str = ""

    def check(self) -> None:
        """Raise InputError when the numbers can not describe a model."""
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "context_length",
        ):
            value = getattr(self, field)
            if value < 1:
                raise InputError(f"the model's {field} is {value}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"the model has {self.num_heads} heads over {self.num_kv_heads} key-value heads; "
                "the first must be a multiple of the second"
            )
        if self.head_dim % 16:
            raise InputError(f"the model's head_dim is {self.head_dim}; only multiples of 16 are supported")
        if not 0.0 < self.norm_eps < 1.0:
            raise InputError(f"the model's norm_eps is {self.norm_eps}; it must lie between 0 and 1")
        if not self.rope_theta > 0.0:
            raise InputError(f"the model's rope_theta is {self.rope_theta}; it must be positive")
        if self.sliding_window is not None and self.sliding_window < self.context_length:
            raise InputError(
                f"the model attends through a sliding window of {self.sliding_window} tokens; only full attention is "
                f"supported (a context of at most {self.sliding_window} would be the same: lower context_length)"
            )
