"""What the rules decide in single steps: how much stands, on which rows, and what holds for any tree."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    outcomes,
    point_mass,
    speculative_law,
    without,
    without_replacement,
)
from pilotfish.params import ACCEPTANCE_RULES
from pilotfish.tree import DraftTree, Verdict
from pilotfish.verify import RULES, block, match, multi, ratio, typical

RATIO_RULES = [ratio, block, multi]
P, Q = PAIRS["unlike"](3)
ONE, TWO = without_replacement(Q, 1), without_replacement(Q, 2)
CHAIN = drafter(ONE, 2)


# How much stands.


def of_all_contexts(law):
    return lambda context: np.array(law, float)


def mean_accepted(p, tree_drafter, rule):
    def play(chance):
        tree = tree_drafter((), chance)
        return len(rule(tree, TableRows(p, (), tree, chance), chance).path)

    return sum(probability * accepted for probability, accepted in outcomes(play))


def test_known_constants():
    p, q = of_all_contexts([1 / 3, 2 / 3]), of_all_contexts([2 / 3, 1 / 3])
    two = drafter(without_replacement(q, 1), 2)
    assert mean_accepted(p, two, ratio) == pytest.approx(Fraction(10, 9), abs=EXACT)
    assert mean_accepted(p, two, multi) == pytest.approx(Fraction(10, 9), abs=EXACT)
    assert mean_accepted(p, two, block) == pytest.approx(Fraction(11, 9), abs=EXACT)


def test_the_bias_of_pruning_by_the_drawn_token():
    p, q = of_all_contexts([0.7, 0.3]), of_all_contexts([0.5, 0.5])
    pruned = changed(without_replacement(q, 1), keeping(lambda context, token, law: token == 0))(1)
    law = speculative_law(p, pruned, ratio, 1)
    assert law[(0,)] == pytest.approx(0.85, abs=EXACT)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_one_draft_stands_as_often_as_the_laws_overlap(rule, pair):
    p, q = PAIRS[pair](4)
    one = drafter(without_replacement(q, 1), 1)
    assert mean_accepted(p, one, rule) == pytest.approx(np.minimum(p(()), q(())).sum(), abs=EXACT)


@pytest.mark.parametrize("rule", [ratio, block])
def test_a_single_path_takes_the_first_drawn_child(rule):
    p, q = PAIRS["unlike"](4)

    def fixed_and_drawn(context, chance, height):
        (first, law), second = without_replacement(q, 2)(context, chance, height)
        left = next(token for token in range(4) if token not in (first, second[0]))
        return [(left, None), (first, law), second]

    assert mean_accepted(p, drafter(fixed_and_drawn, 1), rule) == pytest.approx(
        np.minimum(p(()), q(())).sum(), abs=EXACT
    )
    assert mean_accepted(p, drafter(likeliest(q, 2), 1), rule) == pytest.approx(p(())[np.argmax(q(()))], abs=EXACT)


def best_acceptance(p, drafts):
    """No rule lets one of the drafts stand more often: 1 + min over H of p(H) - P(all drafts in H) (Hu et al. 2025)."""
    subsets = itertools.chain.from_iterable(itertools.combinations(range(len(p)), n) for n in range(len(p) + 1))
    return 1 + min(
        sum(p[token] for token in subset)
        - sum(probability for tokens, probability in drafts.items() if set(tokens) <= set(subset))
        for subset in map(list, subsets)
    )


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("count", [2, 3])
def test_the_likeliest_and_one_drawn_are_accepted_optimally(pair, count):
    p, q = PAIRS[pair](4)
    trees = drafter(likeliest_and_one_drawn(q, count), 1)
    drafts = law_of(lambda chance: tuple(trees((), chance).tokens.tolist()))
    fixed = np.argsort(-q(()))[: count - 1].tolist()
    law = without(q(()), fixed)
    drawn = 0 if law is None else np.delete(np.minimum(p(()), law), fixed).sum()
    accepted = mean_accepted(p, trees, multi)
    assert accepted == pytest.approx(p(())[fixed].sum() + drawn, abs=EXACT)
    assert accepted == pytest.approx(best_acceptance(p(()), drafts), abs=EXACT)


@pytest.mark.parametrize("pair", PAIRS)
def test_more_children_and_whole_blocks_never_lose(pair):
    p, q = PAIRS[pair](3)
    chain, pairs = drafter(without_replacement(q, 1), 3), drafter(without_replacement(q, 2), 2, (1,))
    gain = mean_accepted(p, chain, block) - mean_accepted(p, chain, ratio)
    more = mean_accepted(p, pairs, multi) - mean_accepted(p, pairs, ratio)
    assert gain > -EXACT and more > -EXACT
    if pair in ("unlike", "alike"):
        assert gain > 1e-4 and more > 0.01


@pytest.mark.parametrize("name", ["chain", "chain, drawn and fixed", "chain that may end early"])
def test_multi_is_ratio_on_a_chain(name):
    p, q = PAIRS["with zeros"](3)
    tree_drafter = drafters(3, q)[name][0]

    def verdicts(rule):
        def play(chance):
            tree = tree_drafter((), chance)
            return tuple(tree.tokens.tolist()), rule(tree, TableRows(p, (), tree, chance), chance)

        return law_of(play)

    assert verdicts(multi) == verdicts(ratio)


# Typical acceptance.


def test_typical_acceptance_is_lossy():
    assert deviation(P, drafter(likeliest(Q, 1), 2), typical, 3) > 0.01
    assert deviation(P, CHAIN, typical, 3) > 0.01


class GivenRows:
    """Rows by hand; the target's own token is the likeliest."""

    def __init__(self, rows):
        self.rows = {node: np.array(row) for node, row in rows.items()}

    def probs(self, node):
        return self.rows[node]

    def token(self, node):
        return int(np.argmax(self.rows[node]))


