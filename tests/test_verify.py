"""Verification by exact enumeration, in integers, and its equality with plain decoding under the real sampler.

The exact target: at a position the noise is one of `CELLS` equally likely cells, and a table says which token each cell
chooses after each prefix. All prefixes of one position share the cell, as all nodes of one position share Gumbel
noise, but nothing else is assumed of the coupling. The law of an output is then a count of noise outcomes.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enumeration import node_path, random_tree
from pilotfish.params import SamplingParams
from pilotfish.sampling import choose
from pilotfish.tree import DraftTree, Verdict
from pilotfish.verify import match

CELLS = 4


class OnlyTokens:
    """Rows of which `match` may ask nothing but the target's token."""

    def __init__(self, pick):
        self.token = pick

    def probs(self, node):
        raise AssertionError("the match rule needs no probabilities")


def no_chance(probs):
    raise AssertionError("the match rule draws nothing")


def matched(tree, pick):
    return match(tree, OnlyTokens(pick), no_chance)


def make_target(rng, vocab, length):
    """prefix -> the token that each cell chooses after it; never the same for all cells."""

    def row():
        tokens = np.concatenate([rng.choice(vocab, 2, replace=False), rng.integers(0, vocab, CELLS - 2)])
        return tuple(rng.permutation(tokens).tolist())

    return {prefix: row() for depth in range(length) for prefix in itertools.product(range(vocab), repeat=depth)}


def plain_law(target, vocab, length):
    """Output -> number of noise outcomes, from the product of the conditional laws alone."""
    law = Counter()
    for output in itertools.product(range(vocab), repeat=length):
        count = 1
        for position, token in enumerate(output):
            count *= target[output[:position]].count(token)
        if count:
            law[output] = count
    return law


def row_pick(target, cells, prefix, tree):
    """The target's token after each node, with the noise of that node's position."""

    def pick(node):
        context = prefix + node_path(tree, node)
        return target[context][cells[len(context)]] if len(context) < len(cells) else 0

    return pick


def speculative_law(target, length, drafter, rule, rows=row_pick):
    law = Counter()
    for cells in itertools.product(range(CELLS), repeat=length):
        output = ()
        while len(output) < length:
            tree = drafter(cells, output)
            verdict = rule(tree, rows(target, cells, output, tree))
            output += verdict.tokens
        law[output[:length]] += 1
    return law


# Drafters: functions of the whole noise outcome and of the prefix, so they may cheat in every way there is.


def true_chain(target, cells, prefix, depth):
    chain = ()
    while len(chain) < depth and len(prefix + chain) < len(cells):
        chain += (target[prefix + chain][cells[len(prefix + chain)]],)
    return chain


def all_drafters(target, vocab, depth):
    def oracle(cells, prefix):
        return DraftTree.chain(true_chain(target, cells, prefix, depth))

    def liar(cells, prefix):
        return DraftTree.chain([(token + 1) % vocab for token in true_chain(target, cells, prefix, depth)])

    def liar_at_the_end(cells, prefix):
        chain = true_chain(target, cells, prefix, depth)
        return DraftTree.chain([*chain[:-1], (chain[-1] + 1) % vocab])

    def constant(cells, prefix):
        return DraftTree.chain([0, vocab - 1, 0][:depth])

    def nothing(cells, prefix):
        return DraftTree.empty()

    def full(cells, prefix):
        contexts = [path for level in range(1, depth + 1) for path in itertools.product(range(vocab), repeat=level)]
        index = {(): -1} | {path: node for node, path in enumerate(contexts)}
        tokens = [path[-1] for path in contexts]
        return DraftTree(np.array(tokens, np.int32), np.array([index[path[:-1]] for path in contexts], np.int32))

    def random_of_prefix(cells, prefix):
        return random_tree(np.random.default_rng([1, *prefix]), vocab, 6, depth)

    def random_of_noise(cells, prefix):
        return random_tree(np.random.default_rng([2, *cells, *prefix]), vocab, 6, depth)

    def helps_only_token_zero(cells, prefix):
        # What biases a ratio rule: drafts are kept or cut by looking at the target's own outcome.
        chain = true_chain(target, cells, prefix, depth)
        return DraftTree.chain(chain if chain[0] == 0 else [(chain[0] + 1) % vocab])

    def budget_of_noise(cells, prefix):
        return random_of_prefix(cells, prefix).first(cells[len(prefix)])

    return [
        oracle,
        liar,
        liar_at_the_end,
        constant,
        nothing,
        full,
        random_of_prefix,
        random_of_noise,
        helps_only_token_zero,
        budget_of_noise,
    ]


