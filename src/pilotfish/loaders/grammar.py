"""Structured output: which tokens may come next so that the answer has the form that was asked for.

The library llguidance parses (Earley's algorithm over lexemes that are derivatives of regular expressions) and walks
its tree of all tokens. Here it is bound to the model's own tokenizer, end tokens are kept out of it, and what it
can not undo is done anew, so that a walk along draft tokens leaves no trace.

Where the grammar forces a text, the library allows only the first token of that text's usual tokenization.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.errors import InputError, RequestError
from pilotfish.loaders.tokenizer import Tokenizer
from pilotfish.params import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# The library descends by recursion, one level per rule that refers to the next, and takes time that grows with the
# square of some texts. Within these limits the deepest chains fit into the stack several times over.
MAX_GRAMMAR = 65536  # characters
MAX_REGEX = 8192
KEPT = 64  # compiled grammars
_STACK_BYTES = 256 << 20  # address space, not memory
_STACK_LOCK = threading.Lock()  # the size is one of the whole process

_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_ECHO = re.compile(r"\s*(\d+ \|.*|\^*|<non-verbose/>)")  # lines of an error that repeat the source or point into it
_NOT_UTF8 = 0xFF  # begins no text; the library marks the names of control tokens with it


@dataclass(frozen=True)
class _Tokens:
    """The model's vocabulary as the library knows it."""

    library: LLTokenizer
    size: int
    ends: frozenset[int]
    end_bits: NDArray[np.uint8]  # [ceil(size / 8)]
    plain: NDArray[np.bool_]  # [size] tokens that are text or the name of a control token, and no end token
    plain_bits: NDArray[np.uint8]  # [ceil(size / 8)]


class Grammar:
    """The state of one request's structured output. It walks along the tokens and is rewound exactly.

    When it has ended it says nothing more: the request is to be stopped there. What rows of drafts behind the end are
    masked with does not matter, but no row may be left without a token, so the mask then allows them all.

    A call that raises RequestError leaves it where it was.
    """

    def __init__(self, tokens: _Tokens, start: LLMatcher) -> None:
        """`start` is never moved."""
        self._tokens = tokens
        self._start = start
        self._matcher = start.deep_copy()
        self._pushed: list[int] = []  # without the end token
        # The library forgets to count an end token that comes after its last text, so it gets none to see.
        self._closed = False

    @property
    def ended(self) -> bool:
        """Whether the text is complete: an end token came, or nothing else may follow."""
        return self._closed or (self._matcher.is_stopped() and not self._matcher.is_error())

    def mask(self) -> NDArray[np.uint8]:
        """[ceil(vocab / 8)] which tokens may come next, a bit each, the lowest bit of a byte first; all once ended.

        Raises RequestError where no token fits, or at a limit of the library.
        """
        tokens = self._tokens
        if self.ended:
            return np.full(len(tokens.plain_bits), 255, np.uint8)
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask: NDArray[np.uint8] = allowed[: len(tokens.plain_bits)] & tokens.plain_bits
        if self._matcher.is_accepting():
            mask |= tokens.end_bits
        elif not mask.any():
            raise RequestError("structured output: no token of the model continues the text as the grammar wants it")
        return mask

    def legal(self, tokens: Sequence[int]) -> int:
        """How many of the tokens, from the first, may come in this order from here. Changes nothing."""
        count = 0
        for token in tokens:
            try:
                self.push(token)
            except RequestError:
                break
            count += 1
        self.rewind(count)
        return count

    def push(self, token: int) -> None:
        """Go on by one token. Raises RequestError where the mask does not have it, or at a limit."""
        if not self._takes(token):
            raise RequestError(f"structured output: the grammar does not allow token {token} here")
        if token in self._tokens.ends:
            self._closed = True
            return
        self._matcher.consume_token(token)
        self._check()
        self._pushed.append(token)

    def rewind(self, count: int) -> None:
        """Undo the last `count` pushes. Raises ValueError where there were fewer."""
        if not 0 <= count <= len(self._pushed) + self._closed:
            raise ValueError(f"{count} tokens are to be undone of {len(self._pushed) + self._closed}")
        if count and self._closed:
            self._closed = False
            count -= 1
        del self._pushed[len(self._pushed) - count :]
        if count and not self._matcher.rollback(count):
            self._restart()  # the library does not go back over max_tokens and stop

    def forced(self) -> list[int]:
        """The tokens that come next whatever the model says; [] where there is a choice, or no way on."""
        if self.ended:
            return []
        tokens = self._matcher.compute_ff_tokens()
        if self._matcher.is_error():
            self._restart()
            return []
        stop = next((i for i, token in enumerate(tokens) if not self._tokens.plain[token]), len(tokens))
        return tokens[:stop]

    def copy(self) -> Grammar:
        """Another one at the same place; the two know nothing of each other."""
        other = Grammar.__new__(Grammar)
        other._tokens, other._start = self._tokens, self._start
        other._matcher = self._matcher.deep_copy()
        other._pushed, other._closed = self._pushed.copy(), self._closed
        return other

    def _takes(self, token: int) -> bool:
        """Whether `mask` has the token (once ended: whether it is an end token), for a fraction of its price."""
        if self._closed or not 0 <= token < self._tokens.size:
            return False
        if token in self._tokens.ends:
            return self._matcher.is_accepting()
        if not self._tokens.plain[token] or self.ended:
            return False
        forced = self._matcher.compute_ff_tokens()
        taken = token == forced[0] if forced else self._matcher.validate_tokens([token]) == 1
        self._check()
        return taken

    def _check(self) -> None:
        if self._matcher.is_error():
            message = _one_line(self._matcher.get_error())
            self._restart()
            raise RequestError(f"structured output: {message}")

    def _restart(self) -> None:
        """Walk again along what was pushed; the library never leaves an error by itself."""
        self._matcher = self._start.deep_copy()
        self._matcher.consume_tokens(self._pushed)


