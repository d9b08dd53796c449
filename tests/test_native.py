"""The native interpreter: against the oracle within rounding, and every row against plain decoding bit for bit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish import _native
from pilotfish.backends.native import PATH_VARIABLE, NativeBackend, NativeExecutable, read_gb_per_s
from pilotfish.backends.reference import ReferenceBackend
from pilotfish.config import ModelConfig
from pilotfish.errors import InputError
from pilotfish.loaders import LoadedModel, load_model
from pilotfish.models.decoder import decoder_program
from pilotfish.program import BLOCK_SIZE, Embed, Floats, GatedAct, Gather, Head, Linear, Norm, Part, Program, Tap
from pilotfish.quant import Tensor
from pilotfish.tree import DraftTree, Rows, TreeBatch
from tiny import random_tree, tiny_model

ARCHITECTURES = ("llama", "qwen2", "qwen3")
PATHS = _native.path_names()
NUM_BLOCKS = 64
VOCAB = 128


class Model:
    """A tiny model bound to one backend."""

    def __init__(
        self, backend: NativeBackend, config: ModelConfig, tensors: dict[str, Tensor], context: int | None = None
    ) -> None:
        self.backend = backend
        self.program = decoder_program(config, context or config.context_length)
        self.executable: NativeExecutable = backend.prepare(self.program, backend.load(tensors))

    def new_kv(self, poisoned: bool = True) -> Any:
        """With NaN in every slot: whatever looks at one that was never written shows it."""
        kv: Any = self.backend.new_kv(self.program.kv, NUM_BLOCKS)
        if poisoned:
            for layer in range(self.program.kv.layers):
                kv.keys(layer)[:] = 0x7E00
                kv.values(layer)[:] = 0x7E00
        return kv

    def logits(self, kv: Any, *requests: Rows) -> Floats:
        batch = TreeBatch.build(requests)
        result = self.executable.forward(batch, kv, logits=True)
        assert result.logits is not None and np.isfinite(result.logits).all()
        np.testing.assert_array_equal(result.argmax, result.logits.argmax(axis=1))
        return result.logits

    def plain(self, tokens: Sequence[int]) -> Floats:
        """Logits [tokens, vocab] of decoding one token at a time."""
        kv, blocks = self.new_kv(), range(-(-len(tokens) // BLOCK_SIZE))
        return np.concatenate([self.logits(kv, Rows([token], at, blocks)) for at, token in enumerate(tokens)])


def built(architecture: Any, threads: int = 2, path: str | None = None, kinds: str = "Q4_K+Q6_K", **more: Any) -> Model:
    return Model(NativeBackend(threads, path), *tiny_model(architecture, 11, kinds, **more))


def random_tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, VOCAB, count).tolist()


def paths_of(tree: DraftTree) -> list[list[int]]:
    """The nodes from the root down to each node."""
    paths: list[list[int]] = []
    for node, parent in enumerate(tree.parents.tolist()):
        paths.append(([] if parent < 0 else paths[parent]) + [node])
    return paths


def plain_rows(model: Model, tokens: list[int], tree: DraftTree) -> Floats:
    """What plain decoding gives for the last of `tokens` and for each node of the tree, [1 + nodes, vocab].

    Decodes down the tree; a node's KV lies where plain decoding puts it, whatever a sibling left there is overwritten.
    """
    kv, blocks = model.new_kv(), range(-(-(len(tokens) + len(tree)) // BLOCK_SIZE))
    rows = [model.logits(kv, Rows([token], at, blocks)) for at, token in enumerate(tokens)][-1:]
    rows += [np.empty((0, 0), np.float32)] * len(tree)

    def descend(parent: int, position: int) -> None:
        for node in np.flatnonzero(tree.parents == parent).tolist():
            rows[1 + node] = model.logits(kv, Rows([int(tree.tokens[node])], position, blocks))
            descend(node, position + 1)

    descend(-1, len(tokens))
    return np.concatenate(rows)


# What the halves of keys and values cost: each is off by at most 2^-11 of itself. A score moves by 2^-11 of the sum of
# |q k|, and with it the weights; the layers pass this on. The tiny models' scores reach some 10, hence the factor.
HALF_BOUND = 2.0**-11 * 40


@pytest.mark.parametrize("kinds", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float_weights_agree_with_the_oracle(architecture: Any, kinds: str) -> None:
    rng = np.random.default_rng(0)
    rows = Rows(random_tokens(rng, 290), 0, rng.permutation(NUM_BLOCKS)[:30], random_tree(rng, 30, VOCAB), True)
    model = built(architecture, kinds=kinds)
    oracle = ReferenceBackend()
    weights = oracle.load(tiny_model(architecture, 11, kinds)[1])
    want = oracle.prepare(model.program, weights).forward(
        TreeBatch.build([rows]), oracle.new_kv(model.program.kv, NUM_BLOCKS), True
    )
    assert want.logits is not None
    error = np.abs(model.logits(model.new_kv(), rows) - want.logits)
    spread = want.logits.std()
    assert error.max() < HALF_BOUND * spread
    assert error.mean() < HALF_BOUND / 10 * spread


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_quantised_weights_stay_near_the_oracle(architecture: Any) -> None:
    """Activations are rounded to int8 in groups of 32: half a percent or so of each, which the layers add up."""
    rng = np.random.default_rng(1)
    rows = Rows(random_tokens(rng, 40), 0, [3, 1, 2], all_logits=True)
    model = built(architecture)
    oracle = ReferenceBackend()
    weights = oracle.load(tiny_model(architecture, 11, "Q4_K+Q6_K")[1])
    want = oracle.prepare(model.program, weights).forward(
        TreeBatch.build([rows]), oracle.new_kv(model.program.kv, NUM_BLOCKS), True
    )
    assert want.logits is not None
    assert (model.logits(model.new_kv(), rows) - want.logits).std() < 0.05 * want.logits.std()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tree_rows_are_plain_decoding_to_the_bit(architecture: Any, path: str) -> None:
    rng = np.random.default_rng(2)
    model = built(architecture, threads=3, path=path)
    for nodes, length in ((64, 20), (23, 37), (9, 16)):
        tokens, tree = random_tokens(rng, length), random_tree(rng, nodes, VOCAB)
        blocks = rng.permutation(NUM_BLOCKS)[: -(-(length + nodes) // BLOCK_SIZE)]
        kv = model.new_kv()
        model.logits(kv, Rows(tokens[:-1], 0, blocks))
        got = model.logits(kv, Rows(tokens[-1:], length - 1, blocks, tree))
        np.testing.assert_array_equal(got, plain_rows(model, tokens, tree))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kinds", ["F32", "Q4_1+Q8_0", "BF16+Q5_0", "F16+Q5_1", "Q5_K+Q4_0"])
def test_chunks_of_any_size_are_plain_decoding_to_the_bit(kinds: str, path: str) -> None:
    rng = np.random.default_rng(3)
    model = built("qwen2", path=path, kinds=kinds)
    tokens = random_tokens(rng, 90)
    want = model.plain(tokens)
    blocks = [9, 0, 5, 61, 17, 3]
    for most in (1, 7, 40, 90):
        kv, rows, start = model.new_kv(), [], 0
        while start < len(tokens):
            end = min(start + int(rng.integers(1, most + 1)), len(tokens))
            rows.append(model.logits(kv, Rows(tokens[start:end], start, blocks, all_logits=True)))
            start = end
        np.testing.assert_array_equal(np.concatenate(rows), want)


def test_contexts_of_several_chunks_are_plain_decoding_to_the_bit() -> None:
    """Attention reduces 256 positions at a time: a prompt and a tree across three of those."""
    rng = np.random.default_rng(4)
    model = built("llama")
    tokens, tree = random_tokens(rng, 505), random_tree(rng, 24, VOCAB)
    blocks = rng.permutation(NUM_BLOCKS)[:34]
    kv = model.new_kv()
    prompt = [
        model.logits(kv, Rows(tokens[a:b], a, blocks, all_logits=True)) for a, b in ((0, 200), (200, 300), (300, 504))
    ]
    drafts = model.logits(kv, Rows(tokens[-1:], 504, blocks, tree))
    want = model.plain(tokens)
    np.testing.assert_array_equal(np.concatenate(prompt), want[:-1])
    np.testing.assert_array_equal(drafts, plain_rows(model, tokens, tree))


@pytest.mark.parametrize("rows", range(1, 41))
def test_the_number_of_rows_does_not_matter(rows: int) -> None:
    model = _shared()
    rng = np.random.default_rng(5)
    tokens = random_tokens(rng, 60)
    kv = model.new_kv()
    model.logits(kv, Rows(tokens[:20], 0, [4, 2, 8, 1]))
    got = model.logits(kv, Rows(tokens[20 : 20 + rows], 20, [4, 2, 8, 1], all_logits=True))
    np.testing.assert_array_equal(got, _shared_plain(tuple(tokens))[20 : 20 + rows])


def test_requests_of_one_batch_do_not_matter_to_each_other() -> None:
    rng = np.random.default_rng(6)
    model = _shared()
    prompts = [random_tokens(rng, count) for count in (20, 3, 33, 7)]
    trees = [random_tree(rng, 9, VOCAB), DraftTree.empty(), random_tree(rng, 12, VOCAB), DraftTree.empty()]
    blocks = np.split(rng.permutation(NUM_BLOCKS)[:16].astype(np.int32), 4)
    kv = model.new_kv()
    model.logits(kv, Rows(prompts[0][:-1], 0, blocks[0]), Rows(prompts[2][:-2], 0, blocks[2]))
    got = model.logits(
        kv,
        Rows(prompts[0][-1:], 19, blocks[0], trees[0]),
        Rows(prompts[1], 0, blocks[1], all_logits=True),
        Rows(prompts[2][-2:], 31, blocks[2], trees[2]),
        Rows(prompts[3], 0, blocks[3], logits=False),
    )
    want = [
        plain_rows(model, prompts[0], trees[0]),
        model.plain(prompts[1]),
        plain_rows(model, prompts[2], trees[2]),
    ]
    np.testing.assert_array_equal(got, np.concatenate(want))


def test_threads_and_paths_do_not_matter() -> None:
    rng = np.random.default_rng(7)
    tokens, tree = random_tokens(rng, 300), random_tree(rng, 40, VOCAB)
    found = []
    for kinds in ("F32+BF16", "Q4_K+Q6_K"):
        for path in PATHS:
            for threads in (1, 2, 3, 4):
                model = built("qwen3", threads, path, kinds)
                kv = model.new_kv()
                model.logits(kv, Rows(tokens[:-1], 0, range(30)))
                found.append(model.logits(kv, Rows(tokens[-1:], 299, range(30), tree)))
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0])
        found.clear()


@pytest.fixture(scope="module")
def smollm2_tree(smollm2_path: Path) -> tuple[LoadedModel, list[int], DraftTree, Floats]:
    """The real model, a prompt with a tree of 64 nodes, and what plain decoding gives for its rows."""
    loaded = load_model(smollm2_path)
    model = Model(NativeBackend(), loaded.config, loaded.tensors, context=256)
    rng = np.random.default_rng(9)
    vocab = loaded.config.vocab_size
    tokens, tree = rng.integers(0, vocab, 30).tolist(), random_tree(rng, 64, vocab)
    return loaded, tokens, tree, plain_rows(model, tokens, tree)


@pytest.mark.parametrize(("path", "threads"), [*((path, 2) for path in PATHS), (PATHS[0], 1), (PATHS[0], 4)])
def test_smollm2_on_trees_is_plain_decoding_to_the_bit(
    smollm2_tree: tuple[LoadedModel, list[int], DraftTree, Floats], path: str, threads: int
) -> None:
    loaded, tokens, tree, want = smollm2_tree
    model = Model(NativeBackend(threads, path), loaded.config, loaded.tensors, context=256)
    kv, blocks = model.new_kv(), [3, 1, 4, 5, 9, 2, 6]
    model.logits(kv, Rows(tokens[:-1], 0, blocks))
    np.testing.assert_array_equal(model.logits(kv, Rows(tokens[-1:], len(tokens) - 1, blocks, tree)), want)


def test_callers_on_several_threads_take_turns() -> None:
    model = _shared()
    tokens = random_tokens(np.random.default_rng(10), 60)

    def decode(_: int) -> Floats:
        return model.plain(tokens)

    with ThreadPoolExecutor(4) as callers:
        for found in callers.map(decode, range(4)):
            np.testing.assert_array_equal(found, _shared_plain(tuple(tokens)))


def test_accepted_drafts_move_to_their_positions() -> None:
    rng = np.random.default_rng(8)
    model = _shared()
    tokens, tree = random_tokens(rng, 30), random_tree(rng, 30, VOCAB)
    path = max(paths_of(tree), key=len)
    blocks = rng.permutation(NUM_BLOCKS)[:5]
    kv = model.new_kv()
    model.logits(kv, Rows(tokens, 0, blocks, tree))
    end = len(tokens)
    kv.move(blocks, [end + node for node in path], range(end, end + len(path)))
    accepted = tree.tokens[path].tolist()
    got = model.logits(kv, Rows([5], end + len(path), blocks))
    np.testing.assert_array_equal(got, model.plain([*tokens, *accepted, 5])[-1:])


def test_logits_are_given_only_when_asked_and_taps_hold_every_row() -> None:
    config, tensors = tiny_model("llama", 11, "Q8_0")
    backend, oracle = NativeBackend(2), ReferenceBackend()
    program = decoder_program(config, 64, layers=[1], taps=[0, 1])
    batch = TreeBatch.build([Rows([3, 1, 4, 1, 5], 0, [0]), Rows([9, 2], 0, [1], logits=False)])
    results = []
    for interpreter in (backend, oracle):
        executable = interpreter.prepare(program, interpreter.load(tensors))
        results.append(executable.forward(batch, interpreter.new_kv(program.kv, 2), logits=False))
    got, want = results
    assert got.logits is None
    assert got.argmax.tolist() == want.argmax.tolist()
    assert [tap.shape for tap in got.taps] == [(7, config.hidden_size)] * 2
    np.testing.assert_array_equal(got.taps[0], want.taps[0])
    assert (got.taps[1] - want.taps[1]).std() < 0.05 * want.taps[1].std()


def test_an_empty_batch_and_one_without_wanted_rows() -> None:
    model = _shared()
    kv = model.new_kv()
    assert model.logits(kv).shape == (0, VOCAB)
    assert model.logits(kv, Rows([1, 2, 3], 0, [0], logits=False)).shape == (0, VOCAB)


def test_a_broken_model_does_not_spread_nan_through_the_cache() -> None:
    config, tensors = tiny_model("llama", 11)
    norm = np.full(config.hidden_size, np.nan, "<f4")
    broken = tensors | {"layers.0.attn_norm": Tensor("F32", norm.shape, norm.view(np.uint8))}
    model = Model(NativeBackend(1), config, broken)
    kv = model.new_kv(poisoned=False)
    result = model.executable.forward(TreeBatch.build([Rows([1, 2], 0, [0])]), kv, logits=True)
    assert result.logits is not None and np.isnan(result.logits).all()
    assert result.argmax.tolist() == [-1]
    assert np.isfinite(kv.keys(0).view(np.float16)).all()


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("tokens", 1, VOCAB, "row 1: token 128 is not within 0 to 127"),
        ("tokens", 0, -1, "token -1"),
        ("positions", 2, 1024, "position 1024 is not within 0 to 1023"),
        ("positions", 2, -5, "position -5"),
        ("slots", 3, 48, "slot 48 is not within 0 to 47"),
        ("slots", 3, -1, "slot -1"),
        ("prefix_lens", 0, 2, "prefix 2"),
        ("prefix_lens", 2, 1, "do not add up"),
        ("path_slots", 0, 48, "path slot 48"),
        ("path_slots", 0, -1, "path slot -1"),
        ("path_starts", 1, 9, "path_starts do not ascend"),
        ("row_starts", 0, 1, "row_starts do not ascend from 0 to"),
        ("row_starts", 1, 99, "row_starts do not ascend"),
        ("block_tables", (0, 1), NUM_BLOCKS, "block 64 is not one of the cache's 64"),
        ("block_tables", (0, 0), -1, "block -1"),
        ("logit_rows", 0, 99, "logit row 99 is not one of the"),
    ],
)
def test_indices_that_lead_out_of_memory_are_refused(field: str, index: Any, value: int, message: str) -> None:
    model = _shared()
    tree = DraftTree(np.array([1, 2, 3], np.int32), np.array([-1, -1, 1], np.int32))
    batch = TreeBatch.build([Rows([7, 8], 0, [1, 2, 3], tree)])
    array = getattr(batch, field).copy()
    array[index] = value
    with pytest.raises(ValueError, match=message):
        model.executable.forward(replace(batch, **{field: array}), model.new_kv(), logits=False)


def test_arrays_of_other_shapes_or_types_are_refused() -> None:
    model = _shared()
    batch = TreeBatch.build([Rows([7, 8], 0, [1])])
    with pytest.raises(ValueError, match="differ in rows"):
        model.executable.forward(replace(batch, slots=batch.slots[:1]), model.new_kv(), logits=False)
    with pytest.raises(ValueError, match="differ in requests"):
        table = np.zeros((2, 1), np.int32)
        model.executable.forward(replace(batch, block_tables=table), model.new_kv(), logits=False)
    with pytest.raises(TypeError):
        wide: Any = batch.tokens.astype(np.int64)
        model.executable.forward(replace(batch, tokens=wide), model.new_kv(), logits=False)
    other = built("llama", kinds="F32")
    with pytest.raises(ValueError, match="made for another model"):
        model.executable.forward(batch, other.new_kv(), logits=False)


def test_moves_out_of_the_cache_are_refused() -> None:
    kv = _shared().new_kv()
    for blocks, src, dst in (
        ([64], [0], [1]),
        ([-1], [0], [1]),
        ([3], [16], [0]),
        ([3], [0], [-1]),
        ([3], [0, 1], [2]),
    ):
        with pytest.raises(ValueError):
            kv.move(blocks, src, dst)
    kv.move(np.array([3], np.int32), np.array([0]), [1])
    assert kv.nbytes == NUM_BLOCKS * _shared().program.kv.bytes_per_block


def test_weights_must_fit_the_program() -> None:
    config, tensors = tiny_model("qwen2", 11, "F32")
    backend = NativeBackend(1)
    program = decoder_program(config, 64)
    weights = dict(backend.load(tensors))

    def assert_refused(message: str, **changed: str) -> None:
        swapped = weights | {name.replace("__", "."): weights[other] for name, other in changed.items()}
        with pytest.raises(InputError, match=message):
            backend.prepare(program, swapped)

    assert_refused(r"layers\.1\.down has shape \[96, 64\], not \[any, 96\]", layers__1__down="layers.1.up")
    assert_refused(r"tensor embed has shape \[64, 96\], not \[128, 64\]", embed="layers.0.down")
    assert_refused(r"tensor norm has shape \[32\], not \[64\]", norm="layers.0.k_bias")
    assert_refused(r"tensor head has one dimension", head="norm")
    assert_refused(r"k_bias has shape \[32, 64\], not \[32\]", layers__0__k_bias="layers.0.k")
    del weights["layers.1.q_bias"]
    with pytest.raises(InputError, match=r"lacks the tensor layers\.1\.q_bias"):
        backend.prepare(program, weights)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ([Norm("x", "norm", 1e-5, "y")], "x is read before it is written"),
        ([Embed("embed", "x"), Norm("x", "norm", 1e-5, "wide")], "wide should be 64 wide"),
        ([Embed("embed", "x"), Head("x", "embed")], "x holds the wrong rows"),
        ([Embed("embed", "x"), Gather("x", "y"), Tap("y")], "y holds the wrong rows"),
        ([Embed("embed", "x"), Gather("x", "y"), Norm("x", "norm", 1e-5, "y")], "y is used for all and for wanted"),
        ([Embed("embed", "x"), Gather("x", "y"), Head("y", "embed"), Head("y", "embed")], "there are two heads"),
        (
            [Embed("embed", "x"), Linear("x", (Part("square"), Part("square", None, 32)), "wide")],
            "side by side in wide",
        ),
        ([Embed("embed", "x"), Linear("x", (Part("square", None, 65),), "wide")], "side by side in wide"),
        ([Embed("embed", "x"), Linear("x", (Part("square"),), "x", add=True)], "reads and writes x"),
        ([Embed("embed", "x"), Linear("x", (Part("square"),), "y", add=True)], "y is read before"),
        ([Embed("embed", "x"), GatedAct("x", "y")], "y should be 32 wide"),
    ],
)
def test_malformed_programs_are_refused(ops: list[Any], message: str) -> None:
    config, tensors = tiny_model("llama", 11, "F32")
    tensors["square"] = tiny_model("llama", 12, "F32", num_kv_heads=4)[1]["layers.0.q"]
    backend = NativeBackend(1)
    program = decoder_program(config, 64)
    broken: Program = replace(program, ops=tuple(ops), widths={"x": 64, "y": 64, "wide": 128})
    with pytest.raises(ValueError, match=message):
        backend.prepare(broken, backend.load(tensors))


def test_tensors_of_other_dimensions_are_refused() -> None:
    cube = Tensor("F32", (2, 2, 2), np.zeros(32, np.uint8))
    with pytest.raises(InputError, match="the tensor cube has 3 dimensions"):
        NativeBackend(1).load({"cube": cube})


def test_the_path_is_chosen_by_argument_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    assert NativeBackend(1).path == PATHS[0]
    monkeypatch.setenv(PATH_VARIABLE, "portable")
    assert NativeBackend(1).path == "portable"
    assert NativeBackend(1, PATHS[0]).path == PATHS[0]
    monkeypatch.setenv(PATH_VARIABLE, "sse9")
    with pytest.raises(InputError, match=f"'sse9' does not run here; this machine runs {', '.join(PATHS)}"):
        NativeBackend(1)


def test_threads_are_the_usable_cores_unless_given() -> None:
    assert NativeBackend().threads == len(os.sched_getaffinity(0))
    assert NativeBackend(3).threads == 3
    assert "3 threads" in NativeBackend(3).description
    for threads in (0, -2):
        with pytest.raises(InputError, match=f"{threads} threads were asked for; at least 1 is needed"):
            NativeBackend(threads)


def test_memory_is_read_at_some_speed() -> None:
    assert 0.1 < read_gb_per_s(2) < 10000.0


_MODELS: dict[str, Model] = {}
_PLAIN: dict[tuple[int, ...], Floats] = {}


def _shared() -> Model:
    if not _MODELS:
        _MODELS["qwen3"] = built("qwen3", threads=3)
    return _MODELS["qwen3"]


def _shared_plain(tokens: tuple[int, ...]) -> Floats:
    if tokens not in _PLAIN:
        _PLAIN[tokens] = _shared().plain(tokens)
    return _PLAIN[tokens]
