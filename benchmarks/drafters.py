"""How long a proposal of the drafters without a model takes, and what would be accepted.

    python benchmarks/drafters.py [--pool 200000] [--prompt 2000] [--steps 300] [--budget 16] [--json]

No model runs: the output of each request is known beforehand, and a step takes the drafts that agree with it and one
token more. Texts are runs of passages of 40 tokens out of a library, with about ten other tokens between; all tokens
follow Zipf's law. `novel` outputs are other tokens only, `copying` ones repeat pieces of 40 to 200 tokens of the
prompt, `seen` ones are of the library, which the prompt does not show but earlier outputs do, `loop` repeats 12 tokens.
`drafter:shared=0` keeps no earlier outputs. `first` is the step that takes in the prompt, in ms; `median` and `p99`
are the other steps, in microseconds; `accepted` is drafts per step. Last, what the earlier outputs take in memory.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from itertools import accumulate
from statistics import median

from pilotfish.drafters.base import Drafter, DraftRequest
from pilotfish.drafters.ngram import NgramDrafter
from pilotfish.drafters.suffix import SuffixDrafter
from pilotfish.tree import DraftTree

VOCAB = 20_000
OUTPUT = 500  # tokens of an earlier output
DRAFTERS: dict[str, Callable[[int], Drafter]] = {
    "ngram": lambda pool: NgramDrafter(),
    "suffix": lambda pool: SuffixDrafter(shared=pool),
    "suffix:shared=0": lambda pool: SuffixDrafter(shared=0),
}


class Texts:
    """Random token streams; each has its own generator, so that all drafters see the same."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._weights = list(accumulate(1 / rank for rank in range(1, VOCAB + 1)))
        self._library = [self.other(40) for _ in range(400)]

    def other(self, count: int) -> list[int]:
        return self.rng.choices(range(VOCAB), cum_weights=self._weights, k=count)

    def passages(self, count: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < count:
            tokens += self.rng.choice(self._library) + self.other(self.rng.randint(0, 20))
        return tokens[:count]

    def request(self, kind: str, prompt: int, output: int) -> tuple[list[int], list[int]]:
        start = self.other(prompt)
        if kind == "novel":
            return start, self.other(output)
        if kind == "seen":
            return start, self.passages(output)
        if kind == "loop":
            return start, (self.other(12) * output)[:output]
        tokens: list[int] = []
        while len(tokens) < output:
            at = self.rng.randrange(prompt)
            tokens += start[at : at + self.rng.randint(40, 200)]
        return start, tokens[:output]


def accept(tree: DraftTree, truth: list[int]) -> int:
    node, count = -1, 0
    for token in truth:
        child = tree.child(node, token)
        if child is None:
            break
        node, count = child, count + 1
    return count


def write(drafter: Drafter, id: int, prompt: list[int], output: list[int], budget: int) -> tuple[list[float], int]:
    """Draft for a request until its output is written: seconds of each step, and accepted drafts."""
    tokens, done, accepted = list(prompt), 0, 0
    times: list[float] = []
    while len(output) - done > budget:
        started = time.perf_counter()
        (tree,) = drafter.propose([DraftRequest(id, tokens, budget, budget)])
        times.append(time.perf_counter() - started)
        stood = accept(tree, output[done:])
        accepted += stood
        tokens += output[done : done + stood + 1]
        done += stood + 1
    drafter.end(id)
    return times, accepted


def measure(name: str, pool: int, prompt: int, steps: int, budget: int) -> list[dict[str, float | str]]:
    texts = Texts(1)
    drafter = DRAFTERS[name](pool)
    for id in range(pool // OUTPUT):
        tokens = texts.other(1)
        drafter.propose([DraftRequest(id, tokens, 1, 1)])
        tokens += texts.passages(OUTPUT)
        drafter.end(id)
    lines: list[dict[str, float | str]] = []
    for number, kind in enumerate(("novel", "copying", "seen", "loop")):
        times: list[float] = []
        firsts: list[float] = []
        accepted = 0
        round = 0
        while len(times) < steps:
            round += 1
            start, output = texts.request(kind, prompt, 1000)
            (first, *others), stood = write(drafter, pool + 1000 * number + round, start, output, budget)
            firsts.append(first)
            times += others
            accepted += stood
        lines.append(
            {
                "drafter": name,
                "output": kind,
                "first_ms": 1e3 * median(firsts),
                "median_us": 1e6 * median(times),
                "p99_us": 1e6 * sorted(times)[len(times) * 99 // 100],
                "accepted": accepted / (len(times) + len(firsts)),
            }
        )
    return lines


def memory_per_token(pool: int) -> float:
    """Bytes that the pool takes for a token."""
    texts = Texts(1)
    outputs = [texts.passages(OUTPUT) for _ in range(pool // OUTPUT)]
    drafter = SuffixDrafter(shared=pool)
    tracemalloc.start()
    for id, output in enumerate(outputs):
        tokens = [1]
        drafter.propose([DraftRequest(id, tokens, 1, 1)])
        tokens += output
        drafter.end(id)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / drafter.pool.size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", type=int, default=200_000)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    lines = [
        line for name in DRAFTERS for line in measure(name, options.pool, options.prompt, options.steps, options.budget)
    ]
    memory = memory_per_token(options.pool)
    if options.json:
        print(json.dumps({"proposals": lines, "pool_bytes_per_token": memory}, indent=1))
        return
    print(f"{'drafter':16} {'output':8} {'first ms':>9} {'median us':>10} {'p99 us':>8} {'accepted':>9}")
    for line in lines:
        print(
            f"{line['drafter']:16} {line['output']:8} {line['first_ms']:9.2f} {line['median_us']:10.1f} "
            f"{line['p99_us']:8.0f} {line['accepted']:9.2f}"
        )
    print(f"the pool takes {memory:.0f} bytes per token")


if __name__ == "__main__":
    main()