def no_chance(probs):
    raise AssertionError("typical acceptance draws nothing")


@pytest.mark.parametrize(
    ("nodes", "rows", "path"),
    [
        # exp(-H) of (.9, .1) is .72, so epsilon rules: .1 > .09 stands, .08 does not.
        ([(1, -1)], {-1: [0.9, 0.1], 0: [1, 0]}, (0,)),
        ([(1, -1)], {-1: [0.92, 0.08]}, ()),
        # Four even tokens have exp(-H) = 1/4: .25 > .3 / 4. Of 16, all stand at 1/16 > .3 / 16.
        ([(3, -1)], {-1: [0.25] * 4, 0: [1, 0, 0, 0]}, (0,)),
        ([(15, -1)], {-1: [1 / 16] * 16, 0: [1] + [0] * 15}, (0,)),
        # exp(-H) of (.3, .3, .3, .08, .02) is .256: .08 > .0767 stands; of (.3, .3, .3, .07, .03) .253: .07 does not.
        ([(3, -1)], {-1: [0.3, 0.3, 0.3, 0.08, 0.02], 0: [1, 0, 0, 0, 0]}, (0,)),
        ([(3, -1)], {-1: [0.3, 0.3, 0.3, 0.07, 0.03]}, ()),
        # The longest path, not the first; the lowest node of equals; nothing below a draft that does not stand.
        ([(0, -1), (1, -1), (0, 1)], {-1: [0.5, 0.5], 1: [0.5, 0.5], 2: [0, 1]}, (1, 2)),
        ([(1, -1), (0, -1)], {-1: [0.3, 0.7], 0: [0, 1]}, (0,)),
        ([(1, -1), (0, 0)], {-1: [1, 0]}, ()),
    ],
)
def test_typical_verdicts(nodes, rows, path):
    tree = make_tree([(token, parent, None) for token, parent in nodes])
    given_rows = GivenRows(rows)
    verdict = typical(tree, given_rows, no_chance)
    last = path[-1] if path else -1
    expected = (*tree.tokens[list(path)].tolist(), given_rows.token(last))
    assert verdict == Verdict(path, expected, bonus=last not in tree.parents)


# Any tree, any laws, any chance.


def random_law(rng, vocab):
    law = rng.dirichlet(np.full(vocab, rng.choice([0.05, 0.5, 5.0])))
    possible = rng.random(vocab) < rng.choice([0.4, 1.0])
    possible[rng.integers(vocab)] = True
    law = np.maximum(law, 1e-300) * possible
    return law / law.sum()


def random_lawful_tree(rng, vocab, nodes):
    """Drawn and fixed nodes in any mixture, some siblings drawn without replacement."""
    found, taken, drawn, laws = [], {}, {}, {}
    for _ in range(nodes):
        parent = int(rng.integers(-1, len(found)))
        law = laws.setdefault(parent, random_law(rng, vocab))
        law = without(law, drawn.setdefault(parent, []))
        fixed = law is None or rng.random() < 0.3
        token = int(rng.integers(vocab) if fixed else rng.choice(np.flatnonzero(law)))
        if token in taken.setdefault(parent, set()):
            continue
        taken[parent].add(token)
        if not fixed:
            drawn[parent].append(token)
        found.append((token, parent, None if fixed else law))
    return make_tree(found)


