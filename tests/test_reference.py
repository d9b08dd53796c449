"""The reference interpreter: against transformers' logits, and tree batches against plain decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pilotfish.backends.reference import ReferenceBackend, ReferenceExecutable, ReferenceKV
from pilotfish.config import ModelConfig
from pilotfish.loaders import load_model
from pilotfish.models.decoder import decoder_program
from pilotfish.program import BLOCK_SIZE, Floats
from pilotfish.quant import Tensor
from pilotfish.tree import DraftTree, Rows, TreeBatch
from tiny import GOLDEN_CASES, golden_model, random_tree, tiny_model

DATA = Path(__file__).parent / "data"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
NUM_BLOCKS = 24
BACKEND = ReferenceBackend()


class Model:
    """A tiny model bound to the reference interpreter."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
        self.config = config
        self.weights = BACKEND.load(tensors)
        self.full = self.view()

    def view(self, layers: Sequence[int] | None = None, taps: Sequence[int] = ()) -> ReferenceExecutable:
        return BACKEND.prepare(decoder_program(self.config, self.config.context_length, layers, taps), self.weights)

    def new_kv(self) -> ReferenceKV:
        return BACKEND.new_kv(self.full.program.kv, NUM_BLOCKS)

    def logits(self, kv: ReferenceKV, *requests: Rows) -> Floats:
        logits = self.full.forward(TreeBatch.build(requests), kv, logits=True).logits
        assert logits is not None and logits.dtype == np.float32
        return logits

    def plain(self, tokens: Sequence[int], kv: ReferenceKV | None = None, start: int = 0) -> Floats:
        """Logits [tokens, vocab] of decoding one token at a time, after `start` tokens in `kv`."""
        kv = kv or self.new_kv()
        blocks = range(-(-(start + len(tokens)) // BLOCK_SIZE))
        return np.concatenate([self.logits(kv, Rows([token], start + at, blocks)) for at, token in enumerate(tokens)])

    def assert_close(self, got: Floats, want: Floats) -> None:
        """Equal but for the order in which BLAS adds.

        A dot product of length K is off by at most about K u of its sum of magnitudes (u = 2^-24), and 6 products a
        layer (qkv, scores, mix, o, gate_up, down) and the head follow one another. Two orders differ by twice that.
        """
        assert got.shape == want.shape
        config = self.config
        longest = max(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
        bound = 2 * (6 * config.num_layers + 1) * longest * 2.0**-24
        error = np.abs(got - want).max(axis=1) / np.abs(want).max(axis=1)
        assert error.max() < bound


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(*tiny_model(request.param, seed=11, num_layers=3))


def random_tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, 128, count).tolist()


def paths_of(tree: DraftTree) -> list[list[int]]:
    """The nodes from the root down to each node."""
    paths: list[list[int]] = []
    for node, parent in enumerate(tree.parents.tolist()):
        paths.append(([] if parent < 0 else paths[parent]) + [node])
    return paths


def plain_rows(model: Model, tokens: list[int], tree: DraftTree) -> Floats:
    """What plain decoding gives for the last of `tokens` and for each node of the tree."""
    kv = model.new_kv()
    rows = [model.plain(tokens, kv)[-1]]
    rows += [model.plain(tree.tokens[path].tolist(), kv, len(tokens))[-1] for path in paths_of(tree)]
    return np.stack(rows)


@pytest.mark.parametrize("seed", range(3))
def test_tree_rows_equal_plain_decoding_of_their_paths(model: Model, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = random_tokens(rng, 14 + 5 * seed)
    tree = random_tree(rng, 17, 128)
    kv = model.new_kv()
    model.logits(kv, Rows(tokens[:-1], 0, [7, 2, 9, 4]))
    got = model.logits(kv, Rows(tokens[-1:], len(tokens) - 1, [7, 2, 9, 4], tree))
    model.assert_close(got, plain_rows(model, tokens, tree))


def test_chunked_prefill_equals_whole_prefill_and_plain_decoding(model: Model) -> None:
    tokens = random_tokens(np.random.default_rng(3), 41)
    want = model.plain(tokens)
    blocks = [5, 1, 8]
    model.assert_close(model.logits(model.new_kv(), Rows(tokens, 0, blocks, all_logits=True)), want)
    kv = model.new_kv()
    chunks = [(0, 16), (16, 17), (17, 38), (38, 41)]
    rows = [model.logits(kv, Rows(tokens[a:b], a, blocks, all_logits=True)) for a, b in chunks]
    model.assert_close(np.concatenate(rows), want)


def test_requests_of_one_batch_do_not_meet(model: Model) -> None:
    rng = np.random.default_rng(4)
    blocks = np.split(rng.permutation(NUM_BLOCKS)[:12].astype(np.int32), 4)
    prompts = [random_tokens(rng, count) for count in (20, 3, 33, 7)]
    trees = [random_tree(rng, 9, 128), DraftTree.empty(), random_tree(rng, 12, 128), DraftTree.empty()]
    kv = model.new_kv()
    # Two requests are in mid-flight, one prefills and wants every row, one prefills without its last token.
    model.logits(kv, Rows(prompts[0][:-1], 0, blocks[0]), Rows(prompts[2][:-2], 0, blocks[2]))
    batch = TreeBatch.build(
        [
            Rows(prompts[0][-1:], 19, blocks[0], trees[0]),
            Rows(prompts[1], 0, blocks[1], all_logits=True),
            Rows(prompts[2][-2:], 31, blocks[2], trees[2]),
            Rows(prompts[3], 0, blocks[3], logits=False),
        ]
    )
    result = model.full.forward(batch, kv, logits=True)
    assert result.logits is not None
    want = [plain_rows(model, prompts[0], trees[0]), model.plain(prompts[1]), plain_rows(model, prompts[2], trees[2])]
    assert np.diff(batch.logit_starts).tolist() == [len(rows) for rows in want] + [0]
    model.assert_close(result.logits, np.concatenate(want))
    assert result.argmax.tolist() == result.logits.argmax(axis=1).tolist()
    # The request that wanted no logits has its KV all the same.
    model.assert_close(model.logits(kv, Rows([5], 7, blocks[3])), model.plain([*prompts[3], 5])[-1:])


def test_slots_that_no_row_sees_may_hold_anything(model: Model) -> None:
    rng = np.random.default_rng(5)
    tokens = random_tokens(rng, 21)
    tree = random_tree(rng, 11, 128)
    rows = Rows(tokens[-1:], 20, [3, 0, 6], tree)
    kv = model.new_kv()
    model.logits(kv, Rows(tokens[:-1], 0, rows.blocks))
    clean = model.logits(kv, rows)
    for poison in (np.nan, np.inf, 1e30):
        for side in (kv.keys, kv.values):
            slots = side.reshape(side.shape[0], NUM_BLOCKS, BLOCK_SIZE, -1)
            slots[:, [block for block in range(NUM_BLOCKS) if block not in rows.blocks]] = poison
            slots[:, 0, 4:] = poison  # from the last token's slot on: what the rows themselves are about to write
            slots[:, 6] = poison
        assert (model.logits(kv, rows) == clean).all()


def test_paths_may_leave_holes_between_slots(model: Model) -> None:
    tokens = random_tokens(np.random.default_rng(9), 5)
    kv = model.new_kv()
    model.logits(kv, Rows(tokens[:3], 0, [2]))

    def node(token: int, position: int, path: list[int]) -> Floats:
        ints = [[token], [position], path[-1:], [3], [0, len(path)], path, [0, 1], [[2]], [0], [0, 1]]
        batch = TreeBatch(*(np.array(values, np.int32) for values in ints))
        logits = model.full.forward(batch, kv, logits=True).logits
        assert logits is not None
        return logits

    # Slots 3, 4 and 6 to 8 were never written: they are NaN.
    got = [node(tokens[3], 3, [5]), node(tokens[4], 4, [5, 9])]
    model.assert_close(np.concatenate(got), model.plain(tokens)[3:])


def test_moving_the_accepted_path_gives_the_kv_of_plain_decoding(model: Model) -> None:
    rng = np.random.default_rng(6)
    tokens = random_tokens(rng, 13)
    tree = random_tree(rng, 20, 128)
    path = max(paths_of(tree), key=lambda nodes: (nodes != list(range(len(nodes))), len(nodes)))
    assert path != list(range(len(path))) and len(path) >= 3, "the path must leave its slots for this test to mean much"
    blocks = [4, 2, 11]
    kv = model.new_kv()
    model.logits(kv, Rows(tokens, 0, blocks, tree))
    kv.move(blocks, [len(tokens) + node for node in path], range(len(tokens), len(tokens) + len(path)))
    accepted = tokens + tree.tokens[path].tolist()
    model.assert_close(model.logits(kv, Rows([17], len(accepted), blocks)), model.plain([*accepted, 17])[-1:])


def test_move_copies_in_order() -> None:
    kv = Model(*tiny_model("llama", seed=1)).new_kv()
    kv.keys[...] = np.arange(NUM_BLOCKS * BLOCK_SIZE)[:, None, None]
    kv.values[...] = -kv.keys
    kv.move([9, 3], [17, 16], [16, 0])
    moved = kv.keys[:, :, 0, 0]
    assert (moved[:, [3 * BLOCK_SIZE, 9 * BLOCK_SIZE]] == 3 * BLOCK_SIZE + 1).all()
    assert (np.delete(moved, [3 * BLOCK_SIZE, 9 * BLOCK_SIZE], axis=1)[:, :40] == np.arange(40)).all()
    assert (kv.values == -kv.keys).all()
    assert kv.nbytes == 2 * 4 * kv.keys.size


def test_layer_skipped_view_is_the_model_of_those_layers() -> None:
    config, tensors = tiny_model("qwen3", seed=12, num_layers=4)
    model = Model(config, tensors)
    kept = [0, 2, 3]
    renamed = {name: tensor for name, tensor in tensors.items() if not name.startswith("layers.")}
    for new, old in enumerate(kept):
        renamed |= {
            name.replace(f"layers.{old}.", f"layers.{new}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"layers.{old}.")
        }
    small = Model(*tiny_model("qwen3", seed=0, num_layers=3))
    small.weights = BACKEND.load(renamed)
    small.full = small.view()

    tokens = random_tokens(np.random.default_rng(7), 19)
    kv = model.new_kv()
    batch = TreeBatch.build([Rows(tokens, 0, [1, 5], all_logits=True)])
    got = model.view(layers=kept).forward(batch, kv, logits=True).logits
    assert got is not None
    small.assert_close(got, small.plain(tokens))
    # Same KV layers as the full model: the skipped one stays unwritten, and layer 0 is exactly the target's.
    assert np.isnan(kv.keys[1]).all() and np.isfinite(kv.keys[kept][:, BLOCK_SIZE : 2 * BLOCK_SIZE]).all()
    full = model.new_kv()
    model.full.forward(batch, full, logits=False)
    assert np.array_equal(full.keys[0], kv.keys[0], equal_nan=True)


def test_taps_are_the_residual_stream_of_every_row(model: Model) -> None:
    tokens = random_tokens(np.random.default_rng(8), 12)
    batch = TreeBatch.build([Rows(tokens, 0, [0])])
    result = model.view(taps=(0, 2, 3)).forward(batch, model.new_kv(), logits=True)
    first, middle, last = result.taps
    weights = model.weights
    assert (first == np.asarray(weights["embed"])[tokens]).all()
    assert (middle == model.view(layers=[0, 1], taps=(2,)).forward(batch, model.new_kv(), logits=False).taps[0]).all()
    normed = last / np.sqrt((last**2).mean(axis=1, keepdims=True) + model.config.norm_eps) * weights["norm"]
    assert result.logits is not None
    model.assert_close(result.logits, (normed @ np.asarray(weights["head"]).T)[-1:])


def test_logits_only_when_asked_and_ties_go_to_the_lowest_id() -> None:
    config, tensors = tiny_model("llama", seed=13)
    head = tensors["head"]
    tensors["head"] = Tensor(head.kind, head.shape, np.zeros_like(head.data))
    model = Model(config, tensors)
    kv = model.new_kv()
    result = model.full.forward(TreeBatch.build([Rows([1, 2, 3], 0, [0], all_logits=True)]), kv, logits=False)
    assert result.logits is None
    assert result.argmax.tolist() == [0, 0, 0]
    none = model.full.forward(TreeBatch.build([Rows([4], 3, [0], logits=False)]), kv, logits=True)
    assert none.argmax.shape == (0,) and none.logits is not None and none.logits.shape == (0, config.vocab_size)


def relative_error(ours: Floats, theirs: Floats, largest: Floats) -> float:
    return float((np.abs(ours - theirs).max(axis=1) / largest).max())


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_tiny_logits_are_those_of_transformers(case: str) -> None:
    with np.load(DATA / "logits_tiny.npz") as golden:
        tokens, want = golden[f"{case}/tokens"].tolist(), golden[f"{case}/logits"]
    model = Model(*golden_model(case))
    got = model.logits(model.new_kv(), Rows(tokens, 0, range(3), all_logits=True))
    assert want.std() > 1.0 and len(set(want.argmax(axis=1).tolist())) > 10
    assert relative_error(got, want, np.abs(want).max(axis=1)) < 1e-4


def test_smollm2_logits_are_those_of_transformers(smollm2_path: Path) -> None:
    loaded = load_model(smollm2_path)
    model = Model(loaded.config, dict(loaded.tensors))
    with np.load(DATA / "logits_smollm2.npz") as golden:
        assert {"torch", "transformers", "seed"} <= json.loads(str(golden["record"])).keys()
        tokens = golden["tokens"].tolist()
        logits = model.logits(model.new_kv(), Rows(tokens, 0, range(4), all_logits=True))
        rows, largest = golden["rows"], golden["largest"]
        columns, top = golden["columns"], golden["top_ids"]
        assert relative_error(logits[rows][:, columns], golden["column_logits"], largest) < 1e-4
        assert relative_error(np.take_along_axis(logits[rows], top, axis=1), golden["top_logits"], largest) < 1e-4
        assert relative_error(np.abs(logits[rows]).max(axis=1)[:, None], largest[:, None], largest) < 1e-4
        assert (logits.argmax(axis=1) == golden["argmax"]).all()
