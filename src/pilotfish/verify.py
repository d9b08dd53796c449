"""Verification: which drafts stand. A rule sees a draft tree and the target's rows, never who drafted or how.

`match` is the default: the text for a seed is the text without speculation. `ratio`, `block` and `multi` keep the
target's *law* instead and accept more of a drafter that samples; the text for a seed then depends on the drafts.
`typical` keeps neither. tests/test_acceptance.py proves the laws by enumerating every draw.

What the three ratio rules need from whoever makes the trees (`match` needs none of it):

- `DraftTree.laws` are the laws of the draws themselves, after every filter; a token that was not drawn has none.
- Whether a drawn node is in the tree must not depend on the token drawn for it, nor on what was drawn after it. With
  p = (.7, .3) and q = (.5, .5), dropping the second token when it is drawn gives an output of (.85, .15): the first is
  then accepted as ever, but the second's rejections, which lead back to the first, are not made up for. So a drawn
  token that is illegal or unlikely stays; the rules reject it. What was known before the draw (budget, depth, tokens
  further up, earlier siblings) may decide freely. A node without a law may be dropped for its token. (To pass a drawn
  token without its law is allowed as well: it is then judged by p(x) alone, fewer drafts stand, and all may be pruned.)
- Draws of drafts and of `chance` are fresh in every step. `block` looks at all drafts before it decides where to
  stop, so noise that belongs to a position, and comes back in the next step's draft, is noise seen before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np

from pilotfish.tree import DraftTree, Probs, Verdict

TYPICAL_EPSILON = 0.09
TYPICAL_DELTA = 0.3


class TargetRows(Protocol):
    """What a rule may ask of the target's rows; node -1 is the root, the last committed token.

    Rules ask only for nodes that still can matter: never for one that follows a token of probability 0.
    """

    def token(self, node: int) -> int:
        """The target's own seeded choice after `node`, a function of that row and of the noise at its position."""

    def probs(self, node: int) -> Probs:
        """[vocab] the target's processed distribution after `node`; sums to 1, a point mass at temperature 0."""


# Draws an index with these probabilities [n], independent of everything drawn before, the drafts included.
Chance = Callable[[Probs], int]

Rule = Callable[[DraftTree, TargetRows, Chance], Verdict]


def match(tree: DraftTree, rows: TargetRows, chance: Chance) -> Verdict:
    """Walk down from the root while a child carries the token that the target chose there.

    A draft stands if it equals that token, so every emitted token is the one plain decoding would have chosen, whatever
    the tree: no laws and no `chance` are needed, and a drafter or controller may look at anything, the noise included.
    """
    node = -1
    path: list[int] = []
    tokens: list[int] = []
    while True:
        token = rows.token(node)
        tokens.append(token)
        child = tree.child(node, token)
        if child is None:
            return Verdict(tuple(path), tuple(tokens), bonus=not _children(tree, node))
        path.append(child)
        node = child


def ratio(tree: DraftTree, rows: TargetRows, chance: Chance) -> Verdict:
    """Speculative sampling on one path (Leviathan et al. 2023, algorithm 1; Chen et al. 2023).

    The path takes the first drawn child of each node, or its first child when none was drawn. A draft x stands with
    probability min(1, p(x) / q(x)); the first that does not is replaced by a draw from norm([p - q]+).
    """
    return _walk(tree, rows, chance, most_children=1)


def multi(tree: DraftTree, rows: TargetRows, chance: Chance) -> Verdict:
    """Recursive rejection sampling over all children of a node; on a chain it is `ratio`.

    r starts as the target's distribution p. A child x with the law q stands with probability min(1, r(x) / q(x)); if it
    does not, r becomes norm([r - q]+), which is what the node's output must still follow, and the next child is tried.
    When none stands the token is drawn from r. Two kinds of tree come out as special cases:

    - Siblings drawn without replacement (Yang et al. 2024; Sequoia, Chen et al. 2024): their laws already leave out the
      siblings before them.
    - The likeliest K - 1 tokens S, fixed, and one drawn from q' = q outside S, renormalised (in the spirit of Hu et al.
      2025). Drawn children come first: with q' zero on S, all of p(S) is left in r for the fixed children, and a
      descent into S costs nothing. Some child stands with probability p(S) + sum of min(p, q') outside S, the most that
      these drafts allow; the other order gives min(p, (1 - p(S)) q') in the sum.
    """
    return _walk(tree, rows, chance, most_children=None)


def _walk(tree: DraftTree, rows: TargetRows, chance: Chance, most_children: int | None) -> Verdict:
    path = [-1]
    while True:
        left = rows.probs(path[-1])
        children = _children(tree, path[-1])
        for child in children[:most_children]:
            if _happens(_ratio(left[tree.tokens[child]], _chance_of_draft(tree, child)), chance):
                path.append(child)
                break
            left = _normalised(_residual(left, tree, child), left)
        else:
            return _verdict(tree, path[1:], chance(left), bonus=not children)


