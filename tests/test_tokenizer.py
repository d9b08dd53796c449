"""Token ids against transformers and sentencepiece (golden files), streaming against whole decoding, and bad files."""

import json
import os
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.errors import InputError
from pilotfish.loaders.gguf_file import read_gguf
from pilotfish.loaders.tokenizer import Tokenizer, TokenizerSource

DATA = Path(__file__).parent / "data"


def golden(name: str) -> Any:
    return json.loads((DATA / f"tokenizer_{name}.json").read_text(encoding="utf-8"))


CORPUS: list[str] = golden("corpus")
SMALL: dict[str, Any] = golden("small")["metadata"]
RULES: dict[str, Any] = golden("rules")["pre"]
SENTENCEPIECE: dict[str, Any] = golden("sentencepiece")


def small(pre: str = "gpt-2", **keys: Any) -> Tokenizer:
    changed = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return Tokenizer.load(TokenizerSource(metadata={**SMALL, "tokenizer.ggml.pre": pre, **changed}))


def llama(**keys: Any) -> Tokenizer:
    changed = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return Tokenizer.load(TokenizerSource(metadata={**SENTENCEPIECE["metadata"], **changed}))


def save(directory: Path, files: dict[str, Any], metadata: dict[str, Any], **more: Any) -> Path:
    """A model directory from the files of a golden, which lack the vocabulary."""
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [line.split(" ") for line in metadata.get("tokenizer.ggml.merges", [])]
    model = files["tokenizer.json"]["model"]
    if not model["vocab"]:
        model = {**model, "vocab": vocabulary, "merges": merges}
    contents = {**files, "tokenizer.json": {**files["tokenizer.json"], "model": model}}
    contents["tokenizer_config.json"] = {**files["tokenizer_config.json"], **more.pop("config", {})}
    for name, content in {**contents, **more}.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    return directory


def marked_ids(ids: dict[str, Any], index: int) -> list[int]:
    """What the oracle gives for marked-up text, but without a second bos where the text has one."""
    expected = ids["marked"].get(str(index), ids["prefix"] + ids["plain"][index])
    prefix = ids["prefix"]
    return expected[len(prefix) :] if prefix and expected[: 2 * len(prefix)] == 2 * prefix else expected


def assert_equals_oracle(tokenizer: Tokenizer, ids: dict[str, Any]) -> None:
    for i, text in enumerate(CORPUS):
        assert tokenizer.encode(text, special=False) == ids["plain"][i], text
        assert tokenizer.encode(text, special=True) == marked_ids(ids, i), text


def assert_decodes_like_oracle(tokenizer: Tokenizer, ids: dict[str, Any]) -> None:
    for i, text in enumerate(CORPUS):
        oracle_ids = ids["marked"].get(str(i), ids["prefix"] + ids["plain"][i])
        assert tokenizer.decode(oracle_ids) == ids["shown"].get(str(i), text)
        assert tokenizer.decode(oracle_ids, skip_special=False) == ids["full"].get(str(i), text)


# -- ids ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(TokenizerSource(metadata=read_gguf(smollm2_path).metadata))


def test_smollm2_equals_transformers(smollm2_tokenizer: Tokenizer) -> None:
    assert_equals_oracle(smollm2_tokenizer, golden("smollm2"))
    assert_decodes_like_oracle(smollm2_tokenizer, golden("smollm2"))
    assert (smollm2_tokenizer.vocab_size, smollm2_tokenizer.bos_id, smollm2_tokenizer.eos_ids) == (49152, 1, {0, 2})
    assert smollm2_tokenizer.special_ids == set(range(17))


def test_qwen_equals_transformers() -> None:
    path = os.environ.get("PILOTFISH_QWEN")
    if not path:
        pytest.skip("PILOTFISH_QWEN does not name a GGUF file of Qwen2.5")
    tokenizer = Tokenizer.load(TokenizerSource(metadata=read_gguf(Path(path)).metadata))
    assert_equals_oracle(tokenizer, golden("qwen25"))
    assert_decodes_like_oracle(tokenizer, golden("qwen25"))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (151936, 151643, {151643, 151645})


