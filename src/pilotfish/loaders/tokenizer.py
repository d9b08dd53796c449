"""Text to token ids and back, from a Hugging Face directory or from GGUF metadata."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pilotfish.errors import InputError
from pilotfish.loaders.chat import ChatTemplate
from pilotfish.loaders.gguf_tokenizer import END_TOKENS, SPACE, Vocabulary, build_vocabulary


@dataclass(frozen=True)
class TokenizerSource:
    """Where a tokenizer comes from; exactly one of the two is given."""

    directory: Path | None = None
    """A Hugging Face model directory (tokenizer.json, tokenizer_config.json, chat_template.jinja)."""
    metadata: Mapping[str, Any] | None = None
    """GGUF metadata with the `tokenizer.*` keys (lists of str, numpy arrays, ints, bools)."""


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads."""

    vocab_size: int
    """Number of token ids. The model's embedding may have more rows: such ids decode to nothing."""
    bos_id: int | None
    eos_ids: frozenset[int]
    """Every token that ends the model's output: end of text, of turn and of message."""
    special_ids: frozenset[int]
    """Control tokens: no text spells them unless `encode` is told so, and decoding leaves them out by default."""

    @classmethod
    def load(cls, source: TokenizerSource) -> Tokenizer:
        """Build the tokenizer. Raises InputError where files or keys are missing, broken or of an unknown kind."""
        if source.metadata is not None:
            return cls(build_vocabulary(source.metadata))
        if source.directory is not None:
            return cls(_read_directory(source.directory))
        raise InputError("a tokenizer needs a model directory or GGUF metadata")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._marked = vocabulary.backend
        self._plain = _without_control_tokens(vocabulary.backend)
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = len(vocabulary.pieces)
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.special_ids = vocabulary.special_ids

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids of `text`.

        With `special` (templates, prompts that carry markup) a control token spelled in the text becomes that token,
        and the tokens that the model wants around every text are added: in front only if the text does not begin
        with them. Without it (text that must not steer the model) the text is only text: its spelling of a control
        token is encoded like any other, and nothing is added. Tokens that the model's authors defined as ordinary
        vocabulary (`<tool_call>` in Qwen) are recognised either way. Raises InputError for text that is not Unicode.
        """
        try:
            text.encode()  # some releases of the library take a lone surrogate and change it
        except UnicodeEncodeError as error:
            raise InputError(f"the text has a lone surrogate at character {error.start}; it must be Unicode") from None
        backend = self._marked if special else self._plain
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        if special:
            prefix, suffix = self._vocabulary.prefix_ids, self._vocabulary.suffix_ids
            ids = [*(() if tuple(ids[: len(prefix)]) == prefix else prefix), *ids, *suffix]
        return ids

    @property
    def has_chat_template(self) -> bool:
        return "default" in self._vocabulary.chat_templates

    def chat_template(self) -> ChatTemplate:
        """The model's own chat template; encode what it renders with `special=True`.

        Raises InputError where the model has none or a broken one.
        """
        templates = self._vocabulary.chat_templates
        if not self.has_chat_template:
            raise InputError("the model has no chat template; give it the bare text (without --chat)")
        bos, eos = self._piece(self._vocabulary.bos_id), self._piece(self._vocabulary.eos_id)
        return ChatTemplate(templates["default"], bos, eos, templates.get("tool_use"))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        stream = self.stream(skip_special)
        return "".join([stream.push(token_id) for token_id in ids]) + stream.finish()

    def stream(self, skip_special: bool = True, continuing: bool = False) -> Detokenizer:
        """A detokenizer for one sequence. `continuing`: its tokens follow others, so a leading space is kept."""
        return Detokenizer(self, skip_special, strip_space=self._vocabulary.space_prefix and not continuing)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, as UTF-8 bytes that may begin or end inside a character.

        A control token gives the bytes of its name; an id without a token gives none.
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        piece = self._piece(token_id)
        if token_id in self._vocabulary.raw_ids:
            return piece.encode()
        if self._vocabulary.byte_level:
            try:
                return bytes([_BYTE_OF[char] for char in piece])
            except KeyError:  # not of the alphabet: a piece that someone added by hand
                return piece.encode()
        if _BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE, " ").encode()

    def _piece(self, token_id: int | None) -> str:
        if token_id is None or token_id >= self.vocab_size:
            return ""
        if token_id < 0:
            raise InputError(f"token id {token_id} is negative; ids run from 0 to {self.vocab_size - 1}")
        return self._vocabulary.pieces[token_id] or ""


class Detokenizer:
    """Turns one sequence of tokens into text as they come. What it returns, joined, is `Tokenizer.decode` of them all.

    A character whose bytes are not all there yet is held back.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, strip_space: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._strip_space = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is complete with it, possibly none."""
        if token_id in self._skipped:
            return ""
        return self._stripped(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """Return what is left: U+FFFD if the tokens ended inside a character, otherwise nothing."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text


