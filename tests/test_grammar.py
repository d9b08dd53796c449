"""Structured output: masks against fresh walks and plain checkers, exact rewinding, all kinds of source, drafts."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pilotfish.drafters.base import DraftRequest
from pilotfish.drafters.grammar import GrammarDrafter
from pilotfish.errors import InputError, RequestError
from pilotfish.loaders.gguf_file import read_gguf
from pilotfish.loaders.grammar import MAX_GRAMMAR, Grammar, GrammarCompiler
from pilotfish.loaders.tokenizer import Tokenizer, TokenizerSource
from pilotfish.params import StructuredOutput

DATA = Path(__file__).parent / "data"
PADDING = 100  # rows of the embedding that no token has

PERSON = {
    "type": "object",
    "properties": {
        "name_of_person": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "kind": {"const": "a text that is long and forced"},
    },
    "required": ["name_of_person", "age", "kind"],
    "additionalProperties": False,
}
NASTY = [
    'say "hi"',
    "back\\slash \\n",
    "tab\there",
    "line\nbreak",
    "é ü 日本 😀",
    "\x00\x7f\u2028",
    "/*x*/ | (a)?",
    "i",
    "<|im_end|>",
]
SOURCES: dict[str, StructuredOutput] = {
    "object": StructuredOutput(json_object=True),
    "person": StructuredOutput(json_schema=PERSON),
    "regex": StructuredOutput(regex=r"([a-z]{2,5}-[0-9]{3}|é+ü?|日本(語|人))(,[a-f]+)*"),
    "choice": StructuredOutput(choice=["a", "ab", "abc", *NASTY]),
    "ambiguous": StructuredOutput(grammar='start: s\ns: s s s | s s | "a" | "bb" |'),
    "nested": StructuredOutput(grammar='start: "(" start ")" | "[" start "]" | /[0-9]+/'),
    "ignore": StructuredOutput(grammar="%ignore / +/\nstart: A+\nA: /[a-z]+/"),
    "lazy": StructuredOutput(grammar='start: a "!" a\na[lazy]: /[a-z]+0/'),
    "control": StructuredOutput(grammar='start: /[ab]+/ <|im_start|> "hello" <[3-9]> /[ab]*/'),
    # The library can not go back over these two.
    "max tokens": StructuredOutput(grammar='start: a "x" b\na[max_tokens=3]: /[a-z ]+/\nb[max_tokens=2]: /[0-9]+/'),
    "stop": StructuredOutput(grammar='start: a "x"\na[stop="z"]: /[a-z]+/'),
    "gbnf": StructuredOutput(grammar='root ::= item ("," item)* # list\nitem ::= [a-c]{1,3} | "\\u00e9"'),
}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(TokenizerSource(metadata=read_gguf(smollm2_path).metadata))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + PADDING)


def _golden(name: str) -> Tokenizer:
    """`small`: byte-level, normal form C. `sentencepiece`: byte fallback, a space before every text."""
    metadata = json.loads((DATA / f"tokenizer_{name}.json").read_text(encoding="utf-8"))["metadata"]
    pre = {"tokenizer.ggml.pre": "qwen2"} if name == "small" else {}
    return Tokenizer.load(TokenizerSource(metadata={**metadata, **pre}))


@pytest.fixture(scope="module", params=["smollm2", "small", "sentencepiece"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "smollm2":
        loaded: Tokenizer = request.getfixturevalue("tokenizer")
        return loaded
    return _golden(request.param)


@pytest.fixture(scope="module")
def any_compiler(any_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(any_tokenizer, any_tokenizer.vocab_size + PADDING)


def _mask(grammar: Grammar) -> NDArray[np.bool_]:
    """[vocab]"""
    return np.unpackbits(grammar.mask(), bitorder="little").view(np.bool_)[: grammar._tokens.size]


def _allowed(grammar: Grammar) -> list[int]:
    ids: list[int] = np.flatnonzero(_mask(grammar)).tolist()
    return ids


def _walked(fresh: Grammar, tokens: Sequence[int]) -> Grammar:
    for token in tokens:
        fresh.push(token)
    return fresh


def _text(tokenizer: Tokenizer, tokens: Sequence[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(token) for token in tokens if token not in tokenizer.eos_ids)


def _complete(grammar: Grammar, tokenizer: Tokenizer, rng: random.Random, most: int = 400) -> bytes | None:
    """The text of a random walk to the end, None where it takes too long. Prefers tokens that end things."""
    first = [tokenizer.token_bytes(token)[:1] for token in range(grammar._tokens.size)]
    closing = np.array([letter in (b'"', b"}", b"]") for letter in first])
    tokens: list[int] = []
    while not grammar.ended and len(tokens) < most:
        mask = _mask(grammar)
        closes = (mask & closing).any() and rng.random() < 0.3
        tokens.append(int(rng.choice(np.flatnonzero(mask & closing if closes else mask))))
        grammar.push(tokens[-1])
    return _text(tokenizer, tokens) if grammar.ended else None


def _takes_text(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text, in the tokens that the grammar wants it in, is a whole answer."""
    rest = text.encode()
    while rest:
        fitting = [token for token in _allowed(grammar) if token not in tokenizer.eos_ids]
        fitting = [token for token in fitting if rest.startswith(tokenizer.token_bytes(token))]
        if not fitting or grammar.ended:
            return False
        grammar.push(max(fitting, key=lambda token: len(tokenizer.token_bytes(token))))
        rest = rest[len(tokenizer.token_bytes(grammar._pushed[-1])) :]
    return grammar.ended or any(token in tokenizer.eos_ids for token in _allowed(grammar))


