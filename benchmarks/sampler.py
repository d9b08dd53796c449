"""How long one row of logits takes: the native sampler on each path this machine runs, and the pure rule in NumPy.

    python benchmarks/sampler.py [--rows 200] [--json]

Prints medians in ms over that many rows (the pure rule: a tenth), one thread. Tokens are sampled at a temperature of
0.8; `logprobs N` is the normaliser of a row and its N likeliest tokens. The second table is what penalties, bias and
masks add to a row, after a prompt of 2,000 tokens and an answer of 1,000. `normal` logits have a standard deviation
of 3, so that hundreds of tokens share the probability; `peaked` ones lift a few tokens above such a sea, as a model
does that knows what comes next.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from pilotfish import sampling
from pilotfish.backends import native
from pilotfish.history import History
from pilotfish.params import SamplingParams, StructuredOutput
from pilotfish.sampling import Logits

VOCABS = (49152, 151936)
Work = Callable[[Logits, int], object]  # on the row of a position


def sample(path: str | None, params: SamplingParams) -> Work:
    choose = sampling.choose if path is None else partial(native.choose, path=path)
    return lambda row, position: choose(row, params, 1, position)


def log_probabilities(path: str | None, top: int) -> Work:
    find = sampling.log_probabilities if path is None else partial(native.log_probabilities, path=path)
    return lambda row, position: find(row, top)


# What is measured, given a path, or None for the pure rule.
SETTINGS: dict[str, Callable[[str | None], Work]] = {
    "no filter": partial(sample, params=SamplingParams(temperature=0.8)),
    "top_p 0.95": partial(sample, params=SamplingParams(temperature=0.8, top_p=0.95)),
    "min_p 0.05": partial(sample, params=SamplingParams(temperature=0.8, min_p=0.05)),
    "top_k 40": partial(sample, params=SamplingParams(temperature=0.8, top_k=40)),
    "logprobs 0": partial(log_probabilities, top=0),
    "logprobs 20": partial(log_probabilities, top=20),
}
# What changes a row before a token is chosen from it, for a vocabulary; the grammar allows an irregular third of it.
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
ADJUSTMENTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "penalties": lambda vocab: PENALTIES,
    "bias of 300": lambda vocab: {"logit_bias": dict.fromkeys(range(0, 3000, 10), 1.0)},
    "half allowed": lambda vocab: {"allowed_token_ids": range_list(0, vocab, 2)},
    "100 banned": lambda vocab: {"banned_token_ids": range_list(0, 1000, 10)},
    "grammar mask": lambda vocab: {"structured": StructuredOutput(regex="any")},
    "all of these": lambda vocab: {
        **PENALTIES,
        "logit_bias": dict.fromkeys(range(0, 3000, 10), 1.0),
        "banned_token_ids": range_list(0, 1000, 10),
        "structured": StructuredOutput(regex="any"),
    },
}


def range_list(start: int, stop: int, step: int) -> list[int]:
    return list(range(start, stop, step))


class IrregularMask:
    """A grammar that costs nothing itself."""

    ended = False

    def __init__(self, vocab: int) -> None:
        self.bits = np.packbits(np.random.default_rng(1).random(vocab) < 1 / 3, bitorder="little")

    def mask(self) -> Any:
        return self.bits

    def push(self, token: int) -> None:
        pass


def adjust(vocab: int, parameters: dict[str, Any]) -> Work:
    rng = np.random.default_rng(2)
    params = SamplingParams(**parameters)
    grammar: Any = IrregularMask(vocab) if params.structured else None
    history = History(params, rng.integers(0, vocab, 2000).tolist(), vocab, grammar=grammar)
    history.walk(rng.integers(0, vocab, 1000).tolist())
    history.commit()
    return lambda row, position: history.process(row)


DISTINCT = 8  # rows to take turns, so that none stays in the cache nearest to the core


def make_rows(kind: str, vocab: int) -> list[Logits]:
    rng = np.random.default_rng(vocab)
    rows = rng.normal(0, 3, (DISTINCT, vocab))
    if kind == "peaked":
        for row in rows:
            row[rng.integers(0, vocab, 20)] = row.max() + rng.exponential(4, 20)
    return list(rows.astype(np.float32))


def median_ms(work: Work, distinct: list[Logits], count: int) -> float:
    times = []
    for position in range(count):
        row = distinct[position % DISTINCT]
        start = time.perf_counter()
        work(row, position)
        times.append(time.perf_counter() - start)
    return round(1e3 * median(times), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    added: list[dict[str, Any]] = []
    for vocab in VOCABS:
        for name, parameters in ADJUSTMENTS.items():
            ms = median_ms(adjust(vocab, parameters(vocab)), make_rows("normal", vocab), args.rows)
            added.append({"vocab": vocab, "adjustment": name, "median_ms": ms})
        for kind in ("normal", "peaked"):
            distinct = make_rows(kind, vocab)
            for setting, work in SETTINGS.items():
                times = {path: median_ms(work(path), distinct, args.rows) for path in native.path_names()}
                times["pure"] = median_ms(work(None), distinct, -(-args.rows // 10))
                results.append({"vocab": vocab, "logits": kind, "setting": setting, "median_ms": times})
    if args.json:
        print(json.dumps({"rows": results, "adjustments": added}))
        return
    print(f"{'vocab':>7} {'logits':<7} {'setting':<11}" + "".join(f"{name:>10}" for name in times))
    for result in results:
        figures = "".join(f"{ms:>10.3f}" for ms in result["median_ms"].values())
        print(f"{result['vocab']:>7} {result['logits']:<7} {result['setting']:<11}" + figures)
    print(f"\n{'vocab':>7} {'adjustment':<13}{'ms':>8}")
    for entry in added:
        print(f"{entry['vocab']:>7} {entry['adjustment']:<13}{entry['median_ms']:>8.3f}")


if __name__ == "__main__":
    main()