def _without_control_tokens(backend: Backend) -> Backend:
    """The same tokenizer (its model is shared, not copied) to which control tokens in a text are mere text."""
    plain = Backend(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    # All of them, in order: a token that the model itself does not know gets its id by counting.
    plain.add_tokens([token for _, token in sorted(backend.get_added_tokens_decoder().items())])
    plain.encode_special_tokens = True
    return plain


def _read_directory(directory: Path) -> Vocabulary:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"{directory} has no tokenizer.json; AutoTokenizer.save_pretrained of transformers writes one")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{path} is not a tokenizer: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    byte_level, space_prefix = _decoder_kind(backend, path)
    config = _read_json(directory / "tokenizer_config.json")
    bos_id, eos_id = _named_token(backend, config, "bos_token"), _named_token(backend, config, "eos_token")
    added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special}
    eos_ids = {i for i in special if added[i].content in END_TOKENS} | _listed_ends(directory)
    if eos_id is not None:
        eos_ids.add(eos_id)
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    if "add_bos_token" in config or "add_eos_token" in config:
        prefix = (bos_id,) if config.get("add_bos_token") and bos_id is not None else ()
        suffix = (eos_id,) if config.get("add_eos_token") and eos_id is not None else ()
    else:
        prefix, suffix = _post_processing(backend)
    by_id = {i: piece for piece, i in backend.get_vocab(with_added_tokens=True).items()}
    return Vocabulary(
        backend=backend,
        pieces=[by_id.get(i) for i in range(max(by_id, default=-1) + 1)],
        raw_ids=frozenset(added),
        special_ids=frozenset(special | eos_ids | (set() if bos_id is None else {bos_id})),
        byte_level=byte_level,
        space_prefix=space_prefix,
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=frozenset(eos_ids),
        prefix_ids=prefix,
        suffix_ids=suffix,
        chat_templates=_chat_templates(directory, config),
    )


def _listed_ends(directory: Path) -> set[int]:
    """The end tokens that the model's own settings list."""
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) for token_id in ids):
            raise InputError(f"eos_token_id in {directory / name} must be a token id or a list of them")
        ends.update(ids)
    return ends


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The file of its own goes before what tokenizer_config.json holds: one template or several with names."""
    inline = config.get("chat_template")
    try:
        named = {entry["name"]: entry["template"] for entry in inline} if isinstance(inline, list) else {}
    except (KeyError, TypeError):
        raise InputError(
            "chat_template in tokenizer_config.json must be text or objects of name and template"
        ) from None
    if isinstance(inline, str):
        named["default"] = inline
    path = directory / "chat_template.jinja"
    if path.is_file():
        named["default"] = path.read_text(encoding="utf-8")
    return named


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object")
    return value


def _decoder_kind(backend: Backend, path: Path) -> tuple[bool, bool]:
    """Whether pieces are byte-level, and whether decoding takes a leading space away."""
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": None}
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True, False
    if kinds == ["Metaspace"]:
        return False, steps[0].get("prepend_scheme", "always") != "never"
    if set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "Replace" in kinds:
        return False, "Strip" in kinds
    raise InputError(f"{path} decodes with {kinds}; supported are ByteLevel, Metaspace and SentencePiece's steps")


def _named_token(backend: Backend, config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    token_id: int | None = backend.token_to_id(text)
    if token_id is None:
        raise InputError(f"tokenizer_config.json has the {name} {text!r}, which tokenizer.json does not know")
    return token_id


def _post_processing(backend: Backend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that the file's post-processor puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    raise InputError("the post-processor in tokenizer.json changes the text's own tokens, which is not supported")


def _gpt2_alphabet() -> dict[str, int]:
    """GPT-2 spells a byte as itself where Latin-1 prints it, and the others as characters from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _gpt2_alphabet()
_BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")
