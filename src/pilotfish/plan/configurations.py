"""Public models by name: the numbers of their config.json that sizes depend on, and nothing else.

Norm epsilon and rotary base are those of the family; no size depends on them.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from pilotfish.config import Architecture, ModelConfig
from pilotfish.errors import InputError


@dataclass(frozen=True)
class _Family:
    architecture: Architecture
    norm_eps: float
    rope_theta: float


_LLAMA2 = _Family("llama", 1e-5, 1e4)
_LLAMA3 = _Family("llama", 1e-5, 5e5)
_MISTRAL = _Family("llama", 1e-5, 1e6)
_SMOLLM2 = _Family("llama", 1e-5, 1e5)
_QWEN2 = _Family("qwen2", 1e-6, 1e6)
_QWEN3 = _Family("qwen3", 1e-6, 1e6)

# hidden, intermediate, layers, heads, key-value heads, head_dim, vocabulary, context, tied embeddings
_Row = tuple[int, int, int, int, int, int, int, int, bool]
_TABLE: dict[str, tuple[_Family, _Row]] = {
    "tinyllama-1.1b": (_LLAMA2, (2048, 5632, 22, 32, 4, 64, 32000, 2048, False)),
    "llama-2-7b": (_LLAMA2, (4096, 11008, 32, 32, 32, 128, 32000, 4096, False)),
    "llama-2-13b": (_LLAMA2, (5120, 13824, 40, 40, 40, 128, 32000, 4096, False)),
    "llama-2-70b": (_LLAMA2, (8192, 28672, 80, 64, 8, 128, 32000, 4096, False)),
    "llama-3-8b": (_LLAMA3, (4096, 14336, 32, 32, 8, 128, 128256, 8192, False)),
    "llama-3-70b": (_LLAMA3, (8192, 28672, 80, 64, 8, 128, 128256, 8192, False)),
    "llama-3.1-8b": (_LLAMA3, (4096, 14336, 32, 32, 8, 128, 128256, 131072, False)),
    "llama-3.1-70b": (_LLAMA3, (8192, 28672, 80, 64, 8, 128, 128256, 131072, False)),
    "llama-3.1-405b": (_LLAMA3, (16384, 53248, 126, 128, 8, 128, 128256, 131072, False)),
    "llama-3.2-1b": (_LLAMA3, (2048, 8192, 16, 32, 8, 64, 128256, 131072, True)),
    "llama-3.2-3b": (_LLAMA3, (3072, 8192, 28, 24, 8, 128, 128256, 131072, True)),
    "llama-3.3-70b": (_LLAMA3, (8192, 28672, 80, 64, 8, 128, 128256, 131072, False)),
    "mistral-7b": (_MISTRAL, (4096, 14336, 32, 32, 8, 128, 32768, 32768, False)),
    "qwen2.5-0.5b": (_QWEN2, (896, 4864, 24, 14, 2, 64, 151936, 32768, True)),
    "qwen2.5-1.5b": (_QWEN2, (1536, 8960, 28, 12, 2, 128, 151936, 32768, True)),
    "qwen2.5-3b": (_QWEN2, (2048, 11008, 36, 16, 2, 128, 151936, 32768, True)),
    "qwen2.5-7b": (_QWEN2, (3584, 18944, 28, 28, 4, 128, 152064, 32768, False)),
    "qwen2.5-14b": (_QWEN2, (5120, 13824, 48, 40, 8, 128, 152064, 32768, False)),
    "qwen2.5-32b": (_QWEN2, (5120, 27648, 64, 40, 8, 128, 152064, 32768, False)),
    "qwen2.5-72b": (_QWEN2, (8192, 29568, 80, 64, 8, 128, 152064, 32768, False)),
    "qwen3-0.6b": (_QWEN3, (1024, 3072, 28, 16, 8, 128, 151936, 40960, True)),
    "qwen3-1.7b": (_QWEN3, (2048, 6144, 28, 16, 8, 128, 151936, 40960, True)),
    "qwen3-4b": (_QWEN3, (2560, 9728, 36, 32, 8, 128, 151936, 40960, True)),
    "qwen3-8b": (_QWEN3, (4096, 12288, 36, 32, 8, 128, 151936, 40960, False)),
    "qwen3-14b": (_QWEN3, (5120, 17408, 40, 40, 8, 128, 151936, 40960, False)),
    "qwen3-32b": (_QWEN3, (5120, 25600, 64, 64, 8, 128, 151936, 40960, False)),
    "smollm2-135m": (_SMOLLM2, (576, 1536, 30, 9, 3, 64, 49152, 8192, True)),
    "smollm2-360m": (_SMOLLM2, (960, 2560, 32, 15, 5, 64, 49152, 8192, True)),
    "smollm2-1.7b": (_SMOLLM2, (2048, 8192, 24, 32, 32, 64, 49152, 8192, True)),
}
for _size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b"):  # trained further, of the same shape
    _TABLE[f"qwen2.5-coder-{_size}"] = _TABLE[f"qwen2.5-{_size}"]

NAMES = tuple(sorted(_TABLE))


def configuration(name: str) -> ModelConfig | None:
    """The configuration of a public model, None when the name is not known.

    Upper case, an owner before a slash and endings that change no shape (-instruct, -chat, -hf) may be there.
    """
    plain = _plain(name)
    if plain not in _TABLE:
        return None
    family, (hidden, inner, layers, heads, kv_heads, head_dim, vocab, context, tied) = _TABLE[plain]
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context,
        norm_eps=family.norm_eps,
        rope_theta=family.rope_theta,
        tied_embeddings=tied,
        attention_bias=family.architecture == "qwen2",
        qk_norm=family.architecture == "qwen3",
        name=plain,
    )


def unknown(name: str) -> InputError:
    """What to say of a name that is neither a file nor in the table, with the names that are close to it."""
    close = difflib.get_close_matches(_plain(name), NAMES, 3, 0.6)
    hint = f"is {' or '.join(close)} meant?" if close else f"known are {', '.join(NAMES)}"
    kinds = "a .gguf file, a Hugging Face directory, a config.json, demo, or a public name"
    return InputError(f"{name!r} is no model: give {kinds}; {hint}")


def _plain(name: str) -> str:
    plain = name.lower().rsplit("/", 1)[-1].removeprefix("meta-")
    return re.sub(r"(-(hf|instruct|chat|base))+$", "", plain)
