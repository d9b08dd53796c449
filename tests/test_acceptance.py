"""The laws of the ratio rules, exactly: every draw of drafts, coins and tokens is enumerated on small vocabularies."""

import itertools

import numpy as np
import pytest

from enumeration import (
    EXACT,
    PAIRS,
    TableRows,
    by_level,
    changed,
    deviation,
    drafter,
    drafters,
    keeping,
    law_of,
    likeliest,
    likeliest_and_one_drawn,
    make_tree,
    model,
    node_path,
    plain_law,
    total_variation,
    without_replacement,
)
from pilotfish.tree import Verdict
from pilotfish.verify import block, multi, ratio

CAUGHT = 1e-3  # the least deviation a broken variant must show
RATIO_RULES = [ratio, block, multi]
P, Q = PAIRS["unlike"](3)
P_ZEROS, Q_ZEROS = PAIRS["with zeros"](3)
ONE, TWO = without_replacement(Q, 1), without_replacement(Q, 2)
ONE_ZEROS = without_replacement(Q_ZEROS, 1)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("vocab", [2, 3, 4])
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_the_law_is_exactly_the_targets(rule, vocab, pair):
    p, q = PAIRS[pair](vocab)
    found = {}
    for name, (tree_drafter, depth) in drafters(vocab, q).items():
        # Where all steps would take too long, one step and then the target alone.
        steps = None if vocab == 2 or name in ("chain that may end early", "all drawn", "fixed trees") else 1
        found[name] = deviation(p, tree_drafter, rule, depth + 1, steps)
    assert all(tv < EXACT for tv in found.values()), found


# Drafters that are wrong in ways people have been wrong. Each must fail the very check above.


def with_laws(law):
    """Records law(context, true law) in place of the law of the draw."""

    def change(tree, prefix):
        nodes = []
        for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
            nodes.append((token, parent, law(prefix + node_path(tree, parent), tree.law(node))))
        return make_tree(nodes)

    return change


def sharper(law):
    return law**2 / (law**2).sum()


def two_without_laws(context, chance, height):
    return [(token, None) for token, _ in TWO(context, chance, height)]


BROKEN_DRAFTERS = {  # name -> (p, drafter)
    "the law before the filter": (P, changed(ONE, with_laws(lambda context, law: sharper(law)))(2)),
    "a greedy draft with a law": (P, changed(likeliest(Q, 1), with_laws(lambda context, law: Q(context)))(2)),
    "siblings not excluded": (P, changed(TWO, with_laws(lambda context, law: Q(context)))(1)),
    "pruned by the law of the drawn token": (P, changed(ONE, keeping(lambda c, token, law: law[token] >= 0.3))(2)),
    "illegal drafts dropped": (P_ZEROS, changed(ONE_ZEROS, keeping(lambda c, token, law: P_ZEROS(c)[token] > 0))(2)),
    "admitted by a later draft": (P, changed(ONE, lambda tree, prefix: tree.first(int(tree.tokens[1])))(2)),
}


@pytest.mark.parametrize("name", BROKEN_DRAFTERS)
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_the_check_catches_broken_drafters(rule, name):
    if name == "siblings not excluded" and rule is not multi:
        return  # these look at the first sibling alone
    target, broken = BROKEN_DRAFTERS[name]
    assert deviation(target, broken, rule, 3) > CAUGHT


ALLOWED_DRAFTERS = {
    "illegal fixed drafts dropped": (
        P_ZEROS,
        changed(
            by_level(likeliest_and_one_drawn(Q_ZEROS, 2), ONE_ZEROS),
            keeping(lambda c, token, law: law is not None or P_ZEROS(c)[token] > 0),
        )(2),
    ),
    "nothing below an illegal draft": (
        P_ZEROS,
        changed(ONE_ZEROS, keeping(lambda c, token, law: not c or P_ZEROS(c[:-1])[c[-1]] > 0))(2),
    ),
    "cut by an earlier draft": (P, changed(ONE, lambda tree, prefix: tree.first(1 + int(tree.tokens[0])))(3)),
    # A draft without a law is judged by p alone, and then every drafter and every selection is allowed.
    "drawn but without laws": (P, changed(two_without_laws, lambda tree, prefix: tree)(2, (1,))),
    "drawn but without laws, and pruned": (
        P,
        changed(two_without_laws, keeping(lambda c, token, law: Q(c)[token] >= 0.3))(2, (1,)),
    ),
}


