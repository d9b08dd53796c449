"""The target's rows for the draft tree of one request: processed when asked for, each with its own history."""

from __future__ import annotations

from dataclasses import dataclass

from pilotfish.backends.native import choose, log_probabilities
from pilotfish.errors import PilotfishError
from pilotfish.history import History
from pilotfish.params import SamplingParams
from pilotfish.program import Result
from pilotfish.request import TokenLogprob
from pilotfish.sampling import Logits, Scores, probabilities
from pilotfish.tree import DraftTree


@dataclass
class NodeRows:
    """What a rule of verify.py may ask; node -1 is the root, the last committed token."""

    result: Result
    root: int  # where the root's row lies in the result; the nodes' follow
    tree: DraftTree
    params: SamplingParams
    seed: int
    first: int  # the position of the token that the root's row chooses
    history: History | None  # None: nothing changes the logits

    def __post_init__(self) -> None:
        self._probs: dict[int, Scores] = {}
        self._depths = self.tree.depths()

    def token(self, node: int) -> int:
        """The target's own token after `node`. Raises RequestError, and PilotfishError where logits are not finite."""
        if self.history is None and self.params.temperature == 0:
            token = int(self.result.argmax[self.root + 1 + node])
            if token < 0:
                raise PilotfishError("the target gave a logit that is not finite; its weights may be damaged")
            return token
        position = self.first if node < 0 else self.first + int(self._depths[node])
        return choose(self._processed(node), self.params, self.seed, position)

    def probs(self, node: int) -> Scores:
        """[vocab] the target's distribution after `node`. Raises what `token` raises."""
        if node not in self._probs:
            self._probs[node] = probabilities(self._processed(node), self.params)
        return self._probs[node]

    def logits(self, node: int) -> Logits:
        """[vocab] the row as the model gave it."""
        assert self.result.logits is not None
        row: Logits = self.result.logits[self.root + 1 + node]
        return row

    def logprobs(self, node: int, token: int) -> TokenLogprob:
        """What the model itself thought of `token` after `node`."""
        assert self.params.logprobs is not None
        return token_logprob(self.logits(node), token, self.params.logprobs)

    def _processed(self, node: int) -> Logits:
        if self.history is None:
            return self.logits(node)
        self.history.walk(self.tree.tokens[self.tree.path(node)].tolist())
        return self.history.process(self.logits(node))


def cut_illegal(tree: DraftTree, history: History, exact_law: bool) -> DraftTree:
    """The tree without drafts that masks would refuse, so that they cost no row.

    With `exact_law` (the ratio rules) a drawn draft stays, to be refused: whether a draw is refused must not depend on
    what was drawn (verify.py). Nothing below it stays.
    """
    if len(tree) == 0:
        return tree
    legal = {-1}
    for leaf in set(range(len(tree))).difference(tree.parents.tolist()):  # each branch is walked once
        path = tree.path(leaf)
        legal.update(path[: history.legal(tree.tokens[path].tolist())])
    keep = [
        node in legal or (exact_law and tree.law(node) is not None and int(tree.parents[node]) in legal)
        for node in range(len(tree))
    ]
    return tree if all(keep) else tree.select(keep)


def token_logprob(logits: Logits, token: int, top: int) -> TokenLogprob:
    """The log-probability of `token` in a row [vocab], and those of the `top` likeliest."""
    normaliser, ids = log_probabilities(logits, top)
    likeliest = tuple((int(id), float(logits[id]) - normaliser) for id in ids)
    return TokenLogprob(token, float(logits[token]) - normaliser, likeliest)
