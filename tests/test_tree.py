"""Draft trees and the layout of tree batches."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pilotfish.tree import DraftTree, Rows, TreeBatch

# root -> 5 -> (6 -> 8, 7), as nodes 0, (1 -> 3), 2
TREE = DraftTree(np.array([5, 6, 7, 8], np.int32), np.array([-1, 0, 0, 1], np.int32))


def test_tree() -> None:
    assert TREE.depths().tolist() == [1, 2, 2, 3]
    assert (TREE.child(-1, 5), TREE.child(0, 7), TREE.child(1, 8), TREE.child(2, 8)) == (0, 2, 3, None)
    assert len(TREE.first(2)) == 2 and TREE.first(9) is TREE
    assert DraftTree.chain([3, 4]).parents.tolist() == [-1, 0]
    TREE.check(9)
    DraftTree.empty().check(1)


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([9], [-1], "outside the vocabulary"),
        ([-1], [-1], "outside the vocabulary"),
        ([1], [0], "before its child"),
        ([1, 2], [-1, -2], "before its child"),
        ([1, 1], [-1, -1], "same token"),
        ([1, 2], [-1], "one length"),
    ],
)
def test_bad_trees(tokens: list[int], parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32)).check(9)


LAWS = (np.eye(9)[5], None, np.full(9, 1 / 9), None)
DRAWN = DraftTree(TREE.tokens, TREE.parents, "test", LAWS)


def test_laws_go_with_their_nodes() -> None:
    assert DRAWN.law(0) is LAWS[0] and DRAWN.law(1) is None and TREE.law(0) is None
    assert DRAWN.first(2).laws == LAWS[:2] and TREE.first(2).laws == ()
    DRAWN.check(9)
    DRAWN.first(0).check(9)


@pytest.mark.parametrize(
    ("keep", "nodes", "parents"),
    [
        ([1, 1, 1, 1], [0, 1, 2, 3], [-1, 0, 0, 1]),
        ([1, 0, 1, 1], [0, 2], [-1, 0]),  # node 3 stood under node 1
        ([1, 1, 0, 1], [0, 1, 3], [-1, 0, 1]),
        ([0, 1, 1, 1], [], []),
        ([1, 0, 0, 0], [0], [-1]),
    ],
)
def test_select(keep: list[bool], nodes: list[int], parents: list[int]) -> None:
    selected = DRAWN.select(keep)
    assert selected.tokens.tolist() == DRAWN.tokens[nodes].tolist()
    assert selected.parents.tolist() == parents and selected.parents.dtype == np.int32
    assert [law is LAWS[node] for node, law in zip(nodes, selected.laws, strict=True)] == [True] * len(nodes)
    assert selected.drafter == "test" and TREE.select(keep).laws == ()
    selected.check(9)


def test_select_renumbers_parents() -> None:
    forest = DraftTree(np.array([1, 2, 3, 4], np.int32), np.array([-1, -1, 1, 2], np.int32))
    selected = forest.select([False, True, True, True])
    assert selected.tokens.tolist() == [2, 3, 4] and selected.parents.tolist() == [-1, 0, 1]


def test_select_needs_a_choice_for_each_node() -> None:
    with pytest.raises(ValueError, match="3 choices for a tree of 4"):
        TREE.select([True] * 3)


def a_law(*probs: float) -> NDArray[np.float64]:
    return np.array(probs, np.float64)


@pytest.mark.parametrize(
    ("laws", "message"),
    [
        ([a_law(0.5, 0.5, 0)], "1 laws for 2 nodes"),
        ([a_law(0.5, 0.5, 0)] * 3, "3 laws for 2 nodes"),
        ([a_law(0.5, 0.5), None], "3 float64"),
        ([a_law(0.5, 0.5, 0).reshape(1, 3), None], "3 float64"),
        ([a_law(0.5, 0.5, 0).astype(np.float32), None], "3 float64"),
        ([[0.5, 0.5, 0.0], None], "3 float64"),
        ([a_law(0.5, np.nan, 0.5), None], "the sum 1"),
        ([a_law(0.5, np.inf, 0.5), None], "the sum 1"),
        ([a_law(1.5, -0.5, 0), None], "no negative"),
        ([a_law(0.5, 0.5, 2e-6), None], "the sum 1"),
        ([a_law(0.5, 0.5 - 2e-6, 0), None], "the sum 1"),
        ([a_law(0, 0, 0), None], "the sum 1"),
        ([a_law(0, 0.5, 0.5), None], "probability 0"),
        ([None, a_law(1, 0, 0)], "probability 0"),
        ([a_law(0.5, 0.5, 0), a_law(0.5, 0.5, 0)], "drawn before it"),
    ],
)
def test_bad_laws(laws: list[NDArray[np.float64] | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftTree(np.array([0, 1], np.int32), np.array([-1, -1], np.int32), laws=tuple(laws)).check(3)


def test_good_laws() -> None:
    even, rest = a_law(0.5, 0.5 + 5e-7, 0), a_law(0, 1, 0)
    for parents, laws in (([-1, -1], [even, rest]), ([-1, 0], [even, even]), ([-1, -1], [None, even])):
        DraftTree(np.array([0, 1], np.int32), np.array(parents, np.int32), laws=tuple(laws)).check(3)
    with pytest.raises(ValueError, match="1 laws for 0 nodes"):
        DraftTree(TREE.tokens[:0], TREE.parents[:0], laws=(None,)).check(3)


def test_batch_layout() -> None:
    chunk = Rows([1, 2, 3], 0, [4], logits=False)
    tree = Rows([4], 17, [7, 2], TREE)
    batch = TreeBatch.build([chunk, tree])
    assert batch.num_rows == 8 and batch.num_requests == 2
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert batch.row_starts.tolist() == [0, 3, 8]
    assert batch.positions.tolist() == [0, 1, 2, 17, 18, 19, 19, 20]
    assert batch.slots.tolist() == [0, 1, 2, 17, 18, 19, 20, 21]
    # Nodes 0 and 1 lie in their positions; node 2 sees slots 18, 20 and node 3 slots 18, 19, 21 after position 17.
    assert batch.prefix_lens.tolist() == [1, 2, 3, 18, 19, 20, 18, 18]
    assert batch.path_starts.tolist() == [0, 0, 0, 0, 0, 0, 0, 2, 5]
    assert batch.path_slots.tolist() == [18, 20, 18, 19, 21]
    assert batch.block_tables.tolist() == [[4, 0], [7, 2]]
    assert batch.logit_rows.tolist() == [3, 4, 5, 6, 7]
    assert batch.logit_starts.tolist() == [0, 0, 5]


def test_every_row_sees_its_own_history() -> None:
    batch = TreeBatch.build([Rows([4], 17, [7, 2], TREE, all_logits=True)])
    for row in range(batch.num_rows):
        path = batch.path_slots[batch.path_starts[row] : batch.path_starts[row + 1]].tolist()
        seen = [*range(batch.prefix_lens[row]), *path]
        assert len(seen) == batch.positions[row] + 1
        assert seen[-1] == batch.slots[row]