class GrammarCompiler:
    """Makes grammars for one model. What the library needs of the vocabulary is built at the first `compile`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size` is the number of logits; ids that the tokenizer does not know are never allowed."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._tokens: _Tokens | None = None
        self._compiled = lru_cache(KEPT)(self._compile)

    def compile(self, structured: StructuredOutput) -> Grammar:
        """The grammar at its start. Raises InputError, one line, where it makes no sense or is too large.

        Takes a millisecond or so; large ones may take seconds, in which other threads go on. The last ones are kept.
        """
        return self._compiled(structured).copy()

    def _compile(self, structured: StructuredOutput) -> Grammar:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise InputError("structured output needs the package llguidance: pip install llguidance") from None
        if self._tokens is None:
            self._tokens = _build_tokens(self._tokenizer, self._vocab_size)
        tokens = self._tokens
        kind, text = _source(structured)
        try:
            source = _READERS[kind](text)
            limits = LLParserLimits(verbose_errors=False)
            matcher = _with_deep_stack(lambda: LLMatcher(tokens.library, source, log_level=0, limits=limits))
            error = matcher.get_error()
        except (ValueError, RecursionError) as failure:  # lone surrogates, numbers that JSON does not have
            error = str(failure)
        if error:
            # For all but grammars the place is one in a text that the user did not write.
            message = _one_line(error) if kind == "grammar" else re.sub(r"^(at )?\d+\(\d+\): ", "", _one_line(error))
            raise InputError(f"{kind} does not compile: {message}")
        grammar = Grammar(tokens, matcher)
        try:
            grammar.mask()
        except RequestError:  # the library finds this only when it looks for a first token
            raise InputError(f"{kind} does not compile: there is no text of this form, or it is too complex") from None
        return grammar


def _source(structured: StructuredOutput) -> tuple[str, str]:
    """Which field is given, and its text. Raises InputError where that is too long."""
    if structured.choice:
        kind, text = "choice", json.dumps(structured.choice, ensure_ascii=False)
    elif structured.json_object:
        kind, text = "json_object", '{"type": "object"}'
    else:
        given = {"json_schema": structured.json_schema, "regex": structured.regex, "grammar": structured.grammar}
        kind, text = next((name, str(value)) for name, value in given.items() if value is not None)
    most = MAX_REGEX if kind == "regex" else MAX_GRAMMAR
    if len(text) > most:
        raise InputError(f"{kind} has {len(text)} characters; at most {most} are taken")
    if kind == "json_schema" and any(len(pattern) > MAX_REGEX for pattern in _patterns(json.loads(text))):
        raise InputError(f"{kind} has a pattern of more than {MAX_REGEX} characters")
    return kind, text


def _patterns(schema: Any) -> Iterator[str]:
    """The regular expressions of a schema, which take as long to compile as others."""
    entries = schema.items() if isinstance(schema, dict) else enumerate(schema if isinstance(schema, list) else ())
    for key, value in entries:
        if key == "pattern" and isinstance(value, str):
            yield value
        elif key == "patternProperties" and isinstance(value, dict):
            yield from value
        if isinstance(value, dict | list):
            yield from _patterns(value)


def _read_schema(text: str) -> str:
    from llguidance import LLMatcher

    if text.strip() in ("true", "false"):  # schemas too, but options need an object
        text = f'{{"allOf": [{text}]}}'
    return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_FORM)  # type: ignore[arg-type]


def _read_regex(text: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(text)


def _read_choice(text: str) -> str:
    # One lexeme for all: as alternatives of a rule, a thousand of them would be a thousand items of the parser's row.
    literals = " | ".join(json.dumps(choice) for choice in json.loads(text))
    return _lark(f"start: CHOICE\nCHOICE: {literals}")


def _lark(text: str) -> str:
    """Bare text that begins with a brace would be taken for the library's own JSON."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _read_grammar(text: str) -> str:
    if _GBNF_RULE.search(text) is None:
        return _lark(text)
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return _lark(gbnf_to_lark(_GBNF_ESCAPE.sub(_gbnf_character, text)))
    except RecursionError:
        raise ValueError("the groups are nested too deeply") from None
    except Exception as error:  # the converter raises bare Exception
        raise ValueError(str(error)) from None