SIZES = [(2, 3), (3, 2), (3, 3), (4, 2), (4, 3)]  # vocabulary, depth


def deviations(vocab, depth, rule, rows=row_pick):
    """Total variation between the law with speculation and plain decoding's, one drafter after the other."""
    length = depth + 1
    target = make_target(np.random.default_rng([vocab, depth]), vocab, length)
    plain = plain_law(target, vocab, length)
    outcomes = CELLS**length
    assert sum(plain.values()) == outcomes
    for drafter in all_drafters(target, vocab, depth):
        law = speculative_law(target, length, drafter, rule, rows)
        yield sum(abs(law[output] - plain[output]) for output in law.keys() | plain.keys()) / 2 / outcomes


@pytest.mark.parametrize(("vocab", "depth"), SIZES)
def test_the_law_is_exactly_plain_decodings(vocab, depth):
    found = list(deviations(vocab, depth, matched))
    assert found == [0.0] * 10


# Rules that are wrong in ways people have been wrong. Each must fail the very check above.


def takes_an_unmatched_sibling(tree, pick):
    """Accepts some child when there is one, matched or not."""
    path, tokens, node = [], [], -1
    while True:
        children = np.flatnonzero(tree.parents == node)
        if not len(children):
            return Verdict(tuple(path), (*tokens, pick(node)), True)
        token = pick(node)
        child = tree.child(node, token)
        node = int(children[0]) if child is None else child
        path.append(node)
        tokens.append(int(tree.tokens[node]))


def descends_into_the_wrong_child(tree, pick):
    """Emits the matched token but goes on from the last sibling's row."""
    path, tokens, node = [], [], -1
    while True:
        tokens.append(pick(node))
        child = tree.child(node, tokens[-1])
        if child is None:
            return Verdict(tuple(path), tuple(tokens), False)
        node = int(np.flatnonzero(tree.parents == tree.parents[child])[-1])
        path.append(node)


def takes_the_bonus_from_the_parents_row(tree, pick):
    verdict = matched(tree, pick)
    if not verdict.path:
        return verdict
    parent = int(tree.parents[verdict.path[-1]])
    return Verdict(verdict.path, (*verdict.tokens[:-1], pick(parent)), verdict.bonus)


def takes_the_bonus_from_the_last_row(tree, pick):
    verdict = matched(tree, pick)
    return Verdict(verdict.path, (*verdict.tokens[:-1], pick(len(tree) - 1)), verdict.bonus)


def excludes_the_rejected_drafts(tree, pick):
    """Draws the recovered token from what no draft covered, as a ratio rule does: the match rule needs no residual."""
    verdict = matched(tree, pick)
    siblings = set(tree.tokens[tree.parents == (verdict.path[-1] if verdict.path else -1)].tolist())
    if not siblings:
        return verdict
    left = [token for token in range(4) if token not in siblings]
    return Verdict(verdict.path, (*verdict.tokens[:-1], left[0] if left else verdict.tokens[-1]), False)


def resamples_the_accepted_token(tree, pick):
    """Having accepted, emits the draft of the first sibling in its place (a draw from q instead of p)."""
    verdict = matched(tree, pick)
    first = [int(tree.tokens[np.flatnonzero(tree.parents == tree.parents[node])[0]]) for node in verdict.path]
    return Verdict(verdict.path, (*first, verdict.tokens[-1]), verdict.bonus)


def prefers_the_longest_branch(tree, pick):
    """Takes the deepest node that its own parent's row would choose, although the path to it does not stand."""
    standing = [node for node in range(len(tree)) if pick(int(tree.parents[node])) == tree.tokens[node]]
    if not standing:
        return matched(tree, pick)
    deepest = max(standing, key=lambda node: len(node_path(tree, node)))
    return Verdict((deepest,), (*node_path(tree, deepest), pick(deepest)), True)


BROKEN_RULES = [
    takes_an_unmatched_sibling,
    descends_into_the_wrong_child,
    takes_the_bonus_from_the_parents_row,
    takes_the_bonus_from_the_last_row,
    excludes_the_rejected_drafts,
    resamples_the_accepted_token,
    prefers_the_longest_branch,
]


