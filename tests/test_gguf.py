"""The GGUF reader against the gguf package, against damage, and the models it makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_writer import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCAB,
    gguf_bytes,
    load_bytes,
    matrix,
    refused,
    tiny_gguf,
    vector,
)
from pilotfish.config import RopeScaling
from pilotfish.errors import InputError
from pilotfish.loaders import load_model
from pilotfish.loaders.gguf_file import read_gguf
from pilotfish.quant import Tensor, quantize


def test_smollm2_loads_exactly(smollm2_path: Path) -> None:
    model = load_model(smollm2_path)
    config = model.config
    assert (config.architecture, config.vocab_size, config.hidden_size, config.num_layers) == ("llama", 49152, 576, 30)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size) == (9, 3, 64, 1536)
    assert config.tied_embeddings and "head" not in model.tensors
    assert (config.context_length, config.rope_theta, config.rope_scaling) == (8192, 100000.0, None)
    assert config.norm_eps == np.float32(1e-5)
    assert model.note == ""
    assert {model.tensors[f"layers.0.{name}"].kind for name in ("q", "o", "down")} == {"Q4_1"}
    assert model.tokenizer.metadata is not None
    assert len(model.tokenizer.metadata["tokenizer.ggml.tokens"]) == 49152


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_each_architecture_loads(tmp_path: Path, architecture: str, version: int) -> None:
    metadata, tensors = tiny_gguf(architecture)
    model = load_bytes(tmp_path, gguf_bytes(metadata, tensors, version=version))
    config = model.config
    assert config.architecture == architecture and config.name == f"tiny {architecture}"
    assert (config.vocab_size, config.num_layers, config.head_dim) == (VOCAB, LAYERS, HEAD_DIM)
    assert config.tied_embeddings and config.rope_theta == 10000.0
    assert config.attention_bias == (architecture == "qwen2") and not config.output_bias
    assert config.qk_norm == (architecture == "qwen3")
    assert np.array_equal(model.tensors["layers.1.down"].data, tensors["blk.1.ffn_down.weight"].data)
    assert np.array_equal(model.tensors["embed"].data, tensors["token_embd.weight"].data)
    if architecture != "llama":
        assert np.array_equal(model.tensors["layers.1.q"].data, tensors["blk.1.attn_q.weight"].data)
    assert model.tokenizer.metadata == {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"token{i}" for i in range(VOCAB)],
        "tokenizer.ggml.token_type": [1] * VOCAB,
    }
    assert model.note == ""


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_llama_rows_come_back_in_half_split_order(tmp_path: Path, kind: str) -> None:
    """The file pairs rows 2 i and 2 i + 1 of a head, the program rows i and i + head_dim / 2."""
    metadata, tensors = tiny_gguf("llama", kind, bias=True)
    model = load_bytes(tmp_path, gguf_bytes(metadata, tensors))
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        in_file = tensors[f"blk.1.attn_{name}.weight"].dequantize()
        loaded = model.tensors[f"layers.1.{name}"]
        assert loaded.kind == kind
        bias_in_file = tensors[f"blk.1.attn_{name}.bias"].dequantize()
        bias = model.tensors[f"layers.1.{name}_bias"].dequantize()
        values = loaded.dequantize()
        for head in range(heads):
            for pair in range(HEAD_DIM // 2):
                for half in range(2):
                    ours, theirs = head * HEAD_DIM + half * HEAD_DIM // 2 + pair, head * HEAD_DIM + 2 * pair + half
                    assert np.array_equal(values[ours], in_file[theirs]) and bias[ours] == bias_in_file[theirs]
    assert np.array_equal(model.tensors["layers.1.v"].data, tensors["blk.1.attn_v.weight"].data)


def test_vectors_become_float32(tmp_path: Path) -> None:
    metadata, tensors = tiny_gguf("llama")
    tensors["output_norm.weight"] = quantize(tensors["output_norm.weight"].dequantize(), "F16")
    norm = load_bytes(tmp_path, gguf_bytes(metadata, tensors)).tensors["norm"]
    assert norm.kind == "F32" and np.array_equal(norm.dequantize(), tensors["output_norm.weight"].dequantize())


def test_untied_head_output_bias_and_padded_vocabulary(tmp_path: Path) -> None:
    metadata, tensors = tiny_gguf("llama", bias=True)
    tensors["token_embd.weight"] = matrix(VOCAB + 24, HIDDEN, 1)
    tensors["output.weight"] = matrix(VOCAB + 24, HIDDEN, 9)
    for layer in range(LAYERS):
        tensors[f"blk.{layer}.attn_output.bias"] = vector(HIDDEN, layer)
    model = load_bytes(tmp_path, gguf_bytes(metadata, tensors))
    assert not model.config.tied_embeddings and model.config.output_bias and model.config.vocab_size == VOCAB + 24
    assert np.array_equal(model.tensors["head"].data, tensors["output.weight"].data)


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 256}


@pytest.mark.parametrize(
    ("keys", "expected", "context"),
    [
        ({}, None, 512),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None, 512),
        ({"rope.scaling.original_context_length": 256}, None, 512),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, RopeScaling("linear", 4.0), 512),
        ({"rope.scaling.factor": 2.0}, RopeScaling("linear", 2.0), 512),
        ({"rope.scale_linear": 2.0}, RopeScaling("linear", 2.0), 512),
        (YARN, RopeScaling("yarn", 4.0, 256), 1024),
        (YARN | {"rope.scaling.yarn_beta_fast": 16.0}, RopeScaling("yarn", 4.0, 256, beta_fast=16.0), 1024),
    ],
)
def test_rope_scaling(tmp_path: Path, keys: dict[str, Any], expected: RopeScaling | None, context: int) -> None:
    metadata, tensors = tiny_gguf("qwen2")
    metadata |= {f"qwen2.{key}": value for key, value in keys.items()}
    config = load_bytes(tmp_path, gguf_bytes(metadata, tensors)).config
    assert config.rope_scaling == expected and config.context_length == context


def test_rope_factors_of_llama_3(tmp_path: Path) -> None:
    metadata, tensors = tiny_gguf("llama")
    tensors["rope_freqs.weight"] = quantize(np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32), "F32")
    scaling = load_bytes(tmp_path, gguf_bytes(metadata, tensors)).config.rope_scaling
    assert scaling == RopeScaling("factors", factors=tuple(tensors["rope_freqs.weight"].dequantize().tolist()))
    both = gguf_bytes(metadata | {"llama.rope.scaling.factor": 2.0}, tensors)
    assert "both rope_freqs.weight and rope scaling linear" in refused(tmp_path, both)
    tensors["rope_freqs.weight"] = quantize(np.zeros(HEAD_DIM // 2, np.float32), "F32")
    assert refused(tmp_path, gguf_bytes(metadata, tensors)) == "the rope scaling's factors must be positive and finite"
    tensors["rope_freqs.weight"] = quantize(np.ones(3, np.float32), "F32")
    assert refused(tmp_path, gguf_bytes(metadata, tensors)) == "tensor rope_freqs.weight has shape [3], expected [8]"


def test_a_sliding_window_limits_the_context_and_says_so(tmp_path: Path) -> None:
    metadata, tensors = tiny_gguf("llama")
    metadata["llama.attention.sliding_window"] = 128
    model = load_bytes(tmp_path, gguf_bytes(metadata, tensors))
    assert model.config.context_length == 128 and model.config.sliding_window == 128
    assert model.note == "context limited to the model's sliding window of 128 tokens"


@pytest.mark.parametrize(("weights", "kind"), [("bf16", "BF16"), ("int8", "Q8_0"), ("int4", "Q4_1")])
def test_weights_are_rounded_on_request_with_a_note(tmp_path: Path, weights: str, kind: str) -> None:
    metadata, tensors = tiny_gguf("qwen2")
    model = load_bytes(tmp_path, gguf_bytes(metadata, tensors), weights)
    for name, tensor in model.tensors.items():
        assert tensor.kind == ("F32" if len(tensor.shape) == 1 else kind), name
    assert model.note.startswith("weights rounded to") and model.note.endswith("on request")
    expected = quantize(tensors["blk.0.ffn_up.weight"].dequantize(), kind)
    assert np.array_equal(model.tensors["layers.0.up"].data, expected.data)
    metadata, tensors = tiny_gguf("qwen2", kind)
    already = load_bytes(tmp_path, gguf_bytes(metadata, tensors), weights)
    assert already.note == "" and np.array_equal(already.tensors["embed"].data, tensors["token_embd.weight"].data)


def test_weights_that_can_not_be_rounded(tmp_path: Path) -> None:
    metadata, tensors = tiny_gguf("qwen2")
    metadata["qwen2.feed_forward_length"] = 90
    for layer in range(LAYERS):
        tensors[f"blk.{layer}.ffn_gate.weight"] = matrix(90, HIDDEN, 1)
        tensors[f"blk.{layer}.ffn_up.weight"] = matrix(90, HIDDEN, 2)
        tensors[f"blk.{layer}.ffn_down.weight"] = matrix(HIDDEN, 90, 3)
    raw = gguf_bytes(metadata, tensors)
    with pytest.raises(InputError, match=r"tensor layers\.0\.down can not become int8: rows of 90 .* groups of 32"):
        load_bytes(tmp_path, raw, "int8")
    with pytest.raises(InputError, match="weights 'int3' are not known; give one of bf16, int8, int4"):
        load_bytes(tmp_path, raw, "int3")


def change(**edits: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    """Set keys of the metadata (dots as two underscores), None removes."""

    def apply(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for key, value in edits.items():
            metadata[key.replace("__", ".")] = value
            if value is None:
                del metadata[key.replace("__", ".")]

    return apply


def put(name: str, tensor: Tensor | None) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def apply(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor

    return apply


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(general__architecture="gemma2"), "architecture gemma2 is not supported; supported are llama, qwen2"),
        (change(general__architecture=None), "architecture None is not supported"),
        (change(general__architecture=3), "architecture 3 is not supported"),
        (change(general__type="adapter"), "the file holds a adapter, not a model"),
        (change(split__count=3), "one of 3 parts"),
        (change(llama__block_count=None), "metadata key llama.block_count is missing"),
        (change(llama__block_count="2"), "llama.block_count is 2; it must be a whole number"),
        (change(llama__block_count=True), "llama.block_count is True; it must be a whole number"),
        (change(llama__block_count=2_000_000_000), "tensor blk.2.attn_norm.weight is missing"),
        (change(llama__block_count=1), "tensor blk.1.attn_q.weight has no place in a llama model"),
        (change(llama__block_count=4_000_000_000), "llama.block_count is 4000000000; it must fit in 32 bits"),
        (change(llama__block_count=0), "num_layers is 0"),
        (change(llama__attention__head_count=0), "0 attention heads do not divide"),
        (change(llama__attention__head_count=5), "5 attention heads do not divide the hidden size 64"),
        (change(llama__attention__head_count_kv=3), "must be a multiple"),
        (change(llama__attention__head_count_kv=np.array([2, 2], np.int32)), "head_count_kv is [2 2]; it must be"),
        (change(llama__attention__key_length=32), "blk.0.attn_q.weight has shape [64, 64], expected [128, 64]"),
        (change(llama__attention__value_length=32), "attention.value_length is 32; only the head's 16 dim"),
        (change(llama__rope__dimension_count=8), "rope.dimension_count is 8; only the head's 16 dimensions"),
        (change(llama__attention__layer_norm_rms_epsilon=float("nan")), "epsilon is nan; it must be finite"),
        (change(llama__attention__layer_norm_rms_epsilon=2.0), "norm_eps is 2.0"),
        (change(llama__rope__freq_base=0.0), "rope_theta is 0.0"),
        (change(llama__rope__scaling__type="longrope"), "rope scaling longrope is not supported"),
        (change(llama__rope__scaling__type="yarn"), "original context is 0; it must be at least 1"),
        (change(llama__rope__scaling__factor=-1.0), "factor is -1.0; it must be positive"),
        (change(llama__rope__scaling__yarn_ext_factor=0.5), "yarn_ext_factor = 0.5 is not supported"),
        (change(llama__expert_count=8), "llama.expert_count = 8 is not supported"),
        (change(llama__attention__clamp_kqv=8.0), "llama.attention.clamp_kqv = 8.0 is not supported"),
        (change(llama__vocab_size=50), "token_embd.weight has 40 rows for a vocabulary of 50 tokens"),
        (change(tokenizer__ggml__tokens=["a"] * 41), "token_embd.weight has 40 rows for a vocabulary of 41 tokens"),
        (put("token_embd.weight", None), "tensor token_embd.weight is missing"),
        (put("output_norm.weight", None), "tensor output_norm.weight is missing; its shape would be [64]"),
        (put("blk.1.ffn_up.weight", None), "tensor blk.1.ffn_up.weight is missing; its shape would be [96, 64]"),
        (put("blk.1.ffn_up.weight", matrix(64, 96, 0)), "blk.1.ffn_up.weight has shape [64, 96], expected [96, 64]"),
        (put("blk.1.ffn_up.weight", vector(96, 0)), "blk.1.ffn_up.weight has shape [96], expected [96, 64]"),
        (put("blk.0.ffn_gate_inp.weight", matrix(8, 64, 0)), "blk.0.ffn_gate_inp.weight has no place in a llama"),
        (put("blk.0.attn_q.bias", vector(64, 0)), "tensor blk.0.attn_k.bias is missing"),
        (put("output.weight", matrix(39, 64, 0)), "output.weight has shape [39, 64], expected [40, 64]"),
    ],
)
def test_models_that_do_not_fit(tmp_path: Path, edit: Callable[..., None], message: str) -> None:
    metadata, tensors = tiny_gguf("llama")
    edit(metadata, tensors)
    assert message in refused(tmp_path, gguf_bytes(metadata, tensors))


def test_keys_without_effect_are_accepted(tmp_path: Path) -> None:
    metadata, tensors = tiny_gguf("llama")
    metadata |= {"llama.expert_count": 0, "llama.attention.causal": True, "llama.rope.scaling.finetuned": True}
    metadata |= {"llama.tensor_data_layout": "any", "other.key": 3}
    assert load_bytes(tmp_path, gguf_bytes(metadata, tensors)).note == ""


def test_paths_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist; a model is a"):
        load_model(tmp_path / "none.gguf")
    (tmp_path / "model.bin").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"model\.bin is not a \.gguf file"):
        load_model(tmp_path / "model.bin")
    with pytest.raises(InputError, match="can not be read: No such file"):
        read_gguf(tmp_path / "none.gguf")
