"""What `transformers` says: golden logits for the tests, and the error of the reference interpreter on any model.

    python scripts/golden_logits.py tiny                   writes tests/data/logits_tiny.npz
    python scripts/golden_logits.py smollm2 SMOLLM2.gguf   writes tests/data/logits_smollm2.npz
    python scripts/golden_logits.py compare MODEL          prints the error of `reference`

Needs torch and transformers (5 or newer), with `src` and the installed pilotfish's dependencies on the path. The models
are float32 and carry exactly the weights that pilotfish dequantises.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from pilotfish.backends.reference import ReferenceBackend  # noqa: E402
from pilotfish.config import ModelConfig  # noqa: E402
from pilotfish.loaders import load_model  # noqa: E402
from pilotfish.loaders.tokenizer import Tokenizer  # noqa: E402
from pilotfish.models.decoder import decoder_program  # noqa: E402
from pilotfish.program import BLOCK_SIZE  # noqa: E402
from pilotfish.quant import Tensor  # noqa: E402
from pilotfish.tree import Rows, TreeBatch  # noqa: E402
from tiny import GOLDEN_CASES, golden_model  # noqa: E402

TINY_TOKENS = 48
TEXT_TOKENS = 64
KEPT_ROWS = 8  # of the text's 64
TOP = 64
COLUMNS = 200
SEED = 20240607
TEXT = """\
The pilot fish swims ahead of the shark and eats what the shark leaves behind. Sailors of old believed that it led the
shark to its prey; in truth it only keeps close to a large friend, as small things do. "Who follows whom?" they asked.

def leader(fish: list[str]) -> str:
    return fish[0] if fish else "nobody"
"""

HF_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    **{f"{part}_bias": f"self_attn.{part}_proj.bias" for part in "qkvo"},
    **{part: f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{part: f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}
TOP_NAMES = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}


def hf_name(name: str) -> str:
    """The name in transformers of one of our tensors."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{HF_NAMES[part]}"


def rope_parameters(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    parameters: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if scaling is None or scaling.kind == "factors":
        return parameters
    parameters |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        parameters |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        parameters |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        parameters["attention_factor"] = scaling.attention_factor
    if scaling.kind != "linear":
        parameters["original_max_position_embeddings"] = scaling.original_context
    return parameters


def hf_model(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Any:
    """The same model in transformers, float32, eager attention."""
    family = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[config.architecture]
    biases = {} if config.architecture == "qwen2" else {"attention_bias": config.attention_bias}
    hf_config = getattr(transformers, f"{family}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context_length,
        rms_norm_eps=config.norm_eps,
        rope_parameters=rope_parameters(config),
        tie_word_embeddings=config.tied_embeddings,
        attn_implementation="eager",
        **biases,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(hf_config).float().eval()
    waiting = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            waiting.pop(hf_name(name)).copy_(torch.from_numpy(tensor.dequantize()))
        if config.rope_scaling is not None and config.rope_scaling.factors:
            model.model.rotary_emb.inv_freq /= torch.tensor(config.rope_scaling.factors)
    if waiting:
        raise SystemExit(f"transformers has parameters that pilotfish's tensors do not give: {sorted(waiting)}")
    return model


def hf_logits(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


def reference_logits(config: ModelConfig, tensors: Mapping[str, Tensor], tokens: list[int]) -> np.ndarray:
    backend = ReferenceBackend()
    program = decoder_program(config, len(tokens))
    blocks = range(-(-len(tokens) // BLOCK_SIZE))
    batch = TreeBatch.build([Rows(tokens, 0, blocks, all_logits=True)])
    kv = backend.new_kv(program.kv, len(blocks))
    logits = backend.prepare(program, backend.load(tensors)).forward(batch, kv, logits=True).logits
    assert logits is not None
    return logits


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The worst row's max |a - b| / max |b|."""
    return float((np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max(axis=1)).max())


def record() -> np.ndarray:
    """What made the file, as JSON."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    made_by = {"script": "scripts/golden_logits.py", "python": platform.python_version(), "seed": SEED, **versions}
    return np.array(json.dumps(made_by))


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez_compressed(path, record=record(), **arrays)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


def tiny() -> None:
    rng = np.random.RandomState(SEED)
    arrays = {}
    for case in GOLDEN_CASES:
        config, tensors = golden_model(case)
        tokens = rng.randint(0, config.vocab_size, TINY_TOKENS).tolist()
        model = hf_model(config, tensors)
        logits = hf_logits(model, tokens)
        rotary = model.model.rotary_emb
        arrays |= {
            f"{case}/tokens": np.array(tokens, np.int32),
            f"{case}/logits": logits,
            f"{case}/inv_freq": rotary.inv_freq.numpy(),
            f"{case}/attention_factor": np.array(rotary.attention_scaling),
        }
        error = relative_error(reference_logits(config, tensors, tokens), logits)
        print(f"{case}: relative error {error:.2e}, spread {logits.std():.2f}")
    write(ROOT / "tests" / "data" / "logits_tiny.npz", arrays)


def text_logits(path: Path) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Tokens of TEXT and the logits [tokens, vocab] of transformers and of the reference, one model at a time."""
    loaded = load_model(path)
    tokens = Tokenizer.load(loaded.tokenizer).encode(TEXT, special=False)[:TEXT_TOKENS]
    model = hf_model(loaded.config, loaded.tensors)
    theirs = hf_logits(model, tokens)
    del model
    gc.collect()
    ours = reference_logits(loaded.config, loaded.tensors, tokens)
    agree = int((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum())
    print(f"{loaded.config.name}: relative error {relative_error(ours, theirs):.2e}, top-1 {agree}/{len(tokens)}")
    return tokens, theirs, ours


def smollm2(path: Path) -> None:
    tokens, logits, _ = text_logits(path)
    rows = np.arange(TEXT_TOKENS // KEPT_ROWS - 1, TEXT_TOKENS, TEXT_TOKENS // KEPT_ROWS)
    kept = logits[rows]
    columns = np.sort(np.random.RandomState(SEED).choice(logits.shape[1], COLUMNS, replace=False))
    top = np.argsort(-kept, axis=1, kind="stable")[:, :TOP]
    arrays = {
        "tokens": np.array(tokens, np.int32),
        "rows": rows.astype(np.int32),
        "largest": np.abs(kept).max(axis=1),
        "columns": columns.astype(np.int32),
        "column_logits": kept[:, columns],
        "top_ids": top.astype(np.int32),
        "top_logits": np.take_along_axis(kept, top, axis=1),
        "argmax": logits.argmax(axis=1).astype(np.int32),
    }
    write(ROOT / "tests" / "data" / "logits_smollm2.npz", arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description="Golden logits from transformers.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tiny")
    for command in ("smollm2", "compare"):
        commands.add_parser(command).add_argument("path", type=Path)
    options = parser.parse_args()
    if options.command == "tiny":
        tiny()
    elif options.command == "smollm2":
        smollm2(options.path)
    else:
        text_logits(options.path)


if __name__ == "__main__":
    main()