@pytest.mark.parametrize("name", ALLOWED_DRAFTERS)
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_what_is_known_before_the_draw_may_decide(rule, name):
    target, allowed = ALLOWED_DRAFTERS[name]
    assert deviation(target, allowed, rule, 3, steps=2) < EXACT


def chain_rows(tree, rows):
    """[(node, p_i, q_i)] of a chain with laws."""
    return [(node, rows.probs(node - 1), tree.law(node)) for node in range(len(tree))]


def positive(residual, otherwise):
    residual = np.maximum(residual, 0)
    return residual / residual.sum() if residual.sum() > 0 else otherwise


def stop_after(tree, rows, chance, path, law):
    last = chance(rows.probs(path[-1] if path else -1) if law is None else law)
    return Verdict(tuple(path), (*tree.tokens[list(path)].tolist(), last), law is None)


def shared_uniform(cuts, chance):
    """A uniform number, up to which of the cuts lie above it."""
    edges = np.array(sorted({0.0, 1.0, *(min(1.0, cut) for cut in cuts)}))
    index = chance(np.diff(edges))
    return (edges[index] + edges[index + 1]) / 2


def coin(probability, chance):
    return chance(np.array([1 - probability, probability])) == 1


def largest(stops, chance):
    """The number of drafts that the block rule takes, from the chances [k] of stopping after 1 .. k of them."""
    return max([0] + [i for i, stop in enumerate(stops, 1) if coin(stop, chance)])


def block_with(taken=largest, weigh=lambda ratio: min(1.0, ratio), weighted_residual=True, look_ahead=True):
    """The block rule on a chain with laws, all coins thrown, with one part replaced."""

    def rule(tree, rows, chance):
        chain = chain_rows(tree, rows)
        weights = [1.0]
        for node, p, q in chain:
            token = tree.tokens[node]
            weights.append(weigh(weights[-1] * p[token] / q[token]))
        stops = []
        for i in range(1, len(chain) + 1):
            stops.append(min(1.0, weights[i]))
            if i < len(chain) and look_ahead:
                _, p, q = chain[i]
                mass = np.maximum(weights[i] * p - q, 0).sum()
                rest = mass + max(0.0, 1 - weights[i])
                stops[-1] = mass / rest if rest > 0 else 1.0
        i = taken(stops, chance)
        if i == len(chain):
            return stop_after(tree, rows, chance, range(i), None)
        _, p, q = chain[i]
        weight = weights[i] if weighted_residual else 1.0
        return stop_after(tree, rows, chance, range(i), positive(weight * p - q, p))

    return rule


def contiguous(stops, chance):
    return sum(1 for _ in itertools.takewhile(lambda stop: coin(stop, chance), stops))


def same_coin(stops, chance):
    u = shared_uniform(stops, chance)
    return max([0] + [i for i, stop in enumerate(stops, 1) if u < stop])


def ratio_with_one_coin(tree, rows, chance):
    chain = chain_rows(tree, rows)
    ratios = [p[tree.tokens[node]] / q[tree.tokens[node]] for node, p, q in chain]
    u = shared_uniform(ratios, chance)
    taken = sum(1 for _ in itertools.takewhile(lambda ratio: u < ratio, ratios))
    if taken == len(chain):
        return stop_after(tree, rows, chance, range(taken), None)
    _, p, q = chain[taken]
    return stop_after(tree, rows, chance, range(taken), positive(p - q, p))