def block(tree: DraftTree, rows: TargetRows, chance: Chance) -> Verdict:
    """Block verification of one path, that of `ratio` (Sun et al. 2025, algorithm 2): never fewer tokens on average.

    With weights w_0 = 1 and w_i = min(1, w_(i-1) p_i(x_i) / q_i(x_i)), stopping after draft i has the chance
    h_i = Z / (Z + 1 - w_i), Z = sum of [w_i p_(i+1) - q_(i+1)]+, and h_k = w_k after the last. Each i has a coin of its
    own and the *largest* i whose coin succeeds is taken, whatever the coins before it say. Then comes a draw from
    norm([w_i p_(i+1) - q_(i+1)]+), or from p_(k+1) after all k drafts.
    """
    nodes, weights = [-1], [1.0]  # the root, then the drafts
    targets: list[Probs] = []  # [i] is p_(i+1), the row of nodes[i]
    while weights[-1] > 0 and (children := _children(tree, nodes[-1])):
        targets.append(rows.probs(nodes[-1]))
        nodes.append(children[0])
        p = float(targets[-1][tree.tokens[nodes[-1]]])
        weights.append(_ratio(weights[-1] * p, _chance_of_draft(tree, nodes[-1])))
    # After a weight of 0 all weights are 0 and no coin succeeds, so the path may end there.
    if _happens(weights[-1], chance):
        return _verdict(tree, nodes[1:], chance(rows.probs(nodes[-1])), bonus=True)
    for taken in range(len(targets) - 1, -1, -1):
        residual = _residual(weights[taken] * targets[taken], tree, nodes[taken + 1])
        mass = float(residual.sum())
        rest = mass + (1 - weights[taken])
        if taken == 0 or _happens(mass / rest if rest > 0 else 1.0, chance):
            break
    return _verdict(tree, nodes[1 : taken + 1], chance(_normalised(residual, targets[taken])), bonus=False)


def typical(tree: DraftTree, rows: TargetRows, chance: Chance) -> Verdict:
    """Typical acceptance (Medusa, Cai et al. 2024, section 2.3.1). LOSSY: the output does not follow the target's law.

    A draft x stands if p(x) > min(epsilon, delta exp(-H(p))), H the entropy of p in nats, and its parent stands. The
    longest path wins, ties go to the lowest node; then comes the target's own token. At temperature 0 only the target's
    tokens stand, as with `match`.
    """
    depths = {-1: 0}  # of the nodes that stand
    rows_of: dict[int, tuple[Probs, float]] = {}  # a row and its threshold
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        if parent not in depths:
            continue
        if parent not in rows_of:
            probs = rows.probs(parent)
            rows_of[parent] = probs, _typical_threshold(probs)
        probs, threshold = rows_of[parent]
        if probs[token] > threshold:
            depths[node] = depths[parent] + 1
    last = max(depths, key=depths.__getitem__)  # the first of equals
    return _verdict(tree, tree.path(last), rows.token(last), bonus=not _children(tree, last))


def _typical_threshold(probs: Probs) -> float:
    possible = probs[probs > 0]
    entropy = -float((possible * np.log(possible)).sum())
    return min(TYPICAL_EPSILON, TYPICAL_DELTA * math.exp(-entropy))


def _children(tree: DraftTree, node: int) -> list[int]:
    """Drawn children in the order of drawing, then the fixed ones."""
    children: list[int] = np.flatnonzero(tree.parents == node).tolist()
    return sorted(children, key=lambda child: tree.law(child) is None)


def _chance_of_draft(tree: DraftTree, node: int) -> float:
    law = tree.law(node)
    return 1.0 if law is None else float(law[tree.tokens[node]])


def _ratio(p: float, q: float) -> float:
    """min(1, p / q), and 0 for p = 0 whatever q is."""
    if p < q:
        return float(p / q)
    return 1.0 if p > 0 else 0.0


def _happens(probability: float, chance: Chance) -> bool:
    """A coin. What is certain is not left to a draw: an illegal draft never stands."""
    if probability in (0, 1):
        return probability == 1
    return chance(np.array([1 - probability, probability])) == 1


def _residual(probs: Probs, tree: DraftTree, node: int) -> Probs:
    """[vocab] [probs - q]+ for the law q of `node`, not normalised."""
    law = tree.law(node)
    if law is not None:
        return np.maximum(probs - law, 0)
    rest: Probs = probs.copy()
    rest[tree.tokens[node]] = 0
    return rest


def _normalised(residual: Probs, otherwise: Probs) -> Probs:
    """The residual as a law. It is zero by rounding only, when p and q agree; then `otherwise` is as right."""
    total = float(residual.sum())
    if total == 0:
        return otherwise
    law: Probs = residual / total
    return law


def _verdict(tree: DraftTree, path: Sequence[int], last: int, bonus: bool) -> Verdict:
    return Verdict(tuple(path), (*(int(tree.tokens[node]) for node in path), int(last)), bonus)


RULES: Mapping[str, Rule] = MappingProxyType(
    {"match": match, "ratio": ratio, "block": block, "multi": multi, "typical-lossy": typical}
)
