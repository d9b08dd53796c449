"""Draft trees and the layout of tree batches."""

from __future__ import annotations

import numpy as np
import pytest

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