def _gbnf_character(match: re.Match[str]) -> str:
    """The character of a \\u escape, which the converter would strip of its leading zeros."""
    digits = match[1] or match[2]
    if digits is None:
        return match[0]
    code = int(digits, 16)
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


_READERS: Mapping[str, Callable[[str], str]] = {
    "json_object": _read_schema,
    "json_schema": _read_schema,
    "regex": _read_regex,
    "choice": _read_choice,
    "grammar": _read_grammar,
}


def _with_deep_stack(build: Callable[[], LLMatcher]) -> LLMatcher:
    """What `build` returns, called on a thread of its own: a chain of some thousand rules overruns a usual stack."""
    pool = ThreadPoolExecutor(1, "pilotfish-grammar")
    with _STACK_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            built = pool.submit(build)
        finally:
            threading.stack_size(before)
    with pool:
        return built.result()


def _one_line(message: str) -> str:
    lines = [line for line in message.splitlines() if not _ECHO.fullmatch(line)]
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= 300 else text[:297] + "..."


def _build_tokens(tokenizer: Tokenizer, size: int) -> _Tokens:
    from llguidance import LLTokenizer, TokenizerWrapper

    texts = [tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b"" for token in range(size)]
    ends = sorted(token for token in tokenizer.eos_ids if token < size)
    special = {token for token in tokenizer.special_ids if token < size}
    for token, text in enumerate(texts):
        if text[:1] == bytes([_NOT_UTF8]):
            texts[token] = b""  # part of no text, and the library would take it for a control token
    plain = np.array([bool(text) for text in texts], np.bool_)
    plain[ends] = False
    end = np.zeros(size, np.bool_)
    end[ends] = True
    speller = _Speller(tokenizer, texts, special, ends)
    # Without end tokens the library adds one of its own behind the last id.
    library = LLTokenizer(TokenizerWrapper(speller), n_vocab=size, eos_token=ends or None)
    bits = [np.packbits(mask, bitorder="little") for mask in (end, plain)]
    return _Tokens(library, size, frozenset(ends), bits[0], plain, bits[1])


class _Speller:
    """The tokenizer as the library wants it: the texts of all tokens, and a call that gives the tokens of a text.

    The call must spell exactly that text, as the library allows only its first token where a text is forced.
    """

    def __init__(self, tokenizer: Tokenizer, texts: list[bytes], special: set[int], ends: list[int]) -> None:
        self.tokens = texts
        self.special_token_ids = sorted(special)
        self.eos_token_id = ends[0] if ends else None
        self.bos_token_id = tokenizer.bos_id
        self._tokenizer = tokenizer
        self._ids: dict[bytes, int] = {}
        self._longest = 0
        # A control character is a token of its own in vocabularies that put a space before every text.
        self._lead = tokenizer.encode("\x02", special=False)

    def __call__(self, text: bytes) -> list[int]:
        ids = self._tokenizer.encode(text.decode(), special=False)
        if self._spelled(ids) == text:
            return ids
        ids = self._tokenizer.encode("\x02" + text.decode(), special=False)
        rest = ids[len(self._lead) :]
        if ids[: len(self._lead)] == self._lead and self._spelled(rest) == text:
            return rest
        return self._greedy(text)  # the tokenizer changes the text (Unicode normal forms)

    def _spelled(self, ids: list[int]) -> bytes:
        return b"".join([self.tokens[token] for token in ids if token < len(self.tokens)])

    def _greedy(self, text: bytes) -> list[int]:
        """The longest token, again and again."""
        if not self._ids:
            control = set(self.special_token_ids)
            self._ids = {piece: token for token, piece in enumerate(self.tokens) if piece and token not in control}
            self._longest = max(map(len, self._ids))
        ids: list[int] = []
        while text:
            lengths = range(min(len(text), self._longest), 0, -1)
            length = next((length for length in lengths if text[:length] in self._ids), 0)
            if length:
                ids.append(self._ids[text[:length]])
            text = text[length or 1 :]
        return ids
