"""Builds a tokenizer from the `tokenizer.ggml.*` keys of a GGUF file.

Two families exist in such files. `gpt2` is byte-level BPE: the file holds tokens and merges, but of the pre-tokenizer
only its name, so the regular expressions stand here, as the models' own tokenizer.json files give them. `llama` is
SentencePiece BPE: the file holds pieces and scores, and the merges are derived from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pilotfish.errors import InputError

SPACE = "\u2581"  # what SentencePiece writes for a space
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Tokens that end a turn or a document whatever a file calls its end token: chat models stop at more than one.
END_TOKENS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<｜end▁of▁sentence｜>",
    }
)


@dataclass(frozen=True)
class Vocabulary:
    """What a file of either kind comes down to; `Tokenizer` is made from it."""

    backend: Backend
    pieces: Sequence[str | None]
    """The text of each id as the file spells it; None for an id without a token."""
    raw_ids: frozenset[int]
    """Ids whose piece is the text itself, not an encoding of bytes."""
    special_ids: frozenset[int]
    byte_level: bool
    """Pieces spell bytes in GPT-2's alphabet; otherwise they are SentencePiece's."""
    space_prefix: bool
    """Encoding puts a space before the text, so decoding takes one away."""
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    """Tokens that the model wants before and after every text."""
    chat_templates: Mapping[str, str]
    """Jinja sources by name; the usual one is `default`."""


@dataclass(frozen=True)
class _Rules:
    """How byte-level BPE cuts text into words before it merges."""

    splits: tuple[str, ...]
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False  # a word that is a token is taken as it is, without merging
    bos: bool = False  # unless the file says otherwise


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {
    "gpt-2": _Rules((_GPT2,)),
    "smollm": _Rules((_GPT2,), single_digits=True),
    "starcoder": _Rules((_GPT2,), single_digits=True),
    "refact": _Rules((_GPT2,), single_digits=True),
    "command-r": _Rules((_GPT2,), single_digits=True, nfc=True),
    "llama-bpe": _Rules((_LLAMA3,), whole_words=True, bos=True),
    "llama3": _Rules((_LLAMA3,), whole_words=True, bos=True),
    "llama-v3": _Rules((_LLAMA3,), whole_words=True, bos=True),
    "qwen2": _Rules((_QWEN2,), nfc=True),
    "qwen35": _Rules((_QWEN35,), nfc=True),
    "tekken": _Rules((_TEKKEN,), whole_words=True, bos=True),
    "deepseek-coder": _Rules((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"), single_digits=True),
    # Written by converters that did not know the model: llama.cpp's rules for that name, not those of any model.
    "default": _Rules((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def build_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Read the tokenizer out of GGUF metadata. Raises InputError where keys are missing, malformed or unknown."""
    family = metadata.get("tokenizer.ggml.model")
    if family not in ("gpt2", "llama"):
        raise InputError(f"the file's tokenizer.ggml.model is {family!r}; supported are 'gpt2' and 'llama'")
    pieces = _strings(metadata, "tokens")
    kinds = _numbers(metadata, "token_type", len(pieces))
    if family == "gpt2":
        rules = _rules(metadata)
        backend, space_prefix, bos_default = _byte_level(metadata, pieces, rules), False, rules.bos
        bos_id, eos_id = _token_id(metadata, "bos", None, pieces), _token_id(metadata, "eos", None, pieces)
        unknown_id = None
    else:
        space_prefix, bos_default = bool(metadata.get("tokenizer.ggml.add_space_prefix", True)), True
        bos_id, eos_id = _token_id(metadata, "bos", 1, pieces), _token_id(metadata, "eos", 2, pieces)
        unknown_id = _token_id(metadata, "unknown", 0, pieces)
        backend = _sentencepiece(metadata, pieces, kinds, unknown_id, space_prefix)

    marked = {i: kind for i, kind in enumerate(kinds) if kind != NORMAL}
    control = {i for i, kind in marked.items() if kind in (UNKNOWN, CONTROL)}
    named_ends = (eos_id, _token_id(metadata, "eot", None, pieces), _token_id(metadata, "eom", None, pieces))
    eos_ids = {i for i in control if pieces[i] in END_TOKENS} | {i for i in named_ends if i is not None}
    special_ids = frozenset(control | eos_ids | {i for i in (bos_id, unknown_id) if i is not None})
    user_ids = {i for i, kind in marked.items() if kind == USER_DEFINED} - special_ids
    backend.add_tokens(
        [
            AddedToken(pieces[i], special=i in special_ids, normalized=False)
            for i in sorted(special_ids | user_ids)
            if pieces[i]
        ]
    )
    used: list[str | None] = list(pieces)
    for i in (i for i, kind in marked.items() if kind == UNUSED):
        used[i] = None
    return Vocabulary(
        backend=backend,
        pieces=used,
        raw_ids=special_ids | user_ids,
        special_ids=special_ids,
        byte_level=family == "gpt2",
        space_prefix=space_prefix,
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=frozenset(eos_ids),
        prefix_ids=_wanted(metadata, "bos", bos_id, bos_default),
        suffix_ids=_wanted(metadata, "eos", eos_id, False),
        chat_templates=_chat_templates(metadata),
    )


