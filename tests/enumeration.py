"""Exact laws: a play asks a `chance` for all that is random and is replayed once for each way the draws can fall.

With it come small models, drafters and what it takes to compare speculation with the target alone.
"""

import functools
from collections import Counter

import numpy as np

from pilotfish.tree import DraftTree

EXACT = 1e-12


class Replay:
    """A `chance` that follows a script and then takes the first possible index each time."""

    def __init__(self, script):
        self.taken, self.weight = list(script), 1.0
        self.draws, self.others = 0, []  # others: the scripts of what could have been taken instead

    def __call__(self, probs):
        probs = np.asarray(probs).tolist()
        assert min(probs) >= 0 and abs(sum(probs) - 1) < EXACT
        if self.draws == len(self.taken):
            first, *rest = [index for index, p in enumerate(probs) if p > 0]
            self.others += [(*self.taken, index) for index in rest]
            self.taken.append(first)
        choice = self.taken[self.draws]
        self.draws += 1
        self.weight *= probs[choice]
        return choice


def outcomes(play):
    """Yield (probability, result of `play(chance)`) for every sequence of draws, depth first."""
    scripts = [()]
    while scripts:
        chance = Replay(scripts.pop())
        result = play(chance)
        scripts += chance.others
        yield chance.weight, result


def law_of(play):
    """Result -> probability."""
    law = Counter()
    for probability, result in outcomes(play):
        law[result] += probability
    return law


def total_variation(a, b):
    return sum(abs(a[key] - b[key]) for key in a.keys() | b.keys()) / 2


def plain_law(target, prefix, length):
    """Output -> probability when the target alone continues `prefix` by `length` tokens; target(context) is [vocab]."""
    law = Counter({(): 1.0})
    for _ in range(length):
        longer = Counter()
        for output, probability in law.items():
            for token, p in enumerate(target(prefix + output).tolist()):
                if p > 0:
                    longer[(*output, token)] += probability * p
        law = longer
    return law


def node_path(tree, node):
    """Tokens from the root down to `node`."""
    path = []
    while node >= 0:
        path.append(int(tree.tokens[node]))
        node = int(tree.parents[node])
    return tuple(reversed(path))


class TableRows:
    """The target's rows after `prefix` for the nodes of a tree; the seeded token is one more draw of `chance`."""

    def __init__(self, target, prefix, tree, chance):
        self.target, self.prefix, self.tree, self.chance = target, prefix, tree, chance
        self.asked = []

    def probs(self, node):
        self.asked.append(node)
        return self.target(self.prefix + node_path(self.tree, node))

    def token(self, node):
        return self.chance(self.probs(node))


def step(target, prefix, drafter, rule, chance):
    """One step of speculative decoding: the emitted tokens."""
    tree = drafter(prefix, chance)
    return rule(tree, TableRows(target, prefix, tree, chance), chance).tokens


def speculative_law(target, drafter, rule, length, *, steps=None, prefix=()):
    """Output -> probability of `length` tokens; after `steps` steps of speculation the target goes on alone.

    The draws of different steps are independent, so the law of the rest depends on the tokens so far alone.
    """
    if length == 0:
        return Counter({(): 1.0})
    if steps == 0:
        return plain_law(target, prefix, length)
    law = Counter()
    rests = {}
    for tokens, probability in law_of(lambda chance: step(target, prefix, drafter, rule, chance)[:length]).items():
        if tokens not in rests:
            rests[tokens] = speculative_law(
                target,
                drafter,
                rule,
                length - len(tokens),
                steps=None if steps is None else steps - 1,
                prefix=prefix + tokens,
            )
        for rest, p in rests[tokens].items():
            law[tokens + rest] += probability * p
    return law


def deviation(target, tree_drafter, rule, length, steps=None):
    law = speculative_law(target, tree_drafter, rule, length, steps=steps)
    assert abs(sum(law.values()) - 1) < EXACT
    return total_variation(law, plain_law(target, (), length))


# Trees by hand and by chance.


def make_tree(nodes):
    """The tree of (token, parent, law) in order."""
    tokens, parents, laws = zip(*nodes, strict=True) if nodes else ((), (), ())
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), "test", laws)


def random_tree(rng, vocab, nodes, depth):
    """Tokens that were not drawn, at most `nodes` of them."""
    tokens, parents, depths = [], [], []
    for _ in range(nodes):
        open_nodes = [-1] + [node for node, level in enumerate(depths) if level < depth]
        parent = int(rng.choice(open_nodes))
        token = int(rng.integers(vocab))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
            depths.append(1 if parent < 0 else depths[parent] + 1)
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32))


def without(law, tokens):
    """The law given that none of `tokens` comes; None when nothing else can."""
    rest = np.array(law)
    rest[list(tokens)] = 0
    return rest / rest.sum() if rest.sum() > 0 else None


# Models: functions of the context, so that a row taken from the wrong place shows.


def model(salt, vocab, zeros=0.0, tilt=1.0):
    """context -> a random law [vocab]; a token is impossible with probability `zeros`."""

    @functools.cache
    def law(context):
        rng = np.random.default_rng([salt, vocab, *context])
        weights = rng.dirichlet(np.full(vocab, tilt))
        possible = rng.random(vocab) >= zeros
        possible[rng.integers(vocab)] = True
        return weights * possible / (weights * possible).sum()

    return law