# -- walks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_a_walk_forth_and_back_leaves_no_trace(name: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    rng = random.Random(name)
    walker, start = compiler.compile(SOURCES[name]), compiler.compile(SOURCES[name])
    tokens: list[int] = []
    went_back = ends = 0
    for _ in range(120):
        fresh = _walked(start.copy(), tokens)
        mask = _mask(walker)
        assert walker.ended == fresh.ended
        assert (mask == _mask(fresh)).all()
        assert walker.forced() == fresh.forced()
        if not walker.ended:
            assert not mask[tokenizer.vocab_size :].any()
            if name != "control":
                assert not mask[sorted(tokenizer.special_ids - tokenizer.eos_ids)].any()
            assert len(set(mask[sorted(tokenizer.eos_ids)].tolist())) == 1  # all of them or none
        else:
            ends += 1
        allowed = np.flatnonzero(mask).tolist()
        if walker.ended or rng.random() < 0.25:
            count = rng.randint(0, min(len(tokens), 6))
            walker.rewind(count)
            tokens = tokens[: len(tokens) - count]
            went_back += count > 0
        else:
            tokens.append(rng.choice(allowed))
            walker.push(tokens[-1])
    assert went_back > 5
    walker.rewind(len(tokens))
    assert (_mask(walker) == _mask(start)).all()
    if name in ("regex", "choice", "control", "max tokens", "gbnf"):
        assert ends > 0