class AnyRows:
    """A row is random, the law of a child, that law but for rounding, or a point mass."""

    def __init__(self, rng, tree, vocab):
        laws = {parent: law for parent, law in zip(tree.parents.tolist(), tree.laws, strict=True) if law is not None}
        self.rows = {}
        for node in range(-1, len(tree)):
            kind = rng.integers(5)
            row = laws.get(node, random_law(rng, vocab)) if kind in (1, 2) else random_law(rng, vocab)
            if kind == 2:
                row = row * (1 - 2.0**-53 * rng.integers(0, 3, vocab))
            if kind == 3:
                row = np.eye(vocab)[rng.integers(vocab)]
            self.rows[node] = row
        self.asked = []
        self.rng = rng

    def probs(self, node):
        self.asked.append(node)
        return self.rows[node]

    def token(self, node):
        return int(self.rng.choice(np.flatnonzero(self.rows[node])))


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1), vocab=st.integers(1, 5), nodes=st.integers(0, 10), rule=st.sampled_from(list(RULES))
)
def test_every_rule_gives_a_path_and_a_legal_token(seed, vocab, nodes, rule):
    rng = np.random.default_rng(seed)
    tree = random_lawful_tree(rng, vocab, nodes)
    tree.check(vocab)
    rows = AnyRows(rng, tree, vocab)

    def chance(probs):
        assert (probs >= 0).all() and abs(probs.sum() - 1) < 1e-9
        return int(rng.choice(np.flatnonzero(probs)))  # what is unlikely comes as often as what is likely

    verdict = RULES[rule](tree, rows, chance)
    path = list(verdict.path)
    assert tree.parents[path].tolist() == [-1, *path][:-1]
    assert verdict.tokens[:-1] == tuple(tree.tokens[path].tolist())
    assert len(verdict.tokens) == len(path) + 1
    assert all(rows.rows[node][token] > 0 for node, token in zip([-1, *path], verdict.tokens, strict=True))
    assert verdict.bonus == ((path[-1] if path else -1) not in tree.parents)
    if rule in ("ratio", "multi"):
        assert rows.asked == [-1, *path]
    legal = {-1}
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        if parent in legal and rows.rows[parent][token] > 0:
            legal.add(node)
    assert set(rows.asked) <= legal
    assert len(rows.asked) == len(set(rows.asked))


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_residual_that_rounding_made_zero(rule):
    half = np.array([0.5, 0.5])
    less = half - [2.0**-54, 0]
    tree = make_tree([(0, -1, half)])
    seen = []

    def chance(probs):
        seen.append(probs)
        return 0  # the coin fails, although its chance is 1 - 2**-53

    assert rule(tree, GivenRows({-1: less}), chance) == Verdict((), (0,), False)
    assert len(seen) == 2 and seen[1].tolist() == less.tolist()


def test_a_block_that_rounding_made_uncertain():
    half = np.array([0.5, 0.5])
    less = half - [2.0**-54, 0]
    tree = make_tree([(1, -1, half), (0, 0, half)])
    # The last coin fails, although its chance is 1 - 2**-53, and to stop before it has the chance 0 / 0.
    assert block(tree, GivenRows({-1: half, 0: less}), lambda probs: 0) == Verdict((0,), (1, 0), False)


@pytest.mark.parametrize("law", [None, np.array([0.5, 0.5]), np.array([0.0, 1.0])])
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_an_illegal_draft_is_not_left_to_chance(rule, law):
    """Even when the law says, wrongly, that it can not have been drawn."""
    asked = []

    def chance(probs):
        asked.append(probs.tolist())
        return 1

    assert rule(make_tree([(0, -1, law)]), GivenRows({-1: [0.0, 1.0]}), chance).path == ()
    assert len(asked) == 1


@pytest.mark.parametrize("rule", RULES)
def test_no_drafts_is_plain_decoding(rule):
    tree = DraftTree.empty()
    law = law_of(lambda chance: RULES[rule](tree, TableRows(P, (), tree, chance), chance))
    assert law == {Verdict((), (token,), True): p for token, p in enumerate(P(()).tolist())}


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), chain=st.booleans())
def test_at_temperature_0_every_rule_is_match(seed, chain):
    rng = np.random.default_rng(seed)
    target = point_mass(model(int(rng.integers(100)), 3))
    tree = drafter(by_level(ONE, ONE, ONE) if chain else by_level(TWO, ONE, ONE), 3)((), lambda p: rng.choice(3, p=p))

    def verdict(rule):
        return rule(tree, TableRows(target, (), tree, lambda p: int(np.argmax(p))), lambda p: int(np.argmax(p)))

    expected = verdict(match)
    for rule in (multi, typical, *((ratio, block) if chain else ())):
        assert verdict(rule) == expected


def test_the_table_has_every_rule_that_a_request_may_name():
    assert tuple(RULES) == ACCEPTANCE_RULES
