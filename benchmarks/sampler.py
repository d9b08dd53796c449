"""How long one sampled row takes: the native sampler on each path this machine runs, and the pure rule in NumPy.

    python benchmarks/sampler.py [--rows 200] [--json]

Prints medians in ms over that many rows (the pure rule: a tenth) at a temperature of 0.8, one thread. `normal` logits
have a standard deviation of 3, so that hundreds of tokens share the probability; `peaked` ones lift a few tokens above
such a sea, as a model does that knows what comes next.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np

from pilotfish.backends.native import choose, path_names
from pilotfish.request import SamplingParams
from pilotfish.sampling import Logits
from pilotfish.sampling import choose as choose_by_rule

VOCABS = (49152, 151936)
SETTINGS = {
    "no filter": SamplingParams(temperature=0.8),
    "top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "min_p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "top_k 40": SamplingParams(temperature=0.8, top_k=40),
}
DISTINCT = 8  # rows to take turns, so that none stays in the cache nearest to the core


def make_rows(kind: str, vocab: int) -> list[Logits]:
    rng = np.random.default_rng(vocab)
    rows = rng.normal(0, 3, (DISTINCT, vocab))
    if kind == "peaked":
        for row in rows:
            row[rng.integers(0, vocab, 20)] = row.max() + rng.exponential(4, 20)
    return list(rows.astype(np.float32))


def median_ms(
    pick: Callable[[Logits, SamplingParams, int, int], int], rows: list[Logits], params: SamplingParams
) -> float:
    times = []
    for position, row in enumerate(rows):
        start = time.perf_counter()
        pick(row, params, 1, position)
        times.append(time.perf_counter() - start)
    return round(1e3 * median(times), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    samplers = {path: (partial(choose, path=path), args.rows) for path in path_names()}
    samplers["pure"] = (choose_by_rule, -(-args.rows // 10))
    results = []
    for vocab in VOCABS:
        for kind in ("normal", "peaked"):
            distinct = make_rows(kind, vocab)
            for setting, params in SETTINGS.items():
                times = {}
                for name, (pick, count) in samplers.items():
                    rows = [distinct[index % DISTINCT] for index in range(count)]
                    times[name] = median_ms(pick, rows, params)
                results.append({"vocab": vocab, "logits": kind, "setting": setting, "median_ms": times})
    if args.json:
        print(json.dumps(results))
        return
    print(f"{'vocab':>7} {'logits':<7} {'setting':<11}" + "".join(f"{name:>10}" for name in samplers))
    for result in results:
        figures = "".join(f"{ms:>10.3f}" for ms in result["median_ms"].values())
        print(f"{result['vocab']:>7} {result['logits']:<7} {result['setting']:<11}" + figures)


if __name__ == "__main__":
    main()
