"""Hugging Face directories: what loads, what is refused, and that it is the same model as its GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_writer import gguf_bytes
from pilotfish.config import RopeScaling
from pilotfish.errors import InputError
from pilotfish.loaders import load_model
from pilotfish.quant import Tensor, quantize
from safetensors_writer import packed

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 64, 96, 4, 2, 16, 40, 2
KINDS = ["F32", "F16", "BF16"]


def tiny_config(architecture: str = "LlamaForCausalLM", **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [architecture],
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "max_position_embeddings": 512,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "vocab_size": VOCAB,
    }
    return config | more


def tiny_tensors(kind: str = "F32", bias: str = "", qk_norm: bool = False, head: bool = True) -> dict[str, Tensor]:
    """`bias` lists the projections that have one, such as "qkv"."""
    rng = np.random.default_rng(7)

    def draw(*shape: int) -> Tensor:
        return quantize(rng.standard_normal(shape).astype(np.float32), kind)

    tensors = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN), "model.norm.weight": draw(HIDDEN)}
    if head:
        tensors["lm_head.weight"] = draw(VOCAB, HIDDEN)
    rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM, "o": HIDDEN}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, size in rows.items():
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = draw(size, HIDDEN)
            if name in bias:
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = draw(size)
        if qk_norm:
            tensors[f"{prefix}self_attn.q_norm.weight"] = draw(HEAD_DIM)
            tensors[f"{prefix}self_attn.k_norm.weight"] = draw(HEAD_DIM)
        tensors[f"{prefix}input_layernorm.weight"] = draw(HIDDEN)
        tensors[f"{prefix}post_attention_layernorm.weight"] = draw(HIDDEN)
        tensors[f"{prefix}mlp.gate_proj.weight"] = draw(INNER, HIDDEN)
        tensors[f"{prefix}mlp.up_proj.weight"] = draw(INNER, HIDDEN)
        tensors[f"{prefix}mlp.down_proj.weight"] = draw(HIDDEN, INNER)
    return tensors


def write(folder: Path, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(packed(tensors))
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_model(folder)
    line = str(caught.value)
    assert line.startswith(f"{folder}: ") and "\n" not in line
    return line.removeprefix(f"{folder}: ")


@pytest.mark.parametrize("kind", KINDS)
def test_a_llama_model_loads_exactly(tmp_path: Path, kind: str) -> None:
    tensors = tiny_tensors(kind)
    model = load_model(write(tmp_path, tiny_config(), tensors))
    config = model.config
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("llama", VOCAB, HIDDEN)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.context_length, config.norm_eps, config.rope_theta) == (512, 1e-5, 50000.0)
    assert not (config.tied_embeddings or config.attention_bias or config.output_bias or config.qk_norm)
    assert config.rope_scaling is None and config.sliding_window is None and config.name == tmp_path.name
    assert model.note == "" and model.tokenizer.directory == tmp_path
    down = model.tensors["layers.1.down"]
    assert down.kind == kind and not down.data.flags.owndata and not down.data.flags.writeable
    names = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight", "layers.1.q": "model.layers.1.self_attn.q"}
    for ours, theirs in names.items():
        file_name = theirs if theirs.endswith("weight") else f"{theirs}_proj.weight"
        assert np.array_equal(model.tensors[ours].data, tensors[file_name].data)
    norm = model.tensors["layers.0.mlp_norm"]
    assert norm.kind == "F32"
    assert np.array_equal(norm.dequantize(), tensors["model.layers.0.post_attention_layernorm.weight"].dequantize())


@pytest.mark.parametrize(
    ("architecture", "more", "bias", "expected"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}, "qkvo", ("llama", True, True, False)),
        ("MistralForCausalLM", {"sliding_window": None}, "", ("llama", False, False, False)),
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": False}, "qkv", ("qwen2", True, False, False)),
        ("Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": False}, "", ("qwen3", False, False, True)),
    ],
)
def test_each_architecture(
    tmp_path: Path, architecture: str, more: dict[str, Any], bias: str, expected: tuple[str, bool, bool, bool]
) -> None:
    tensors = tiny_tensors(bias=bias, qk_norm=architecture == "Qwen3ForCausalLM")
    model = load_model(write(tmp_path, tiny_config(architecture, **more), tensors))
    config = model.config
    assert (config.architecture, config.attention_bias, config.output_bias, config.qk_norm) == expected
    assert len(model.tensors) == len(tensors) and model.note == ""


def as_gguf(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under GGUF names, q and k with interleaved rows as llama files have them."""
    parts = {
        **{"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"},
        **{"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"},
        **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    }
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in top:
            renamed[top[name]] = tensor
            continue
        words = name.split(".")
        if words[-2] in ("q_proj", "k_proj"):
            values = tensor.dequantize()
            heads = values.reshape(-1, 2, HEAD_DIM // 2, HIDDEN)
            tensor = quantize(np.stack([heads[:, 0], heads[:, 1]], axis=2).reshape(values.shape), tensor.kind)
        renamed[f"blk.{words[2]}.{parts[words[-2]]}.weight"] = tensor
    return renamed


def test_a_model_is_the_same_from_both_kinds_of_files(tmp_path: Path) -> None:
    tensors = tiny_tensors("BF16", head=False)
    hf = load_model(write(tmp_path, tiny_config(tie_word_embeddings=True), tensors))
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": tmp_path.name,
        "llama.block_count": LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "llama.rope.freq_base": 50000.0,
    }
    (tmp_path / "x.gguf").write_bytes(gguf_bytes(metadata, as_gguf(tensors)))
    gguf = load_model(tmp_path / "x.gguf")
    same = {field: getattr(gguf.config, field) for field in vars(gguf.config) if field != "norm_eps"}
    assert same == {field: getattr(hf.config, field) for field in same}
    assert gguf.tensors.keys() == hf.tensors.keys()
    for name, tensor in gguf.tensors.items():
        assert tensor.kind == hf.tensors[name].kind and np.array_equal(tensor.data, hf.tensors[name].data), name