def _byte_level(metadata: Mapping[str, Any], pieces: Sequence[str], rules: _Rules) -> Backend:
    lines = _strings(metadata, "merges")
    if set(map(str.count, lines, repeat(" "))) != {1}:  # checked in one sweep: there are 150,000 of them
        wrong = next(line for line in lines if line.count(" ") != 1)
        raise InputError(f"the file's tokenizer has the merge {wrong!r}; it must be two tokens and one space")
    halves = " ".join(lines).split(" ")
    backend = _bpe(pieces, zip(halves[::2], halves[1::2], strict=True), ignore_merges=rules.whole_words)
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rules.single_digits else []
    steps += [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in rules.splits]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return backend


def _rules(metadata: Mapping[str, Any]) -> _Rules:
    name = metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in _PRE_TOKENIZERS:
        told = "names no pre-tokenizer (tokenizer.ggml.pre)" if name is None else f"names the pre-tokenizer {name!r}"
        raise InputError(f"the file {told}; supported are {', '.join(sorted(_PRE_TOKENIZERS))}")
    return _PRE_TOKENIZERS[name]


def _sentencepiece(
    metadata: Mapping[str, Any],
    pieces: Sequence[str],
    kinds: Sequence[float],
    unknown_id: int | None,
    space_prefix: bool,
) -> Backend:
    scores = _numbers(metadata, "scores", len(pieces))
    backend = _bpe(
        pieces,
        _merges_from_scores(pieces, kinds, scores),
        unk_token=None if unknown_id is None else pieces[unknown_id],
        fuse_unk=True,
        byte_fallback=True,
    )
    steps: list[Any] = [normalizers.Prepend(SPACE)] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    return backend


def _merges_from_scores(
    pieces: Sequence[str], kinds: Sequence[float], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """The merges that make SentencePiece's choices (Kudo and Richardson 2018).

    It joins the two neighbours whose union has the best score, so every way to cut a piece in two pieces is a merge,
    ranked by that score. Only normal pieces take part: control tokens and bytes never come out of text.
    """
    score_of = {
        piece: score for piece, kind, score in zip(pieces, kinds, scores, strict=True) if kind == NORMAL and piece
    }
    merges: list[tuple[str, str]] = []
    for piece in sorted(score_of, key=lambda piece: -score_of[piece]):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in score_of and right in score_of:
                merges.append((left, right))
    return merges


def _bpe(pieces: Sequence[str], merges: Iterable[tuple[str, str]], **options: Any) -> Backend:
    try:
        return Backend(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(merges), **options))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"the file's merges do not fit its tokens: {error}") from None


def _wanted(metadata: Mapping[str, Any], name: str, token_id: int | None, default: bool) -> tuple[int, ...]:
    if not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
        return ()
    if token_id is None:
        raise InputError(f"the file asks for a {name} token on every text but gives no tokenizer.ggml.{name}_token_id")
    return (token_id,)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {name[len(key) + 1 :]: text for name, text in metadata.items() if name.startswith(f"{key}.")}
    return {"default": metadata[key], **named} if key in metadata else named


def _token_id(metadata: Mapping[str, Any], name: str, default: int | None, pieces: Sequence[str]) -> int | None:
    """A special token's id. A default beyond the vocabulary does not count; a given one there is an error."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return default if default is not None and default < len(pieces) else None
    if type(value) is not int or not 0 <= value < len(pieces):
        raise InputError(f"the file's {key} is {value!r}; its vocabulary has {len(pieces)} tokens")
    return value


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or set(map(type, values)) != {str}:
        raise InputError(f"the file's tokenizer.ggml.{name} is missing, empty or not a list of strings")
    return values


def _numbers(metadata: Mapping[str, Any], name: str, count: int) -> Sequence[float]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if isinstance(values, np.ndarray):
        values = values.tolist()  # plain numbers: comparing numpy scalars one by one takes ten times as long
    if not isinstance(values, list) or not set(map(type, values)) <= {int, float}:
        raise InputError(f"the file's tokenizer.ggml.{name} is missing or not a list of numbers")
    if len(values) != count:
        raise InputError(f"the file's tokenizer.ggml.{name} has {len(values)} entries for {count} tokens")
    return values
