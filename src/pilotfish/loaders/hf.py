"""Models in Hugging Face directories: config.json and safetensors, for Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pilotfish.config import Architecture, ModelConfig, RopeScaling
from pilotfish.errors import InputError
from pilotfish.loaders.described import ModelDescription
from pilotfish.loaders.keys import Keys, short
from pilotfish.loaders.loaded import LoadedModel, check_weights, collect, naming, round_weights, usable_context
from pilotfish.loaders.safetensors_file import parse_json, read_safetensors
from pilotfish.loaders.tokenizer import TokenizerSource
from pilotfish.quant import Tensor

_ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_NAMES = {
    "embed": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "norm": "model.norm.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight",
    "q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "o_bias": "model.layers.{}.self_attn.o_proj.bias",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}
_ONLY_NEUTRAL = {"hidden_act": "silu", "mlp_bias": False, "partial_rotary_factor": 1, "quantization_config": {}}
_STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MISTRAL_WINDOW = 4096  # what transformers takes when config.json does not say


def load_hf(directory: Path, weights: str | None = None) -> LoadedModel:
    """Load a directory with config.json and model.safetensors, in one file or in shards.

    `weights` (bf16, int8, int4) rounds the matrices; None keeps the values of the files exactly. Raises InputError when
    a file is missing or damaged, the model is of another kind, or a tensor does not fit.
    """
    check_weights(weights)
    with naming(directory):
        raw = _read_json(directory / "config.json")
        config, note = _config(raw, directory.resolve().name)
        config.check()
        tensors = _tensors(directory)
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
        if config.tied_embeddings:
            _drop_copied_head(tensors)
        canonical, loss = round_weights(collect(config, tensors, _NAMES), weights)
    notes = "; ".join(part for part in (note, loss) if part)
    return LoadedModel(config, canonical, TokenizerSource(directory=directory), notes)


def describe_hf(file: Path) -> ModelDescription:
    """The configuration in a config.json, which may stand alone. Raises InputError as `load_hf` does for that file."""
    folder = file.resolve().parent
    with naming(file.parent if file.name == "config.json" else file):
        raw = _read_json(file)
        config, note = _config(raw, folder.name if file.name == "config.json" else file.stem)
        config.check()
    kind = _STORED.get(str(raw.get("dtype") or raw.get("torch_dtype")))
    return ModelDescription(config, stored=() if kind is None else (kind,), note=note)


def _read_json(path: Path) -> dict[str, Any]:
    with naming(path.name):
        try:
            return parse_json(path.read_bytes())
        except OSError as error:
            raise InputError(f"can not be read: {error.strerror}") from None


def _config(raw: dict[str, Any], name: str) -> tuple[ModelConfig, str]:
    keys = Keys(raw, "config.json: ")
    names = raw.get("architectures")
    class_name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if class_name not in _ARCHITECTURES:
        raise InputError(
            f"architecture {short(class_name)} is not supported; supported are {', '.join(_ARCHITECTURES)}"
        )
    architecture = _ARCHITECTURES[class_name]
    keys.neutral(_ONLY_NEUTRAL)
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    if heads < 1 or ("head_dim" not in keys and hidden % heads):
        raise InputError(f"config.json: {heads} attention heads do not divide the hidden size {hidden}")
    full_bias = class_name in ("LlamaForCausalLM", "Qwen3ForCausalLM") and keys.flag("attention_bias", False)
    stated = keys.integer("max_position_embeddings")
    theta, scaling = _rope(keys, raw, stated)
    window = _window(keys, raw, class_name)
    context, note = usable_context(stated, scaling, window)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=keys.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=keys.integer("num_key_value_heads", heads),
        head_dim=keys.integer("head_dim", hidden // heads),
        context_length=context,
        norm_eps=keys.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=keys.flag("tie_word_embeddings", False),
        attention_bias=full_bias or architecture == "qwen2",
        output_bias=full_bias,
        qk_norm=architecture == "qwen3",
        sliding_window=window,
        name=name,
    )
    return config, note


def _window(keys: Keys, raw: dict[str, Any], class_name: str) -> int | None:
    if class_name == "MistralForCausalLM":
        if "sliding_window" in raw and raw["sliding_window"] is None:
            return None
        return keys.integer("sliding_window", _MISTRAL_WINDOW)
    if class_name != "LlamaForCausalLM" and keys.flag("use_sliding_window", False):
        return keys.integer("sliding_window")
    return None


def _rope(keys: Keys, raw: dict[str, Any], stated_context: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotation: `rope_parameters` since transformers 5, `rope_scaling`, `rope_theta` before."""
    values: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        part = raw.get(key) or {}
        if not isinstance(part, dict):
            raise InputError(f"config.json: {key} is {short(part)}; it must be an object")
        values |= part
    rope = Keys(values, "config.json: rope_parameters.")
    rope.neutral({"partial_rotary_factor": 1, "truncate": True})
    theta = rope.number("rope_theta", keys.number("rope_theta", 10000.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    scaling = None if kind == "default" else _scaling(rope, kind, stated_context)
    rope.all_read(("finetuned",) if scaling else ("finetuned", "factor", "original_max_position_embeddings"))
    return theta, scaling


def _scaling(rope: Keys, kind: str, stated_context: int) -> RopeScaling:
    if kind not in ("linear", "llama3", "yarn"):
        raise InputError(
            f"config.json: rope type {short(kind)} is not supported; supported are linear, llama3 and yarn"
        )
    original = rope.integer("original_max_position_embeddings", stated_context)
    factor = rope.number("factor", stated_context / original if kind == "yarn" and original > 0 else None)
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        return RopeScaling("llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    attention_factor = rope.number("attention_factor") if "attention_factor" in rope else None
    beta_fast, beta_slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    return RopeScaling(
        "yarn", factor, original, beta_fast=beta_fast, beta_slow=beta_slow, attention_factor=attention_factor
    )


def _tensors(directory: Path) -> dict[str, Tensor]:
    single = directory / _SINGLE
    if single.is_file():
        return read_safetensors(single)
    if not (directory / _INDEX).is_file():
        raise InputError(f"holds neither {_SINGLE} nor {_INDEX}; weights in other formats are not supported")
    places = _read_json(directory / _INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise InputError(f"{_INDEX}: weight_map must name the file of each tensor")
    shards = sorted(set(places.values()))
    for shard in shards:
        if Path(shard).name != shard or not (directory / shard).is_file():
            raise InputError(f"shard {short(shard)}, which {_INDEX} names, is missing")
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        for name, tensor in read_safetensors(directory / shard).items():
            if places.get(name) != shard:
                raise InputError(f"tensor {short(name)} is in {shard}, where {_INDEX} does not place it")
            tensors[name] = tensor
    for name in places.keys() - tensors.keys():
        raise InputError(f"tensor {short(name)} is not in {places[name]}, where {_INDEX} places it")
    return tensors


def _drop_copied_head(tensors: dict[str, Tensor]) -> None:
    """Some writers store the tied head a second time; one that differs is an error, as either could be meant."""
    head, embed = tensors.pop(_NAMES["head"], None), tensors.get(_NAMES["embed"])
    if head is not None and (embed is None or not np.array_equal(head.data, embed.data)):
        raise InputError(f"tie_word_embeddings is true, yet {_NAMES['head']} differs from {_NAMES['embed']}")
