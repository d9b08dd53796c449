"""The promise on a real model: SmolLM2's text with speculation is its text without, over prompts of many kinds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pilotfish import LLM, SamplingParams
from pilotfish.backends.native import NativeBackend, path_names
from pilotfish.bench import read_prompts
from pilotfish.loaders import load_model
from pilotfish.models.decoder import decoder_program
from pilotfish.program import Executable
from pilotfish.tree import Rows, TreeBatch
from tiny import random_tree

PROMPTS = read_prompts(Path(__file__).parents[1] / "benchmarks" / "prompts.jsonl")
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