@pytest.mark.parametrize("name", SOURCES)
def test_legal_and_push_agree_with_the_mask(name: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    rng = random.Random(name)
    walker = compiler.compile(SOURCES[name])
    for _ in range(25):
        mask = _mask(walker)
        if walker.ended:
            walker.rewind(rng.randint(1, len(walker._pushed)))
            continue
        sample = rng.sample(range(len(mask)), 30) + rng.sample(np.flatnonzero(mask).tolist(), min(20, int(mask.sum())))
        for token in [*sample, *tokenizer.eos_ids]:
            assert walker.legal([token]) == int(mask[token]), token
            if not mask[token]:
                with pytest.raises(RequestError, match=f"token {token}"):
                    walker.push(token)
        assert (_mask(walker) == mask).all()
        # A chain of legal tokens with one that is not at a random place.
        chain, ahead = [], walker.copy()
        while len(chain) < 5 and not ahead.ended:
            chain.append(rng.choice(_allowed(ahead)))
            ahead.push(chain[-1])
        assert walker.legal(chain) == len(chain)
        cut = rng.randrange(len(chain))
        before = _walked(walker.copy(), chain[:cut])
        wrong = rng.choice(np.flatnonzero(~_mask(before)).tolist())
        assert walker.legal([*chain[:cut], wrong, *chain[cut:]]) == cut
        assert (_mask(walker) == mask).all()
        walker.push(chain[0])


def test_ids_outside_the_vocabulary_are_refused(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(StructuredOutput(grammar="start: <[*]>{1,3}"))  # any token, says the library
    mask = _mask(grammar)
    assert len(mask) == tokenizer.vocab_size + PADDING
    assert mask.sum() == tokenizer.vocab_size - len(tokenizer.eos_ids)
    for token in (-1, tokenizer.vocab_size, len(mask), 2**40):
        assert grammar.legal([token]) == 0
        with pytest.raises(RequestError):
            grammar.push(token)
    assert (_mask(grammar) == mask).all()


def test_end_tokens(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.encode(letter, special=False)[0] for letter in "ab")
    for end in sorted(tokenizer.eos_ids):
        grammar = compiler.compile(StructuredOutput(choice=["a", "ab"]))
        assert grammar.legal([end]) == 0
        grammar.push(a)
        assert not grammar.ended
        assert _allowed(grammar) == sorted([*tokenizer.eos_ids, b])
        assert grammar.legal([end, end]) == 1
        grammar.push(end)
        assert grammar.ended and _mask(grammar).all() and grammar.forced() == [] and grammar.legal([b]) == 0
        with pytest.raises(RequestError):
            grammar.push(end)
        grammar.rewind(1)
        assert _allowed(grammar) == sorted([*tokenizer.eos_ids, b])
        # After the last possible text an end token may come, or be left out.
        grammar.push(b)
        assert grammar.ended and grammar.legal([b]) == 0 and grammar.legal([end]) == 1
        grammar.push(end)
        grammar.rewind(2)
        assert not grammar.ended and _allowed(grammar) == sorted([*tokenizer.eos_ids, b])
        grammar.rewind(1)
        assert a in _allowed(grammar) and end not in _allowed(grammar)
        with pytest.raises(ValueError, match="1 tokens are to be undone of 0"):
            grammar.rewind(1)


def test_copies_are_apart(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(SOURCES["person"])
    grammar.push(grammar.forced()[0])
    mask = _mask(grammar)
    other = grammar.copy()
    other.push(other.forced()[0])
    other.push(other.forced()[0])
    assert (_mask(grammar) == mask).all()
    other.rewind(3)
    assert (_mask(other) == _mask(compiler.compile(SOURCES["person"]))).all()
    assert (_mask(grammar) == mask).all()


def test_a_limit_of_the_library_is_an_error_that_rewinding_leads_out_of(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    words = " | ".join(f"/[a-z]+{i}/" for i in range(2500))  # too many items in a row of the parser
    grammar = compiler.compile(StructuredOutput(grammar=f'start: "x" words | "y" "z"\nwords: {words}'))
    x, y = (tokenizer.encode(letter, special=False)[0] for letter in "xy")
    start = _mask(grammar)
    for _ in range(2):
        with pytest.raises(RequestError, match="items"):
            grammar.push(x)
            _mask(grammar)
        grammar.rewind(len(grammar._pushed))
        assert (_mask(grammar) == start).all()
    assert grammar.legal([x, x]) <= 1 and grammar.legal([y]) == 1
    grammar.push(y)
    assert _text(tokenizer, grammar.forced()) == b"z"


def test_a_dead_end_is_an_error(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """An end token in the middle: it would end the answer before the grammar does."""
    grammar = compiler.compile(StructuredOutput(grammar='start: "a" <|im_end|> "b"'))
    grammar.push(tokenizer.encode("a", special=False)[0])
    assert grammar.forced() == []
    with pytest.raises(RequestError, match="no token of the model"):
        _mask(grammar)


# -- texts -------------------------------------------------------------------------------------------------------------


def test_whole_walks_are_json_of_the_schema(any_compiler: GrammarCompiler, any_tokenizer: Tokenizer) -> None:
    rng = random.Random(4)
    done = 0
    for _ in range(12):
        text = _complete(any_compiler.compile(SOURCES["person"]), any_tokenizer, rng)
        if text is None:
            continue
        done += 1
        value = json.loads(text)
        assert json.dumps(value, ensure_ascii=False) == text.decode() or "\\" in text.decode()
        assert set(value) - {"tags"} == {"name_of_person", "age", "kind"}
        assert isinstance(value["name_of_person"], str) and len(value["name_of_person"]) <= 8
        assert isinstance(value["age"], int) and 0 <= value["age"] <= 130
        assert value["kind"] == PERSON["properties"]["kind"]["const"]  # type: ignore[index]
        assert set(value.get("tags", [])) <= {"red", "green"} and len(value.get("tags", [])) <= 3
    assert done > 5


def test_whole_walks_are_objects(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    rng = random.Random(5)
    texts = [_complete(compiler.compile(SOURCES["object"]), tokenizer, rng, 100) for _ in range(30)]
    done = [text for text in texts if text is not None]
    assert len(done) > 5
    assert all(isinstance(json.loads(text), dict) for text in done)


def test_whole_walks_match_the_expression(any_compiler: GrammarCompiler, any_tokenizer: Tokenizer) -> None:
    rng = random.Random(6)
    for _ in range(20):
        text = _complete(any_compiler.compile(SOURCES["regex"]), any_tokenizer, rng)
        assert text is not None and SOURCES["regex"].regex is not None
        assert re.fullmatch(SOURCES["regex"].regex, text.decode())


def test_choices_are_taken_to_the_letter(any_compiler: GrammarCompiler, any_tokenizer: Tokenizer) -> None:
    choices = ["a", "ab", "abc", *NASTY]
    structured = StructuredOutput(choice=choices)
    for choice in choices:
        assert _takes_text(any_compiler.compile(structured), any_tokenizer, choice), choice
        alone = any_compiler.compile(StructuredOutput(choice=[choice]))
        tokens = []
        while not alone.ended:
            tokens.append(_allowed(alone)[0])
            alone.push(tokens[-1])
        assert _text(any_tokenizer, tokens) == choice.encode()
    for other in ("", "abd", "say 'hi'", "back\\slash", "line", "I", "e ü 日本 😀"):
        assert not _takes_text(any_compiler.compile(structured), any_tokenizer, other), other


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('start: "(" start ")" | /[0-9]+/', ["7", "((12))"], ["(1", "()", "a"]),
        ('?start: value\nvalue: "x"i | %json {"type": "boolean"}', ["x", "X", "true"], ["xx", '"true"']),
        ('root ::= ("+" | "-")? num\nnum ::= [1-9] [0-9]*', ["-10", "7"], ["01", "+-1"]),
        (
            '# a start rule of its own\nroot ::= begin\nbegin ::= "a" "\\u00e9" [\\u00e0-\\u00ff\\x41]',
            ["aéü", "aéA"],
            ["aéa"],
        ),
        ('root ::= "start: x" [^\\n]{2} "\\"\\\\"', ['start: xab"\\'], ['start: xa"\\', "start: "]),
    ],
)
def test_grammars_in_lark_and_gbnf(
    grammar: str, good: list[str], bad: list[str], compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    for text in good:
        assert _takes_text(compiler.compile(StructuredOutput(grammar=grammar)), tokenizer, text), text
    for text in bad:
        assert not _takes_text(compiler.compile(StructuredOutput(grammar=grammar)), tokenizer, text), text


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array"}, '[1, {"a": null}]', '[1,{"a":null}]'),
        ({"type": "array", "x-guidance": {"item_separator": ","}}, '[1,{"a": null}]', "[1, 2]"),
        ({"type": "array", "x-guidance": {"whitespace_flexible": True}}, "[ 1, 2 ]", "[1 2]"),
        (True, '"x"', "x"),
    ],
)
def test_spaces_in_json(schema: Any, good: str, bad: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    structured = StructuredOutput(json_schema=schema)
    assert _takes_text(compiler.compile(structured), tokenizer, good)
    assert not _takes_text(compiler.compile(structured), tokenizer, bad)


def test_forced_tokens_spell_what_is_forced(any_compiler: GrammarCompiler, any_tokenizer: Tokenizer) -> None:
    grammar = any_compiler.compile(SOURCES["person"])
    forced = grammar.forced()
    spelled = _text(any_tokenizer, forced)
    assert spelled and b'{"name_of_person": "'.startswith(spelled)
    assert grammar.legal(forced) == len(forced)
    ids = {any_tokenizer.token_bytes(token): token for token in reversed(range(any_tokenizer.vocab_size))}
    others = 0
    for token in forced:
        assert _allowed(grammar) == [token]  # one token, though others would begin to spell it, too
        letter = ids[any_tokenizer.token_bytes(token)[:1]]
        if letter != token:
            others += 1
            assert grammar.legal([letter]) == 0
        grammar.push(token)
    assert others > 0
    # A text that the tokenizer would change (it composes letters) is forced as it is.
    text = "Cafe\u0301 du monde, and more of that"
    constant = any_compiler.compile(StructuredOutput(choice=[text]))
    assert text.encode().startswith(_text(any_tokenizer, constant.forced()))
    assert _takes_text(constant, any_tokenizer, text)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structured", "says"),
    [
        ({"regex": "a(b"}, r"regex does not compile: .*unclosed group"),
        ({"regex": r"(a)\1"}, r"regex does not compile: .*backreferences"),
        ({"regex": "[a&&b]"}, r"regex does not compile: there is no text of this form"),
        ({"regex": "a" * 9000}, r"regex has 9000 characters; at most 8192"),
        ({"json_schema": {"anyOf": [{"pattern": "a" * 9000}]}}, r"json_schema has a pattern of more than 8192"),
        ({"json_schema": {"patternProperties": {"a" * 9000: True}}}, r"json_schema has a pattern of more than 8192"),
        ({"json_schema": {"not": {"type": "string"}}}, r'json_schema does not compile: Unimplemented keys: \["not"\]'),
        ({"json_schema": {"type": "wat"}}, r"json_schema does not compile: Invalid type: wat"),
        ({"json_schema": {"$ref": "http://example.com/x"}}, r"json_schema does not compile: .*example.com"),
        ({"json_schema": False}, r"json_schema does not compile: Unsatisfiable"),
        ({"json_schema": '{"minimum": NaN}'}, r"json_schema does not compile: expected value"),
        ({"grammar": "start: ("}, r"grammar does not compile: 1\(9\): Expected token"),
        ({"grammar": "\n\nstart: foo"}, r'grammar does not compile: at 3\(8\): unknown name: "foo"'),
        ({"grammar": "start: start"}, r"grammar does not compile: there is no text of this form"),
        ({"grammar": "start: <|no_such|>"}, r"grammar does not compile: .*unknown special token"),
        ({"grammar": '{"grammars": [{"regex": "a"}]}'}, r"grammar does not compile: 1\(1\)"),
        ({"grammar": "root ::= ("}, r"grammar does not compile: Expected '\)'"),
        ({"grammar": "root ::= x"}, r"grammar does not compile: Rule 'x' not found"),
        ({"grammar": "root ::= " + "(" * 5000}, r"grammar does not compile: the groups are nested too deeply"),
        ({"grammar": "x" * (MAX_GRAMMAR + 1)}, r"grammar has 65537 characters; at most 65536"),
        ({"choice": ["\ud800"]}, r"choice does not compile"),
        ({"regex": "a\ud800"}, r"regex does not compile"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    structured: dict[str, Any], says: str, compiler: GrammarCompiler, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=says) as caught:
        compiler.compile(StructuredOutput(**structured))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 350
    assert capfd.readouterr() == ("", "")


def test_a_deep_chain_of_rules_does_not_overrun_the_stack(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """On a usual stack this kills the process."""
    rules = "\n".join(f'r{i:x}: (r{i + 1:x} "x") | "y"' for i in range(2500))
    before = threading.stack_size()
    grammar = compiler.compile(StructuredOutput(grammar=f'start: "b" | "c" r0\n{rules}\nr{2500:x}: "a"'))
    assert threading.stack_size() == before
    assert b"b" in {tokenizer.token_bytes(token) for token in _allowed(grammar)}


# -- drafts ------------------------------------------------------------------------------------------------------------


def test_drafter_proposes_what_is_forced() -> None:
    drafter = GrammarDrafter()
    requests = [
        DraftRequest(0, [1], budget=4, max_depth=9),
        DraftRequest(1, [1], budget=3, max_depth=9, forced=[5, 6, 7, 8]),
        DraftRequest(3, [1], budget=9, max_depth=2, forced=[5, 6, 7, 8]),
        DraftRequest(4, [1], budget=9, max_depth=9, forced=[5]),
    ]
    trees = drafter.propose(requests)
    assert [tree.tokens.tolist() for tree in trees] == [[], [5, 6, 7], [5, 6], [5]]
    assert {tree.drafter for tree in trees[1:]} == {"grammar"}
    assert trees[1].parents.tolist() == [-1, 0, 1]
    assert all(confidence > 0.9 for tree in trees[1:] for confidence in tree.confidences)
    drafter.end(3)


def test_drafter_says_nothing_behind_drafts() -> None:
    """What is forced follows the committed tokens."""
    (tree,) = GrammarDrafter().propose([DraftRequest(0, [1], 4, 9, forced=[5, 6], drafted=[5])])
    assert len(tree) == 0


def test_drafter_with_a_grammar(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """The drafts of a request are legal, and their text is what the grammar wants."""
    grammar = compiler.compile(SOURCES["person"])
    tree = GrammarDrafter().propose([DraftRequest(0, [1], 4, 9, forced=grammar.forced())])[0]
    assert len(tree) == 4
    assert grammar.legal(tree.tokens.tolist()) == 4
    assert b'{"name_of_person": "'.startswith(_text(tokenizer, tree.tokens.tolist()))