def multi_with(
    order=lambda law, token: 0,
    after=lambda p, left, law: left - law,
    last=lambda p, left: left,
    one_coin=False,
):
    """The multi rule on a tree with laws everywhere, with one part replaced."""

    def rule(tree, rows, chance):
        path = []
        while True:
            node = path[-1] if path else -1
            p = left = rows.probs(node)
            children = np.flatnonzero(tree.parents == node).tolist()
            children.sort(key=lambda child: order(tree.law(child), tree.tokens[child]))
            tried = []  # (child, the chance that it stands, what is left when it does not)
            for child in children:
                law = tree.law(child)
                stands = min(1.0, left[tree.tokens[child]] / law[tree.tokens[child]])
                left = positive(after(p, left, law), left)
                tried.append((child, stands, left))
            u = shared_uniform([stands for _, stands, _ in tried], chance) if one_coin else None
            for child, stands, _ in tried:
                if u < stands if one_coin else coin(stands, chance):
                    path.append(child)
                    break
            else:
                return stop_after(tree, rows, chance, path, last(p, left) if children else None)

    return rule


CHAIN, PAIR = drafter(ONE, 2), drafter(TWO, 2, (1,))
SOUND_RULES = [(block_with(), CHAIN), (multi_with(), CHAIN), (multi_with(), PAIR)]
BROKEN_RULES = {
    "block: stops at the first failed coin": (block_with(taken=contiguous), CHAIN),
    "block: one coin for all": (block_with(taken=same_coin), CHAIN),
    "block: weights without the cap": (block_with(weigh=float), CHAIN),
    "block: the residual of the token rule": (block_with(weighted_residual=False), CHAIN),
    "block: weights as coins": (block_with(look_ahead=False), CHAIN),
    "ratio: one coin for all": (ratio_with_one_coin, CHAIN),
    "multi: no residual": (multi_with(last=lambda p, left: p), CHAIN),
    "multi: no residual between siblings": (multi_with(after=lambda p, left, law: p), PAIR),
    "multi: every residual from p": (multi_with(after=lambda p, left, law: p - law), PAIR),
    "multi: the likeliest sibling first": (multi_with(order=lambda law, token: -law[token]), PAIR),
    "multi: one coin for siblings": (multi_with(one_coin=True), PAIR),
}


@pytest.mark.parametrize(("rule", "tree_drafter"), SOUND_RULES)
def test_the_rules_that_are_broken_below_are_sound(rule, tree_drafter):
    assert deviation(P, tree_drafter, rule, 3) < EXACT


@pytest.mark.parametrize("name", BROKEN_RULES)
def test_the_check_catches_broken_rules(name):
    rule, tree_drafter = BROKEN_RULES[name]
    assert deviation(P, tree_drafter, rule, 3) > CAUGHT


class ShiftedRows:
    """Gives the parent's row in place of those of `nodes`."""

    def __init__(self, rows, tree, nodes):
        self.rows, self.tree, self.nodes = rows, tree, nodes

    def probs(self, node):
        return self.rows.probs(int(self.tree.parents[node]) if node in self.nodes else node)


@pytest.mark.parametrize("which", ["leaves", "inner nodes"])
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_the_check_catches_the_wrong_row(rule, which):
    def shifted(tree, rows, chance):
        leaves = set(range(len(tree))) - set(tree.parents.tolist())
        nodes = leaves if which == "leaves" else set(range(len(tree))) - leaves
        return rule(tree, ShiftedRows(rows, tree, nodes), chance)

    assert deviation(P, CHAIN, shifted, 3) > CAUGHT


# Noise over several steps, which no single step can show.


def law_over_steps(rule, length, depth, noise_of_position):
    """Output -> probability when drafts are drawn with noise that is fresh, or belongs to the position."""
    target = model(5, 2)
    half = np.array([0.5, 0.5])

    def play(chance):
        noise = {}
        output = ()
        while len(output) < length:
            nodes = []
            for node in range(depth):
                position = len(output) + node
                token = noise.get(position) if noise_of_position else None
                if token is None:
                    token = noise[position] = chance(half)
                nodes.append((token, node - 1, half))
            tree = make_tree(nodes)
            output += rule(tree, TableRows(target, output, tree, chance), chance).tokens
        return output[:length]

    return total_variation(law_of(play), plain_law(target, (), length))


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_drafts_need_fresh_noise_in_every_step(rule):
    assert law_over_steps(rule, 3, 2, noise_of_position=False) < EXACT
    biased = law_over_steps(rule, 3, 2, noise_of_position=True)
    assert biased > CAUGHT if rule is block else biased < EXACT
