"""The promise on a real model: SmolLM2's text with speculation is its text without, over prompts of many kinds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from pilotfish import LLM, PilotfishError, SamplingParams, StructuredOutput
from pilotfish.backends.native import NativeBackend, path_names
from pilotfish.bench import read_prompts
from pilotfish.loaders import load_model
from pilotfish.models.decoder import decoder_program
from pilotfish.program import Executable
from pilotfish.tree import Rows, TreeBatch
from tiny import random_tree

PROMPTS = read_prompts(Path(__file__).parents[1] / "benchmarks" / "prompts", per_class=7)
TEXT = (
    "The harbour was quiet that morning. Two boats lay at the pier, and an old man mended a net on the steps. "
    "A girl came down the hill with a basket of bread. She gave him a loaf, and he told her about the shark."
)


def test_the_workload_has_kinds() -> None:
    assert len(PROMPTS) >= 40
    assert len({sample.kind for sample in PROMPTS}) >= 6


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_text_with_speculation_is_the_text_without(smollm2: LLM, temperature: float) -> None:
    """Plain decoding runs each prompt alone; speculation runs them all in batches of eight."""
    params = SamplingParams(max_tokens=24, temperature=temperature, top_p=0.95, seed=1)
    prompts = [sample.prompt for sample in PROMPTS]
    plain = [smollm2.generate(prompt, params, chat=True)[0] for prompt in prompts]
    drafted = smollm2.generate(prompts, params, chat=True, speculation="ngram:k=6")
    for expected, found in zip(plain, drafted, strict=True):
        assert found.tokens == expected.tokens
        assert found.text == expected.text
        assert found.finish_reason == expected.finish_reason
    assert sum(completion.speculation["accepted"] for completion in drafted) > 20
    assert len({completion.tokens for completion in plain}) > 40, "the prompts should lead to different texts"


FORMS = {
    "schema": StructuredOutput(
        json_schema={
            "type": "object",
            "properties": {
                "title": {"type": "string", "maxLength": 24},
                "tags": {"type": "array", "items": {"enum": ["old", "new", "none of these"]}, "maxItems": 3},
            },
            "required": ["title", "tags"],
            "additionalProperties": False,
        }
    ),
    "regex": StructuredOutput(regex=r"The answer is [0-9]{1,3}(\.[0-9]{2})? (units|pieces)\."),
    "grammar": StructuredOutput(grammar='root ::= "- " item ("\\n- " item)*\nitem ::= [a-z ]{3,12}'),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_structured_output_is_the_same_and_takes_fewer_steps(smollm2: LLM, form: str, temperature: float) -> None:
    params = SamplingParams(
        max_tokens=48, temperature=temperature, seed=3, structured=FORMS[form], frequency_penalty=0.3, logprobs=1
    )
    prompts = [sample.prompt for sample in PROMPTS[::8]]
    plain = [smollm2.generate(prompt, params, chat=True)[0] for prompt in prompts]
    for speculation in ("grammar", "ngram:k=6"):
        drafted = smollm2.generate(prompts, params, chat=True, speculation=speculation)
        for expected, found in zip(plain, drafted, strict=True):
            assert (found.tokens, found.text, found.finish_reason) == (
                expected.tokens,
                expected.text,
                expected.finish_reason,
            )
            assert found.logprobs == expected.logprobs
        if form != "grammar":  # which leaves a choice everywhere
            assert sum(completion.speculation["by_drafter"]["grammar"]["accepted"] for completion in drafted) > 10
    for completion in plain:
        if form == "schema" and completion.finish_reason == "stop":
            assert set(json.loads(completion.text)) == {"title", "tags"}
        if form == "regex":
            assert re.fullmatch(str(FORMS[form].regex), completion.text)


@pytest.mark.parametrize("rule", ["ratio", "block", "multi", "typical-lossy"])
def test_rules_by_name_run_on_the_real_model(smollm2: LLM, rule: str) -> None:
    """Their laws are tested elsewhere; greedy, all but none are plain decoding."""
    prompts = [sample.prompt for sample in PROMPTS if sample.kind == "edit"][:4]
    sampled = SamplingParams(max_tokens=24, temperature=0.7, top_p=0.95, seed=1, acceptance=rule)
    completions = smollm2.generate(prompts, sampled, chat=True, speculation="ngram:k=4")
    assert sum(completion.speculation["accepted"] for completion in completions) > 0
    greedy = SamplingParams(max_tokens=24, acceptance=rule)
    plain = smollm2.generate(prompts, SamplingParams(max_tokens=24), chat=True)
    drafted = smollm2.generate(prompts, greedy, chat=True, speculation="ngram:k=4")
    assert [completion.tokens for completion in drafted] == [completion.tokens for completion in plain]


def test_a_stream_that_was_left_does_not_write_into_the_next(smollm2: LLM) -> None:
    params = SamplingParams(max_tokens=20)
    left = smollm2.stream("One, two, three,", params)
    next(left)
    plain = smollm2.generate("The sea is", params)[0]
    with pytest.raises(PilotfishError, match="a newer engine"):
        next(left)
    assert smollm2.generate("The sea is", params)[0].tokens == plain.tokens


class _Bits:
    """SmolLM2 on one path and thread count; `tokens` through it in any layout gives logits."""

    def __init__(self, model: Path, path: str, threads: int) -> None:
        loaded = load_model(model, None)
        backend = NativeBackend(threads=threads, path=path)
        program = decoder_program(loaded.config, 512)
        self.executable: Executable = backend.prepare(program, backend.load(loaded.tensors))
        self.kv = backend.new_kv(program.kv, 40)
        self.vocab = loaded.config.vocab_size

    def logits(self, *rows: Rows) -> np.ndarray:
        result = self.executable.forward(TreeBatch.build(rows), self.kv, True)
        assert result.logits is not None
        assert (result.argmax == result.logits.argmax(axis=1)).all()
        return result.logits

    def plain(self, tokens: list[int], blocks: list[int]) -> np.ndarray:
        """One row at a time."""
        return np.concatenate([self.logits(Rows([token], at, blocks)) for at, token in enumerate(tokens)])


@pytest.fixture(scope="module")
def plain_bits(smollm2: LLM, smollm2_path: Path) -> tuple[list[int], np.ndarray]:
    tokens = smollm2.tokenizer.encode(TEXT, special=False)[:40]
    return tokens, _Bits(smollm2_path, path_names()[0], 1).plain(tokens, [3, 1, 2])


@pytest.mark.parametrize("path", path_names())
@pytest.mark.parametrize("threads", [1, 3])
def test_logits_have_the_same_bits_in_every_layout(
    smollm2_path: Path, plain_bits: tuple[list[int], np.ndarray], path: str, threads: int
) -> None:
    """Whole prefill, chunks, a second request beside it and a random tree: every row's bits are plain decoding's."""
    tokens, expected = plain_bits
    model = _Bits(smollm2_path, path, threads)
    whole = model.logits(Rows(tokens, 0, [9, 7, 8], all_logits=True))
    assert whole.tobytes() == expected.tobytes()
    chunks = [
        model.logits(Rows(tokens[a:b], a, [12, 10, 11], all_logits=True)) for a, b in ((0, 13), (13, 14), (14, 40))
    ]
    assert np.concatenate(chunks).tobytes() == expected.tobytes()
    both = model.logits(
        Rows(tokens[:20], 0, [20, 21], all_logits=True), Rows(tokens[:31], 0, [30, 31], all_logits=True)
    )
    assert both.tobytes() == np.concatenate([expected[:20], expected[:31]]).tobytes()


@pytest.mark.parametrize("seed", range(2))
def test_tree_rows_have_the_bits_of_plain_decoding(smollm2_path: Path, smollm2: LLM, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = smollm2.tokenizer.encode(TEXT, special=False)[:30]
    model = _Bits(smollm2_path, path_names()[0], 2)
    tree = random_tree(rng, 64 if seed else 24, model.vocab)
    blocks = [5, 2, 9, 30, 4, 17]
    model.logits(Rows(tokens[:-1], 0, blocks))
    rows = model.logits(Rows(tokens[-1:], len(tokens) - 1, blocks, tree))
    nodes = rng.choice(len(tree), 8, replace=False)
    for node in [-1, *nodes.tolist()]:
        path: list[int] = []
        at = node
        while at >= 0:
            path.insert(0, int(tree.tokens[at]))
            at = int(tree.parents[at])
        expected = model.plain(tokens + path, [20, 21, 22, 23, 24, 25])[-1]
        assert rows[node + 1].tobytes() == expected.tobytes()
