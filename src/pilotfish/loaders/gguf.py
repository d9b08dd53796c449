"""Models in GGUF files: architectures llama (Llama 2 and 3, Mistral, SmolLM2), qwen2 and qwen3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pilotfish.config import Architecture, ModelConfig, RopeScaling
from pilotfish.errors import InputError
from pilotfish.loaders.described import ModelDescription
from pilotfish.loaders.gguf_file import GGUFFile, read_gguf
from pilotfish.loaders.keys import Keys, short
from pilotfish.loaders.loaded import LoadedModel, check_weights, collect, naming, round_weights, usable_context
from pilotfish.loaders.tokenizer import TokenizerSource
from pilotfish.quant import Tensor

_NAMES = {
    "embed": "token_embd.weight",
    "head": "output.weight",
    "norm": "output_norm.weight",
    "attn_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "o": "blk.{}.attn_output.weight",
    "q_bias": "blk.{}.attn_q.bias",
    "k_bias": "blk.{}.attn_k.bias",
    "v_bias": "blk.{}.attn_v.bias",
    "o_bias": "blk.{}.attn_output.bias",
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "mlp_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
}
_ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_WITHOUT_EFFECT = ("attention.layer_norm_epsilon", "tensor_data_layout", "rope.scaling.finetuned")
_ONLY_NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.attn_factor": 1.0}


def load_gguf(path: Path, weights: str | None = None) -> LoadedModel:
    """Load a model of the architectures llama, qwen2 or qwen3.

    `weights` (bf16, int8, int4) rounds the matrices; None keeps the values of the file exactly. Raises InputError when
    the file is damaged, is another kind of model, or lacks something.
    """
    check_weights(weights)
    file = read_gguf(path)
    with naming(path):
        config, tensors, note = _checked_config(file, path.stem)
        canonical = collect(config, tensors, _NAMES)
        if config.architecture == "llama":
            _undo_interleaving(canonical, config)
        canonical, loss = round_weights(canonical, weights)
    tokenizer = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.")
    }
    notes = "; ".join(part for part in (note, loss) if part)
    return LoadedModel(config, canonical, TokenizerSource(metadata=tokenizer), notes)


def describe_gguf(path: Path) -> ModelDescription:
    """The configuration of the same models and the bytes of their tensors; raises InputError as `load_gguf` does."""
    file = read_gguf(path)
    with naming(path):
        config, tensors, note = _checked_config(file, path.stem)
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.nbytes
    return ModelDescription(
        config,
        stored=tuple(sorted(sizes, key=lambda kind: -sizes[kind])),
        weight_bytes=sum(sizes.values()),
        embedding_bytes=tensors[_NAMES["embed"]].nbytes,
        note=note,
    )


def _checked_config(file: GGUFFile, name: str) -> tuple[ModelConfig, dict[str, Tensor], str]:
    """The configuration, the tensors of the decoder by their names in the file, and a note."""
    _check_whole_model(file.metadata)
    tensors = dict(file.tensors)
    factors = tensors.pop("rope_freqs.weight", None)
    config, note = _config(file.metadata, tensors, factors, name)
    config.check()
    return config, tensors, note


def _check_whole_model(metadata: dict[str, Any]) -> None:
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise InputError(f"the file holds a {short(kind)}, not a model")
    parts = metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise InputError(f"the file is one of {short(parts)} parts; merge them into one file first")
    name = metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise InputError(f"architecture {short(name)} is not supported; supported are {', '.join(_ARCHITECTURES)}")


def _config(
    metadata: dict[str, Any], tensors: dict[str, Tensor], factors: Tensor | None, name: str
) -> tuple[ModelConfig, str]:
    architecture = _ARCHITECTURES[metadata["general.architecture"]]
    prefix = f"{architecture}."
    values = {key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)}
    keys = Keys(values, f"metadata key {prefix}")
    hidden = keys.integer("embedding_length")
    heads = keys.integer("attention.head_count")
    head_dim = _head_dim(keys, hidden, heads)
    window = keys.integer("attention.sliding_window", 0) or None
    scaling = _rope_scaling(keys, factors, head_dim)
    context, note = usable_context(keys.integer("context_length"), scaling, window)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(metadata, keys, tensors),
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        context_length=context,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("rope.freq_base", 10000.0),
        rope_scaling=scaling,
        tied_embeddings=_NAMES["head"] not in tensors,
        attention_bias=_NAMES["q_bias"].format(0) in tensors,
        output_bias=_NAMES["o_bias"].format(0) in tensors,
        qk_norm=architecture == "qwen3",
        sliding_window=window,
        name=short(metadata.get("general.name", name)),
    )
    keys.neutral(_ONLY_NEUTRAL)
    keys.all_read(_WITHOUT_EFFECT)
    return config, note


def _head_dim(keys: Keys, hidden: int, heads: int) -> int:
    if heads < 1 or ("attention.key_length" not in keys and hidden % heads):
        raise InputError(f"{heads} attention heads do not divide the hidden size {hidden}")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise InputError(f"{key} is {keys.integer(key)}; only the head's {head_dim} dimensions are supported")
    return head_dim


def _vocab_size(metadata: dict[str, Any], keys: Keys, tensors: dict[str, Tensor]) -> int:
    """The rows of the embedding: a file may pad them beyond its tokens."""
    embed = tensors.get(_NAMES["embed"])
    if embed is None:
        raise InputError(f"tensor {_NAMES['embed']} is missing")
    rows = embed.shape[0]
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    least = max(len(tokens) if isinstance(tokens, list) else 0, keys.integer("vocab_size", 0))
    if rows < least:
        raise InputError(f"tensor {_NAMES['embed']} has {rows} rows for a vocabulary of {least} tokens")
    return rows


def _rope_scaling(keys: Keys, factors: Tensor | None, head_dim: int) -> RopeScaling | None:
    """Linear and yarn scaling by keys, or ready-made divisors [head_dim / 2] of the frequencies (Llama 3.1)."""
    legacy = keys.number("rope.scale_linear", 1.0)
    factor = keys.number("rope.scaling.factor", legacy)
    original = keys.integer("rope.scaling.original_context_length", 0)
    kind = keys.text("rope.scaling.type", "none" if factor in (0.0, 1.0) else "linear")
    if factors is not None:
        if factors.shape != (head_dim // 2,):
            raise InputError(f"tensor rope_freqs.weight has shape {list(factors.shape)}, expected [{head_dim // 2}]")
        if kind != "none":
            raise InputError(f"the file has both rope_freqs.weight and rope scaling {short(kind)}; only one can hold")
        return RopeScaling("factors", factors=tuple(factors.dequantize().tolist()))
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind != "yarn":
        raise InputError(f"rope scaling {short(kind)} is not supported; supported are none, linear and yarn")
    beta_fast = keys.number("rope.scaling.yarn_beta_fast", 32.0)
    beta_slow = keys.number("rope.scaling.yarn_beta_slow", 1.0)
    return RopeScaling("yarn", factor, original, beta_fast=beta_fast, beta_slow=beta_slow)


def _undo_interleaving(tensors: dict[str, Tensor], config: ModelConfig) -> None:
    """Give q and k rows the half-split order: GGUF files of llama rotate rows (2 i, 2 i + 1) of a head as a pair."""
    for index in range(config.num_layers):
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            rows = np.arange(heads * config.head_dim).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
            key = f"layers.{index}.{name}"
            tensors[key] = tensors[key].take_rows(rows)
            bias = tensors.get(f"{key}_bias")
            if bias is not None:
                column = Tensor(bias.kind, (len(rows), 1), bias.data).take_rows(rows)
                tensors[f"{key}_bias"] = Tensor(bias.kind, bias.shape, column.data)
