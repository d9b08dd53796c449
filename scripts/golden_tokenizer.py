"""Makes tests/data/tokenizer_*.json: what transformers and sentencepiece say about the corpus and about chats.

    python scripts/golden_tokenizer.py SMOLLM2.gguf QWEN2.5.gguf

Needs transformers, sentencepiece and gguf, in an environment of its own (the tests need none of them). Every oracle is
built another way than pilotfish builds its tokenizers: from a class of transformers, or from a tokenizer.json in the
structure that the model's authors published. The files record the versions. Corpus: tests/data/tokenizer_corpus.json.
"""

from __future__ import annotations

import io
import json
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sentencepiece
from gguf import GGUFReader
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AddedToken,
    CohereTokenizer,
    GPT2Tokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

DATA = Path(__file__).parent.parent / "tests" / "data"
CORPUS: list[str] = json.loads((DATA / "tokenizer_corpus.json").read_text(encoding="utf-8"))
PACKAGES = ("transformers", "tokenizers", "sentencepiece", "gguf", "jinja2")
VERSIONS = {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
USER_TOKENS = ["<tool_call>", "</tool_call>"]


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} SMOLLM2.gguf QWEN2.5.gguf")
    smollm2, qwen = (read_metadata(path) for path in sys.argv[1:])
    for name, oracle in (("smollm2", smollm2_oracle(smollm2)), ("qwen25", class_oracle(Qwen2Tokenizer, qwen))):
        write(name, ids_of_corpus(oracle) | texts_of_ids(oracle))
    small = small_vocabulary()
    write("small", small)
    write("rules", {"pre": {pre: rules_golden(pre, small) for pre in SMALL_ORACLES}})
    write("sentencepiece", sentencepiece_golden())
    write("chat", chat_golden({"smollm2": smollm2, "qwen2.5": qwen}))


# -- oracles -----------------------------------------------------------------------------------------------------------


def file_oracle(
    metadata: dict[str, Any], pre_tokenizer: list[Any], post: dict[str, Any] | None = None, **model: Any
) -> PreTrainedTokenizerBase:
    """transformers' tokenizer on a tokenizer.json spelled out here."""
    return from_tokenizer_json(
        {
            "version": "1.0",
            "added_tokens": added_tokens(metadata),
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizer},
            "post_processor": post,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "vocab": vocab(metadata), "merges": merges(metadata), **model},
        },
        metadata,
    )


def added_tokens(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": i, "content": text, "special": special, **flags} for i, text, special in marked_tokens(metadata)]


def bos_processor(metadata: dict[str, Any]) -> dict[str, Any]:
    bos = named_tokens(metadata)["bos_token"]
    single = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    ids = {"id": bos, "ids": [vocab(metadata)[bos]], "tokens": [bos]}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {bos: ids}}


def from_tokenizer_json(contents: dict[str, Any], metadata: dict[str, Any]) -> PreTrainedTokenizerBase:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.json"
        path.write_text(json.dumps(contents), encoding="utf-8")
        return PreTrainedTokenizerFast(tokenizer_file=str(path), **named_tokens(metadata))


def class_oracle(kind: type, metadata: dict[str, Any]) -> PreTrainedTokenizerBase:
    """A tokenizer class of transformers on the vocabulary and merges, as from vocab.json and merges.txt."""
    oracle = kind(vocab=vocab(metadata), merges=merges(metadata), unk_token=None, **named_tokens(metadata))
    oracle.add_tokens(
        [AddedToken(text, special=special, normalized=False) for _, text, special in marked_tokens(metadata)]
    )
    return oracle


def smollm2_oracle(metadata: dict[str, Any]) -> PreTrainedTokenizerBase:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return file_oracle(metadata, [{"type": "Digits", "individual_digits": True}, byte_level])


def split_oracle(
    metadata: dict[str, Any], *patterns: str, digits: bool = False, bos: bool = False
) -> PreTrainedTokenizerBase:
    """A `Split` of the pattern and then bytes, as models whose tokenizers came from tiktoken publish it."""
    steps: list[Any] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    if digits:
        steps.append({"type": "Digits", "individual_digits": True})
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    return file_oracle(metadata, steps, bos_processor(metadata) if bos else None, ignore_merges=bos)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
SMALL_ORACLES = {
    "gpt-2": lambda metadata: class_oracle(GPT2Tokenizer, metadata),
    "qwen2": lambda metadata: class_oracle(Qwen2Tokenizer, metadata),
    "qwen35": lambda metadata: class_oracle(Qwen3_5Tokenizer, metadata),
    "command-r": lambda metadata: class_oracle(CohereTokenizer, metadata),
    "smollm": smollm2_oracle,
    "llama-bpe": lambda metadata: split_oracle(metadata, LLAMA3, bos=True),
    "tekken": lambda metadata: split_oracle(metadata, TEKKEN, bos=True),
    "deepseek-coder": lambda metadata: split_oracle(metadata, *DEEPSEEK_CODER, digits=True),
}