def noise_of_the_parents_position(target, cells, prefix, tree):
    def pick(node):
        context = prefix + node_path(tree, node)
        return target[context][cells[max(0, len(context) - 1)]] if len(context) < len(cells) else 0

    return pick


def noise_of_the_row_in_the_tree(target, cells, prefix, tree):
    def pick(node):
        context = prefix + node_path(tree, node)
        return target[context][cells[(len(prefix) + node + 1) % len(cells)]] if len(context) < len(cells) else 0

    return pick


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_the_check_catches_broken_rules(rule):
    assert any(deviation > 0.01 for deviation in deviations(3, 2, rule))


@pytest.mark.parametrize("rows", [noise_of_the_parents_position, noise_of_the_row_in_the_tree])
def test_the_check_catches_misplaced_noise(rows):
    assert any(deviation > 0.01 for deviation in deviations(3, 2, matched, rows))


# The real sampler: equality token for token, not only in law.


@st.composite
def draft_trees(draw, vocab):
    seed = draw(st.integers(0, 2**32 - 1))
    return random_tree(np.random.default_rng(seed), vocab, draw(st.integers(0, 24)), draw(st.integers(1, 5)))


def grafted(tree, chain):
    """The tree with a path of these tokens, so that deep acceptance is common."""
    tokens, parents, node = tree.tokens.tolist(), tree.parents.tolist(), -1
    for token in chain:
        child = tree.child(node, token) if node < len(tree) else None
        if child is None:
            child = len(tokens)
            tokens.append(token)
            parents.append(node)
        node = child
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32))


@settings(max_examples=60, deadline=None)
@given(
    salt=st.integers(0, 2**32 - 1),
    seed=st.integers(0, 2**64 - 1),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        top_k=st.sampled_from([0, 3]),
        top_p=st.sampled_from([1.0, 0.8]),
        min_p=st.sampled_from([0.0, 0.1]),
    ),
    data=st.data(),
)
def test_tokens_equal_plain_decoding(salt, seed, params, data):
    vocab, length = 6, 12

    def target(tokens):
        # Halves, so that ties are common.
        logits = np.random.default_rng([salt, *tokens]).normal(0, 2, vocab)
        return (np.round(logits * 2) / 2).astype(np.float32)

    def token_after(tokens):
        return choose(target(tokens), params, seed, len(tokens))

    plain = [0]
    while len(plain) < length:
        plain.append(token_after(plain))

    tokens = [0]
    while len(tokens) < length:
        tree = data.draw(draft_trees(vocab))
        right = data.draw(st.integers(0, 4))
        tree = grafted(tree, plain[len(tokens) : len(tokens) + right])
        tree.check(vocab)
        committed = list(tokens)
        verdict = matched(tree, lambda node, tree=tree, seen=committed: token_after(seen + list(node_path(tree, node))))
        assert len(verdict.tokens) > min(right, length - len(tokens))
        tokens += verdict.tokens
    assert tokens[:length] == plain


# What a verdict says.

TREE = DraftTree(np.array([1, 2, 3, 1, 2], np.int32), np.array([-1, -1, 0, 0, 3], np.int32))


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({-1: 9}, Verdict((), (9,), False)),
        ({-1: 2, 1: 7}, Verdict((1,), (2, 7), True)),
        ({-1: 1, 0: 2}, Verdict((0,), (1, 2), False)),
        ({-1: 1, 0: 3, 2: 1}, Verdict((0, 2), (1, 3, 1), True)),
        ({-1: 1, 0: 1, 3: 1}, Verdict((0, 3), (1, 1, 1), False)),
        ({-1: 1, 0: 1, 3: 2, 4: 2}, Verdict((0, 3, 4), (1, 1, 2, 2), True)),
    ],
)
def test_verdicts_and_that_only_standing_rows_are_asked(choices, expected):
    asked = []

    def pick(node):
        asked.append(node)
        return choices[node]

    assert matched(TREE, pick) == expected
    assert asked == [-1, *expected.path] == list(choices)


def test_no_drafts_is_plain_decoding():
    assert matched(DraftTree.empty(), {-1: 5}.__getitem__) == Verdict((), (5,), True)