def point_mass(of):
    return lambda context: np.eye(len(of(context)))[int(np.argmax(of(context)))]


# Drafters: (prefix, chance) -> tree. Each grows a tree level by level with `children`, which says for one context what
# (token, law) stand under it.


def grow(children, depth, prefix, chance, stem=()):
    """`stem` limits branching: below level i + 1 only the first stem[i] children of a node have children."""
    nodes, level = [], [(-1, ())]
    for height in range(depth):
        below = []
        for parent, path in level:
            found = children(prefix + path, chance, height)
            grown = [(len(nodes) + index, (*path, token)) for index, (token, _) in enumerate(found)]
            nodes += [(token, parent, law) for token, law in found]
            below += grown[: stem[height]] if height < len(stem) else grown
        level = below
    return make_tree(nodes)


def drafter(children, depth, stem=()):
    return lambda prefix, chance: grow(children, depth, prefix, chance, stem)


def without_replacement(q, count):
    def children(context, chance, height):
        found = []
        law = q(context)
        while len(found) < count and law is not None:
            found.append((chance(law), law))
            law = without(law, [found[-1][0]])
        return found

    return children


def likeliest(q, count):
    return lambda context, chance, height: [(int(token), None) for token in np.argsort(-q(context))[:count]]


def likeliest_and_one_drawn(q, count):
    """The fixed tokens stand first in the tree: the rule must find the drawn one."""

    def children(context, chance, height):
        fixed = likeliest(q, count - 1)(context, chance, height)
        law = without(q(context), [token for token, _ in fixed])
        return fixed if law is None else [*fixed, (chance(law), law)]

    return children


def drawn_then_fixed_apart(q, count):
    """Draws from all of q; the fixed token is the likeliest of those not drawn, so it depends on the draws."""

    def children(context, chance, height):
        found = without_replacement(q, count)(context, chance, height)
        left = [token for token in np.argsort(-q(context)).tolist() if token not in [drawn for drawn, _ in found]]
        return found + [(token, None) for token in left[:1]]

    return children


def by_level(*levels):
    return lambda context, chance, height: levels[height](context, chance, height)


def nothing_or(children, q):
    """Stops by what is known before the draw: allowed under every rule."""
    return lambda context, chance, height: (
        children(context, chance, height) if q(context).max() < 0.8 and sum(context) % 3 else []
    )


def fixed_trees(vocab, nodes, depth):
    return lambda prefix, chance: random_tree(np.random.default_rng([7, *prefix]), vocab, nodes, depth)


def drafters(vocab, q):
    """name -> (drafter, its depth), small enough to enumerate."""
    one, two = without_replacement(q, 1), without_replacement(q, 2)
    return {
        "chain": (drafter(one, 3), 3),
        "chain of fixed": (drafter(likeliest(q, 1), 3), 3),
        "chain, drawn and fixed": (drafter(by_level(one, likeliest(q, 1), one), 3), 3),
        "chain, fixed and drawn": (drafter(by_level(likeliest(q, 1), one, likeliest(q, 1)), 3), 3),
        "chain that may end early": (drafter(nothing_or(one, q), 2), 2),
        "two drawn": (drafter(two, 2, stem=(2,) if vocab < 4 else (1,)), 2),
        "all drawn": (drafter(without_replacement(q, vocab), 1), 1),
        "likeliest and one drawn": (drafter(likeliest_and_one_drawn(q, 2), 2), 2),
        "two likeliest and one drawn": (drafter(by_level(likeliest_and_one_drawn(q, 3), one), 2, stem=(2,)), 2),
        "likeliest": (drafter(likeliest(q, 2), 3), 3),
        "drawn, then fixed": (drafter(by_level(drawn_then_fixed_apart(q, 1), one), 2), 2),
        "mixed levels": (drafter(by_level(likeliest_and_one_drawn(q, 2), two), 2, stem=(1,)), 2),
        "fixed trees": (fixed_trees(vocab, 6, 3), 3),
    }


def mixed(p, q, share):
    return functools.cache(lambda context: (1 - share) * p(context) + share * q(context))


PAIRS = {  # name -> (p, q) for a vocabulary
    "unlike": lambda vocab: (model(1, vocab), model(2, vocab)),
    "alike": lambda vocab: (model(1, vocab), mixed(model(1, vocab), model(2, vocab), 0.3)),
    "with zeros": lambda vocab: (model(3, vocab, zeros=0.4), model(4, vocab, zeros=0.4)),
    "equal": lambda vocab: (model(1, vocab), model(1, vocab)),
    "temperature 0": lambda vocab: (point_mass(model(1, vocab)), model(2, vocab)),
}


def changed(children, change):
    """The drafter of `children` whose trees go through `change(tree, prefix)`."""

    def with_change(depth, stem=()):
        return lambda prefix, chance: change(grow(children, depth, prefix, chance, stem), prefix)

    return with_change


def keeping(keep):
    """Keeps the nodes of which keep(context, token, law) is true."""

    def change(tree, prefix):
        parents = tree.parents.tolist()
        contexts = [prefix + node_path(tree, parent) for parent in parents]
        return tree.select([keep(*of) for of in zip(contexts, tree.tokens.tolist(), tree.laws, strict=True)])

    return change
