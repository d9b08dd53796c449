"""Tiny random models of each architecture, and random draft trees over their vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pilotfish.config import Architecture, ModelConfig, RopeScaling
from pilotfish.models.decoder import expected_shapes
from pilotfish.quant import Tensor
from pilotfish.tree import DraftTree


@dataclass(frozen=True)
class _Blocks:
    """Where a block of a GGML format keeps its float16 scale and minimum; all its other bytes may be anything."""

    elements: int
    size_bytes: int
    scale_at: int
    spread: float  # standard deviation of the values when the other bytes are random and the scale is 1
    min_at: int | None = None
    min_per_scale: float = 0.0  # the minimum that centres the values on 0


_BLOCKS = {
    "Q8_0": _Blocks(32, 34, 0, 73.9),
    "Q4_0": _Blocks(32, 18, 0, 4.6),
    "Q4_1": _Blocks(32, 20, 0, 4.6, 2, -7.5),
    "Q5_0": _Blocks(32, 22, 0, 9.2),
    "Q5_1": _Blocks(32, 24, 0, 9.2, 2, -15.5),
    "Q4_K": _Blocks(256, 144, 0, 258.0, 2, 7.5),
    "Q5_K": _Blocks(256, 176, 0, 527.0, 2, 15.5),
    "Q6_K": _Blocks(256, 210, 208, 1366.0),
}

# The models whose logits transformers has computed for tests/data/logits_tiny.npz (scripts/golden_logits.py).
GOLDEN_CASES: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", "seed": 1},
    "llama-tied-biased": {
        "architecture": "llama",
        "seed": 2,
        "tied_embeddings": True,
        "attention_bias": True,
        "output_bias": True,
    },
    "llama-linear": {"architecture": "llama", "seed": 3, "rope_scaling": RopeScaling("linear", factor=4.0)},
    "llama-llama3": {
        "architecture": "llama",
        "seed": 4,
        "head_dim": 32,
        "rope_scaling": RopeScaling("llama3", factor=8.0, original_context=64),
    },
    "qwen2": {"architecture": "qwen2", "seed": 5, "kinds": "BF16"},
    "qwen2-yarn": {
        "architecture": "qwen2",
        "seed": 6,
        "head_dim": 32,
        "rope_scaling": RopeScaling("yarn", factor=4.0, original_context=256),
    },
    "qwen3": {"architecture": "qwen3", "seed": 7, "tied_embeddings": True, "num_layers": 3},
}


def golden_model(case: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    return tiny_model(**GOLDEN_CASES[case])


def tiny_model(
    architecture: Architecture, seed: int, kinds: str = "F32", embed_kind: str | None = None, **overrides: Any
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A random model whose logits spread over a few units, and its tensors.

    `kinds` are dealt to the matrices in turn ("Q4_K+Q6_K": the parts of one Linear differ); `embed_kind` is that of
    the embedding and the head, by default the first of `kinds`. `overrides` are fields of ModelConfig.
    """
    dealt = kinds.split("+")
    embed_kind = embed_kind or dealt[0]
    wide = any(kind.endswith("_K") for kind in [*dealt, embed_kind])
    config = replace(
        ModelConfig(
            architecture=architecture,
            vocab_size=128,
            hidden_size=256 if wide else 64,
            intermediate_size=256 if wide else 96,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64 if wide else 16,
            context_length=1024,
            norm_eps=1e-5,
            rope_theta=10000.0,
            attention_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            name=f"tiny-{architecture}",
        ),
        **overrides,
    )
    config.check()
    rng = np.random.RandomState(seed)  # the legacy generator: its numbers never change, and the goldens need them
    tensors: dict[str, Tensor] = {}
    turn = 0
    for name, shape in expected_shapes(config):
        part = name.rsplit(".", 1)[-1]
        if part.endswith("norm"):
            tensors[name] = _floats(rng, shape, "F32", spread=0.2, centre=1.2)
        elif part.endswith("bias"):
            tensors[name] = _floats(rng, shape, "F32", spread=0.3)
        elif part in ("embed", "head"):
            tensors[name] = random_tensor(rng, shape, embed_kind, spread=2.5 / shape[1] ** 0.5)
        else:
            tensors[name] = random_tensor(rng, shape, dealt[turn % len(dealt)], spread=1.5 / shape[1] ** 0.5)
            turn += 1
    return config, tensors


def random_tensor(rng: np.random.RandomState, shape: tuple[int, ...], kind: str, spread: float) -> Tensor:
    """Random values of standard deviation about `spread`; every bit pattern of a quantised block can occur."""
    if kind not in _BLOCKS:
        return _floats(rng, shape, kind, spread)
    layout = _BLOCKS[kind]
    if shape[-1] % layout.elements:
        raise ValueError(f"a row of {shape[-1]} elements is not a whole number of {kind} blocks")
    count = int(np.prod(shape)) // layout.elements
    blocks = rng.randint(0, 256, (count, layout.size_bytes)).astype(np.uint8)
    scales = rng.uniform(0.5, 1.5, count) * spread / layout.spread

    def put(at: int, values: np.ndarray) -> None:
        blocks[:, at : at + 2] = values.astype("<f2").view(np.uint8).reshape(count, 2)

    put(layout.scale_at, scales)
    if layout.min_at is not None:
        put(layout.min_at, scales * layout.min_per_scale * rng.uniform(0.8, 1.2, count))
    return Tensor(kind, shape, blocks.reshape(-1))


def _floats(
    rng: np.random.RandomState, shape: tuple[int, ...], kind: str, spread: float, centre: float = 0.0
) -> Tensor:
    # Uniform, not normal: no libm is involved, so every machine draws the same bits.
    values = (centre + spread * 3.0**0.5 * rng.uniform(-1.0, 1.0, shape)).astype("<f4")
    if kind == "BF16":
        raw = np.ascontiguousarray(values.view("<u2").reshape(-1, 2)[:, 1]).view(np.uint8)
    else:
        raw = values.astype({"F32": "<f4", "F16": "<f2"}[kind]).reshape(-1).view(np.uint8)
    return Tensor(kind, shape, raw)


def random_tree(rng: np.random.Generator, nodes: int, vocab: int) -> DraftTree:
    """A tree of chains and branches; siblings carry different tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(nodes):
        parent = node - 1 if rng.random() < 0.5 else int(rng.integers(-1, node))
        taken = [token for token, other in zip(tokens, parents, strict=True) if other == parent]
        tokens.append(int(rng.choice(np.setdiff1d(np.arange(vocab), taken))))
        parents.append(parent)
    tree = DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), "random")
    tree.check(vocab)
    return tree