def ids_of_corpus(oracle: PreTrainedTokenizerBase) -> dict[str, Any]:
    """For each text its ids as mere text, and as marked-up text where that is more than the bos token before them."""
    prefix = oracle("", add_special_tokens=True).input_ids
    plain = [oracle(text, add_special_tokens=False, split_special_tokens=True).input_ids for text in CORPUS]
    special = [oracle(text, add_special_tokens=True, split_special_tokens=False).input_ids for text in CORPUS]
    marked = {i: ids for i, ids in enumerate(special) if ids != prefix + plain[i]}
    return {"prefix": prefix, "plain": plain, "marked": marked}


def texts_of_ids(oracle: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What the ids of each text decode to, without the control tokens and with them, where that is another text."""
    decoded: dict[str, Any] = {}
    for key, skip in (("shown", True), ("full", False)):
        ids = [oracle(text, add_special_tokens=True, split_special_tokens=False).input_ids for text in CORPUS]
        texts = [oracle.decode(i, skip_special_tokens=skip, clean_up_tokenization_spaces=False) for i in ids]
        decoded[key] = {i: text for i, text in enumerate(texts) if text != CORPUS[i]}
    return decoded


# -- small vocabularies ------------------------------------------------------------------------------------------------


def small_vocabulary() -> dict[str, Any]:
    """A byte-level vocabulary for all rules: it learns across every border that some rule draws, so each shows."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1400, initial_alphabet=alphabet, max_token_length=6, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    # Words that no merge makes: only rules that take whole words from the vocabulary find them.
    tokens += [word for word in ("Ġtokenizer", "SELECT", "Donaudampf") if word not in model["vocab"]]
    types = [NORMAL] * len(tokens)
    control = ["<|endoftext|>", "<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
    keys = {
        "model": "gpt2",
        "tokens": tokens + control + USER_TOKENS,
        "token_type": types + [CONTROL] * len(control) + [USER_DEFINED] * len(USER_TOKENS),
        "merges": [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]],
        "bos_token_id": len(tokens) + control.index("<|begin_of_text|>"),
        "eos_token_id": len(tokens) + control.index("<|im_end|>"),
    }
    return {"metadata": {f"tokenizer.ggml.{key}": value for key, value in keys.items()}}


def rules_golden(pre: str, small: dict[str, Any]) -> dict[str, Any]:
    """Ids under one pre-tokenizer, and the files in which transformers saves it, without vocabulary and merges."""
    oracle = SMALL_ORACLES[pre](small["metadata"])
    files = saved_files(oracle)
    files["tokenizer.json"]["model"] |= {"vocab": {}, "merges": []}
    return ids_of_corpus(oracle) | {"files": files}


def saved_files(oracle: PreTrainedTokenizerBase) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        oracle.save_pretrained(directory)
        names = ("tokenizer.json", "tokenizer_config.json")
        return {name: json.loads((Path(directory) / name).read_text(encoding="utf-8")) for name in names}


def sentencepiece_golden() -> dict[str, Any]:
    """A small SentencePiece BPE model as GGUF stores it, its ids by sentencepiece, and those of Llama 2's structure."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.splitlines() if "\0" not in line]),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=USER_TOKENS,
        control_symbols=["<|im_end|>"],
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.vocab_size())
    kinds = [piece_kind(processor, i) for i in ids]
    keys = {
        "model": "llama",
        "tokens": [processor.id_to_piece(i) for i in ids],
        "scores": [processor.get_score(i) for i in ids],
        "token_type": kinds,
        "unknown_token_id": processor.unk_id(),
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    oracle = llama2_oracle(metadata)
    own = {"metadata": metadata, "sentencepiece": [processor.encode(text) for text in CORPUS]}
    return own | {"files": saved_files(oracle)} | ids_of_corpus(oracle) | texts_of_ids(oracle)


def piece_kind(processor: Any, i: int) -> int:
    tests = ((processor.is_unknown, UNKNOWN), (processor.is_control, CONTROL), (processor.is_byte, BYTE))
    for holds, kind in tests:
        if holds(i):
            return kind
    return USER_DEFINED if processor.id_to_piece(i) in USER_TOKENS else NORMAL


def llama2_oracle(metadata: dict[str, Any]) -> PreTrainedTokenizerBase:
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    normal = {
        token: score
        for token, kind, score in zip(tokens, metadata["tokenizer.ggml.token_type"], scores, strict=True)
        if kind == NORMAL
    }
    pairs = [
        (-normal[token], tokens.index(token[:cut]), tokens.index(token[cut:]))
        for token in normal
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    return from_tokenizer_json(
        {
            "version": "1.0",
            "added_tokens": added_tokens(metadata),
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Prepend", "prepend": "▁"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                ],
            },
            "pre_tokenizer": None,
            "post_processor": bos_processor(metadata),
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
            "model": {
                "type": "BPE",
                "unk_token": "<unk>",
                "fuse_unk": True,
                "byte_fallback": True,
                "vocab": vocab(metadata),
                "merges": [[tokens[left], tokens[right]] for _, left, right in sorted(pairs)],
            },
        },
        metadata,
    )


# -- chats -------------------------------------------------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a place, in °C & <units>",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"place": "Zürich"}}}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hello!"}]},
    {"messages": [{"role": "user", "content": "Hello!"}], "add_generation_prompt": False},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?\n"}]},
    {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": " <b>spaces & 日本語 'quotes'</b> "}]},
    {
        "messages": [
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "Two"},
            {"role": "user", "content": "Three\n\nlines"},
        ]
    },
    {
        "messages": [
            {"role": "system", "content": "Count."},
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "2"},
        ],
        "add_generation_prompt": False,
    },
    {"messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER], "only": "qwen2.5"},
    {
        "messages": [
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": "Weather in Zürich?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": '{"celsius": -3}'},
            {"role": "tool", "content": '{"celsius": 4}'},
            {"role": "assistant", "content": "Cold.", "tool_calls": [CALL]},
        ],
        "tools": [WEATHER, WEATHER],
        "only": "qwen2.5",
    },
]


def chat_golden(models_metadata: dict[str, dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, metadata in models_metadata.items():
        oracle = smollm2_oracle(metadata) if name == "smollm2" else class_oracle(Qwen2Tokenizer, metadata)
        template = metadata["tokenizer.chat_template"]
        rendered = []
        for chat in (chat for chat in CHATS if chat.get("only", name) == name):
            chat = {"add_generation_prompt": True, "tools": None} | {key: chat[key] for key in chat if key != "only"}
            options = {key: chat[key] for key in ("tools", "add_generation_prompt")}
            text = oracle.apply_chat_template(chat["messages"], **options, chat_template=template, tokenize=False)
            rendered.append({**chat, "text": text, "ids": oracle(text, add_special_tokens=False).input_ids})
        result[name] = {"template": template, **named_tokens(metadata), "chats": rendered}
    return {"models": result}


# -- GGUF metadata -----------------------------------------------------------------------------------------------------


def read_metadata(path: str) -> dict[str, Any]:
    reader = GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}


def vocab(metadata: dict[str, Any]) -> dict[str, int]:
    return {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def merges(metadata: dict[str, Any]) -> list[tuple[str, ...]]:
    return [tuple(line.split(" ")) for line in metadata["tokenizer.ggml.merges"]]


def marked_tokens(metadata: dict[str, Any]) -> list[tuple[int, str, bool]]:
    """Id, text and whether it is a control token, for all that text may spell out."""
    kinds = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    wanted = (UNKNOWN, CONTROL, USER_DEFINED)
    return [(i, text, kind != USER_DEFINED) for i, (text, kind) in enumerate(kinds) if kind in wanted]


def named_tokens(metadata: dict[str, Any]) -> dict[str, str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return {f"{name}_token": tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos")}


def write(name: str, contents: dict[str, Any]) -> None:
    path = DATA / f"tokenizer_{name}.json"
    lines = [
        f"{json.dumps(key)}:{json.dumps(value, separators=(',', ':'))}"
        for key, value in ({"versions": VERSIONS} | contents).items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