@pytest.mark.parametrize("pre", RULES)
def test_rules_of_each_pre_tokenizer_equal_transformers(pre: str) -> None:
    assert_equals_oracle(small(pre), RULES[pre])


@pytest.mark.parametrize(
    ("pre", "same"), [("starcoder", "smollm"), ("refact", "smollm"), ("llama3", "llama-bpe"), ("llama-v3", "llama-bpe")]
)
def test_pre_tokenizers_that_are_one_by_two_names(pre: str, same: str) -> None:
    assert_equals_oracle(small(pre), RULES[same])


def test_default_pre_tokenizer_cuts_as_llama_cpp_does() -> None:
    words = ["Hello", ",", " world", "+", "<", "=", " ", "123", "45", ".", "x"]
    gpt2 = small("gpt-2", merges=SMALL["tokenizer.ggml.merges"])
    assert small("default").encode("".join(words), special=False) == [
        token_id for word in words for token_id in gpt2.encode(word, special=False)
    ]


@pytest.mark.parametrize("pre", RULES)
def test_directory_equals_transformers(pre: str, tmp_path: Path) -> None:
    save(tmp_path, RULES[pre]["files"], SMALL)
    tokenizer = Tokenizer.load(TokenizerSource(directory=tmp_path))
    assert_equals_oracle(tokenizer, RULES[pre])
    assert tokenizer.bos_id == SMALL["tokenizer.ggml.bos_token_id"]
    assert SMALL["tokenizer.ggml.eos_token_id"] in tokenizer.eos_ids


def test_sentencepiece_equals_sentencepiece() -> None:
    tokenizer = llama()
    for text, ids in zip(CORPUS, SENTENCEPIECE["sentencepiece"], strict=True):
        # After a token that the authors defined, transformers and llama.cpp add a space prefix, sentencepiece does not.
        if "<tool_call>" not in text:
            assert tokenizer.encode(text, special=False) == ids, text


def test_sentencepiece_equals_transformers(tmp_path: Path) -> None:
    save(tmp_path, SENTENCEPIECE["files"], SENTENCEPIECE["metadata"])
    for tokenizer in (llama(), Tokenizer.load(TokenizerSource(directory=tmp_path))):
        assert_equals_oracle(tokenizer, SENTENCEPIECE)
        assert_decodes_like_oracle(tokenizer, SENTENCEPIECE)
        assert (tokenizer.bos_id, tokenizer.special_ids) == (1, {0, 1, 2, 3})
        assert tokenizer.eos_ids == {2, 3}  # </s> and <|im_end|>


def test_space_prefix_is_left_out_where_the_file_says_so() -> None:
    without = llama(add_space_prefix=False)
    assert without.encode(" the", special=False) == llama().encode("the", special=False)
    assert without.decode(without.encode(" the", special=False)) == " the"
    assert without.decode(without.encode("the", special=False)) == "the"


# -- control tokens ----------------------------------------------------------------------------------------------------


def test_bos_and_eos_follow_the_family_and_the_file() -> None:
    bos, eos = SMALL["tokenizer.ggml.bos_token_id"], SMALL["tokenizer.ggml.eos_token_id"]
    bare = small().encode("Hi", special=False)
    assert small().encode("Hi", special=True) == bare
    assert small("llama-bpe").encode("Hi", special=True) == [bos, *bare]
    assert small("llama-bpe", add_bos_token=False).encode("Hi", special=True) == bare
    assert small(add_bos_token=True, add_eos_token=True).encode("Hi", special=True) == [bos, *bare, eos]
    assert llama().encode("", special=True) == [1]
    assert llama(add_bos_token=False).encode("", special=True) == []


def test_bos_in_the_text_is_not_doubled() -> None:
    tokenizer = small("llama-bpe")
    assert tokenizer.encode("<|begin_of_text|>Hi", special=True) == tokenizer.encode("Hi", special=True)


def test_directory_settings_overrule_the_post_processor(tmp_path: Path) -> None:
    bos = SMALL["tokenizer.ggml.bos_token_id"]
    save(tmp_path, RULES["llama-bpe"]["files"], SMALL, config={"add_bos_token": False})
    assert Tokenizer.load(TokenizerSource(directory=tmp_path)).encode("", special=True) == []
    save(tmp_path, RULES["qwen2"]["files"], SMALL, config={"add_bos_token": True})
    assert Tokenizer.load(TokenizerSource(directory=tmp_path)).encode("", special=True) == [bos]


