"""Verification: which drafts stand. It sees a draft tree and the target's tokens, never who drafted or how."""

from __future__ import annotations

from collections.abc import Callable

from pilotfish.tree import DraftTree, Verdict


def verify(tree: DraftTree, pick: Callable[[int], int]) -> Verdict:
    """Walk down from the root while a child carries the token that the target chose there (the `match` rule).

    `pick(node)` is the target's token after `node` (-1: after the root), a function of that row's logits and of the
    noise at its position alone; it is asked only for nodes that stand. A draft stands if it equals that token, so every
    emitted token is the one plain decoding would have chosen, whatever the tree: no draft probabilities are needed,
    and a drafter or controller may look at anything, the noise included, without changing the output's law.
    """
    node = -1
    path: list[int] = []
    tokens: list[int] = []
    while True:
        token = pick(node)
        tokens.append(token)
        child = tree.child(node, token)
        if child is None:
            is_leaf = not (tree.parents == node).any()
            return Verdict(tuple(path), tuple(tokens), bonus=is_leaf)
        path.append(child)
        node = child