def shard(folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    names = list(tensors)
    places = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(places.values()):
        (folder / file).write_bytes(packed({name: tensors[name] for name in names if places[name] == file}))
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


def test_shards_give_the_same_model(tmp_path: Path) -> None:
    tensors = tiny_tensors("BF16")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    single = load_model(write(tmp_path / "one", tiny_config(), tensors))
    shard(tmp_path / "two", tensors)
    sharded = load_model(tmp_path / "two")
    assert sharded.tensors.keys() == single.tensors.keys()
    assert all(np.array_equal(sharded.tensors[name].data, t.data) for name, t in single.tensors.items())


def test_wrong_shards(tmp_path: Path) -> None:
    places = shard(tmp_path, tiny_tensors())
    index = tmp_path / "model.safetensors.index.json"
    for wrong, message in (
        ({"lm_head.weight": "model-00003-of-00002.safetensors"}, "shard model-00003-of-00002.safetensors, which"),
        ({"lm_head.weight": "../x.safetensors"}, "shard ../x.safetensors, which model.safetensors.index.json names"),
        ({"lm_head.weight": places["model.norm.weight"]}, "tensor lm_head.weight is in model-0000"),
        ({"more": places["model.norm.weight"]}, "tensor more is not in model-0000"),
        ({"lm_head.weight": 3}, "weight_map must name the file of each tensor"),
    ):
        index.write_text(json.dumps({"weight_map": places | wrong}))
        assert message in refused(tmp_path)
    index.write_text("[]")
    assert refused(tmp_path) == "model.safetensors.index.json: does not hold a JSON object"
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    index.write_text(json.dumps({"weight_map": places}))
    assert "shard model-00002-of-00002.safetensors, which" in refused(tmp_path)


def test_tied_embeddings(tmp_path: Path) -> None:
    tensors = tiny_tensors(head=False)
    folder = write(tmp_path, tiny_config(tie_word_embeddings=True), tensors)
    model = load_model(folder)
    assert model.config.tied_embeddings and "head" not in model.tensors
    write(
        folder,
        tiny_config(tie_word_embeddings=True),
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]},
    )
    assert load_model(folder).tensors.keys() == model.tensors.keys()
    write(folder, tiny_config(tie_word_embeddings=True), tiny_tensors())
    assert "lm_head.weight differs from model.embed_tokens.weight" in refused(folder)
    write(folder, tiny_config(), tensors)
    assert refused(folder) == "tensor lm_head.weight is missing; its shape would be [40, 64]"


def test_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": quantize(np.ones(8, np.float32), "F32")}
    assert load_model(write(tmp_path, tiny_config(), tiny_tensors() | extra)).note == ""


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 128