def test_end_tokens_come_from_every_place_that_names_them(tmp_path: Path) -> None:
    id_of = {token: i for i, token in enumerate(SMALL["tokenizer.ggml.tokens"])}
    known = {id_of["<|endoftext|>"], id_of["<|im_end|>"], id_of["<|eot_id|>"]}
    assert small().eos_ids == known
    assert small(eot_token_id=5, eom_token_id=6).eos_ids == known | {5, 6}
    save(tmp_path, RULES["qwen2"]["files"], SMALL, **{"generation_config.json": {"eos_token_id": [7, 8]}})
    assert Tokenizer.load(TokenizerSource(directory=tmp_path)).eos_ids == known | {7, 8}
    save(tmp_path, RULES["qwen2"]["files"], SMALL, **{"generation_config.json": {}, "config.json": {"eos_token_id": 9}})
    assert Tokenizer.load(TokenizerSource(directory=tmp_path)).eos_ids == known | {9}


def test_text_can_not_spell_control_tokens_unless_asked() -> None:
    tokenizer = small()
    for text in CORPUS:
        assert not tokenizer.special_ids & set(tokenizer.encode(text, special=False))
    assert tokenizer.special_ids & set(tokenizer.encode("<|im_end|>", special=True))


def test_token_bytes() -> None:
    tokenizer = small()
    ids = tokenizer.encode("日<|im_end|><tool_call>", special=True)
    assert b"".join(map(tokenizer.token_bytes, ids)) == "日<|im_end|><tool_call>".encode()
    assert {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)} >= {bytes([byte]) for byte in range(256)}
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""  # an embedding row that no token uses
    tokens = SENTENCEPIECE["metadata"]["tokenizer.ggml.tokens"]
    assert llama().token_bytes(tokens.index("<0xE6>")) == b"\xe6"
    assert llama().token_bytes(tokens.index("▁the")) == b" the"


def test_unused_tokens_decode_to_nothing() -> None:
    kinds = [*SMALL["tokenizer.ggml.token_type"], 5]
    tokenizer = small(tokens=[*SMALL["tokenizer.ggml.tokens"], "[PAD1]"], token_type=kinds)
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == ""


# -- streaming ---------------------------------------------------------------------------------------------------------

BYTE_LEVEL, PIECES = small(), llama()


def streamed(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    stream = tokenizer.stream(**options)
    return [*map(stream.push, ids), stream.finish()]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PIECES], ids=["byte-level", "sentencepiece"])
@given(data=st.data(), skip_special=st.booleans())
def test_stream_of_any_tokens_is_their_text(tokenizer: Tokenizer, data: st.DataObject, skip_special: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    text = "".join(streamed(tokenizer, ids, skip_special=skip_special))
    assert text == tokenizer.decode(ids, skip_special)
    kept = [i for i in ids if not (skip_special and i in tokenizer.special_ids)]
    whole = b"".join(map(tokenizer.token_bytes, kept)).decode("utf-8", errors="replace")
    assert text == (whole if tokenizer is BYTE_LEVEL else whole.removeprefix(" "))


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PIECES], ids=["byte-level", "sentencepiece"])
@given(text=st.one_of(st.text(max_size=40), st.sampled_from(CORPUS)))
def test_stream_gives_whole_characters_as_soon_as_they_are_there(tokenizer: Tokenizer, text: str) -> None:
    if tokenizer is PIECES:
        # SentencePiece's mark for a space comes back as a space, and a defined token puts a space behind itself.
        text = text.replace("▁", "_").replace("tool_call", "tool")
    ids = tokenizer.encode(text, special=False)
    pieces = streamed(tokenizer, ids)
    assert pieces[-1] == ""
    raw, so_far = b"", ""
    for token_id, piece in zip(ids, pieces, strict=False):
        raw, so_far = raw + tokenizer.token_bytes(token_id), so_far + piece
        complete = raw.decode("utf-8", errors="ignore")
        assert so_far == (complete if tokenizer is BYTE_LEVEL else complete.removeprefix(" "))
    assert so_far == text


def test_stream_of_smollm2(smollm2_tokenizer: Tokenizer) -> None:
    for text in CORPUS:
        pieces = streamed(smollm2_tokenizer, smollm2_tokenizer.encode(text, special=False))
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


def test_stream_that_ends_inside_a_character() -> None:
    ids = BYTE_LEVEL.encode("a\U00010348", special=False)
    cut = [i for i in ids if BYTE_LEVEL.token_bytes(i) != b"\x88"]
    assert streamed(BYTE_LEVEL, cut)[-1] == "\ufffd"
    assert "".join(streamed(BYTE_LEVEL, cut)) == "a\ufffd"


def test_stream_that_continues_a_text_keeps_its_space() -> None:
    ids = PIECES.encode("the", special=False)
    assert "".join(streamed(PIECES, ids)) == "the"
    assert "".join(streamed(PIECES, ids, continuing=True)) == " the"


def test_decoding_gives_the_normalised_text_back() -> None:
    tokenizer = small("qwen2")
    for text in CORPUS:
        assert tokenizer.decode(tokenizer.encode(text, special=False)) == unicodedata.normalize("NFC", text)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(InputError, match="lone surrogate at character 2"):
        BYTE_LEVEL.encode("ab\ud800c", special=False)


def test_negative_id_is_refused() -> None:
    with pytest.raises(InputError, match="-1 is negative"):
        BYTE_LEVEL.decode([-1])


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"model": "bert"}, "'bert'; supported are 'gpt2' and 'llama'"),
        ({"model": None}, "None; supported are"),
        ({"pre": "martian"}, "'martian'; supported are .*qwen2"),
        ({"pre": ["qwen2"]}, "supported are"),
        ({"pre": None}, "names no pre-tokenizer"),
        ({"tokens": None}, "tokens is missing, empty or not a list of strings"),
        ({"tokens": []}, "tokens is missing, empty or not a list of strings"),
        ({"tokens": [1, 2]}, "tokens is missing, empty or not a list of strings"),
        ({"token_type": None}, "token_type is missing or not a list of numbers"),
        ({"token_type": [1, 1]}, "token_type has 2 entries for"),
        ({"token_type": ["1"] * len(SMALL["tokenizer.ggml.tokens"])}, "token_type is missing or not a list of numbers"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a b", "ab"]}, "merge 'ab'"),
        ({"merges": ["a b", "nowhere tobefound"]}, "merges do not fit its tokens"),
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000; its vocabulary has"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"bos_token_id": None, "add_bos_token": True}, "asks for a bos token"),
    ],
)
def test_broken_metadata_is_refused(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        small(**keys)


def test_broken_sentencepiece_metadata_is_refused() -> None:
    with pytest.raises(InputError, match="scores is missing"):
        llama(scores=None)
    with pytest.raises(InputError, match="scores has 1 entries"):
        llama(scores=[0.0])


def test_broken_directories_are_refused(tmp_path: Path) -> None:
    def load() -> Tokenizer:
        return Tokenizer.load(TokenizerSource(directory=tmp_path))

    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        load()
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(InputError, match="is not a tokenizer"):
        load()
    files = RULES["qwen2"]["files"]
    save(tmp_path, {**files, "tokenizer.json": {**files["tokenizer.json"], "decoder": {"type": "Fuse"}}}, SMALL)
    with pytest.raises(InputError, match=r"decodes with \['Fuse'\]"):
        load()
    save(tmp_path, files, SMALL, config={"bos_token": "<martian>"})
    with pytest.raises(InputError, match="bos_token '<martian>'"):
        load()
    save(tmp_path, files, SMALL, **{"generation_config.json": {"eos_token_id": ["x"]}})
    with pytest.raises(InputError, match="must be a token id"):
        load()
    save(tmp_path, files, SMALL, **{"generation_config.json": []})
    with pytest.raises(InputError, match="must hold a JSON object"):
        load()
    (tmp_path / "generation_config.json").write_text("nonsense")
    with pytest.raises(InputError, match="is not JSON"):
        load()


def test_a_source_must_name_something() -> None:
    with pytest.raises(InputError, match="directory or GGUF metadata"):
        Tokenizer.load(TokenizerSource())