@pytest.mark.parametrize(
    ("more", "theta", "expected", "context"),
    [
        ({"rope_scaling": None}, 50000.0, None, 512),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 50000.0, RopeScaling("linear", 2.0), 512),
        ({"rope_scaling": LLAMA3}, 50000.0, RopeScaling("llama3", 8.0, 128), 512),
        ({"rope_scaling": YARN}, 50000.0, RopeScaling("yarn", 4.0, 256), 1024),
        (
            {"rope_scaling": YARN | {"attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2, "type": "yarn"}},
            50000.0,
            RopeScaling("yarn", 4.0, 256, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5),
            1024,
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, 50000.0, RopeScaling("yarn", 2.0, 512), 1024),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None, 512),
        (
            {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
            5e5,
            RopeScaling("llama3", 8.0, 128),
            512,
        ),
        ({"rope_theta": None}, 10000.0, None, 512),
    ],
)
def test_rope(tmp_path: Path, more: dict[str, Any], theta: float, expected: RopeScaling | None, context: int) -> None:
    config = load_model(write(tmp_path, tiny_config(**more), tiny_tensors())).config
    assert (config.rope_theta, config.rope_scaling, config.context_length) == (theta, expected, context)


@pytest.mark.parametrize(
    ("architecture", "more", "context"),
    [
        ("MistralForCausalLM", {"sliding_window": 128}, 128),
        ("MistralForCausalLM", {"max_position_embeddings": 32768}, 4096),
        ("Qwen3ForCausalLM", {"sliding_window": 128, "use_sliding_window": True}, 128),
    ],
)
def test_sliding_windows_limit_the_context(
    tmp_path: Path, architecture: str, more: dict[str, Any], context: int
) -> None:
    tensors = tiny_tensors(qk_norm=architecture.startswith("Qwen3"))
    model = load_model(write(tmp_path, tiny_config(architecture, **more), tensors))
    assert model.config.context_length == model.config.sliding_window == context
    assert model.note == f"context limited to the model's sliding window of {context} tokens"


@pytest.mark.parametrize(("weights", "kind"), [("bf16", "BF16"), ("int8", "Q8_0"), ("int4", "Q4_1")])
def test_weights_are_rounded_on_request(tmp_path: Path, weights: str, kind: str) -> None:
    tensors = tiny_tensors("F16")
    model = load_model(write(tmp_path, tiny_config(), tensors), weights)
    assert {tensor.kind for tensor in model.tensors.values() if len(tensor.shape) == 2} == {kind}
    assert {tensor.kind for tensor in model.tensors.values() if len(tensor.shape) == 1} == {"F32"}
    expected = quantize(tensors["lm_head.weight"].dequantize(), kind)
    assert np.array_equal(model.tensors["head"].data, expected.data)
    assert model.note.startswith("weights rounded to") and model.note.endswith("on request")


def test_weights_of_the_wanted_kind_stay_exact(tmp_path: Path) -> None:
    assert load_model(write(tmp_path, tiny_config(), tiny_tensors("BF16")), "bf16").note == ""
    with pytest.raises(InputError, match="weights 'q4' are not known"):
        load_model(tmp_path, "q4")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "architecture GemmaForCausalLM is not supported; supported are",
        ),
        ({"architectures": []}, "architecture None is not supported"),
        ({"hidden_act": "gelu"}, "config.json: hidden_act = gelu is not supported"),
        ({"mlp_bias": True}, "config.json: mlp_bias = True is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config = {'quant_method': 'awq'} is not"),
        ({"hidden_size": None}, "config.json: hidden_size is missing"),
        ({"hidden_size": "64"}, "config.json: hidden_size is 64; it must be a whole number"),
        ({"hidden_size": 64.5}, "config.json: hidden_size is 64.5; it must be a whole number"),
        ({"vocab_size": 2**70}, "config.json: vocab_size is 1180591620717411303424; it must fit in 32 bits"),
        ({"rope_theta": 10**400}, "it must be finite"),
        (
            {"rope_scaling": {"type": "linear", "factor": 1e9}},
            "factor is 1000000000.0; it must be positive and at most",
        ),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        ({"num_attention_heads": 0}, "0 attention heads do not divide"),
        ({"num_attention_heads": 5}, "5 attention heads do not divide the hidden size 64"),
        ({"num_hidden_layers": 10**9}, "tensor model.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, "tensor model.layers.1.self_attn.q_proj.weight has no place in a llama model"),
        ({"vocab_size": 41}, "model.embed_tokens.weight has shape [40, 64], expected [41, 64]"),
        ({"head_dim": 32}, "q_proj.weight has shape [64, 64], expected [128, 64]"),
        ({"head_dim": 24}, "head_dim is 24; only multiples of 16"),
        ({"attention_bias": True}, "q_proj.bias is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling is linear; it must be an object"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type dynamic is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_parameters.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0.0; it must be positive"),
        ({"rope_scaling": YARN | {"mscale": 1.0}}, "rope_parameters.mscale = 1.0 is not supported"),
        ({"rope_scaling": YARN | {"truncate": False}}, "rope_parameters.truncate = False is not supported"),
        ({"rope_scaling": YARN | {"beta_slow": 64}}, "beta_slow 64.0 must be positive and below its beta_fast 32.0"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "low_freq_factor 1.0 must be positive and below"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 0}}, "original context is 0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters.full_attention = "),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    assert message in refused(write(tmp_path, tiny_config(**more), tiny_tensors()))


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    assert refused(tmp_path) == "config.json: can not be read: No such file or directory"
    (tmp_path / "config.json").write_text("{")
    assert refused(tmp_path).startswith("config.json: is not valid JSON: ")
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    assert refused(tmp_path).startswith("config.json: is not valid JSON: ")
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert refused(tmp_path).startswith("config.json: is not valid JSON: ")
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    assert "holds neither model.safetensors nor model.safetensors.index.json" in refused(tmp_path)
    tensors = tiny_tensors()
    write(tmp_path, tiny_config(), tensors | {"more\x1b.weight": tensors["model.norm.weight"]})
    assert refused(tmp_path) == "tensor more?.weight has no place in a llama model"
