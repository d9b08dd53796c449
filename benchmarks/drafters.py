"""How long a proposal of the drafters without a model takes, and what would be accepted.

    python benchmarks/drafters.py [--pool 200000] [--prompt 2000] [--steps 300] [--budget 16] [--json]
    python benchmarks/drafters.py --model demo --prompts benchmarks/prompts [--tokens 256] [--temperature 0] ...

The output of each request is known beforehand, and a step takes the drafts that agree with it and one token more.

Without --model texts are runs of passages of 40 tokens out of a library, with about ten other tokens between; all
tokens follow Zipf's law. `novel` outputs are other tokens only, `copying` ones repeat pieces of 40 to 200 tokens of the
prompt, `seen` ones are of the library, which the prompt does not show but earlier outputs do, `loop` repeats 12 tokens.
With --model texts are what the model answers to the prompts of a file or folder, by class, written without speculation.

`drafter:shared=0` keeps no earlier outputs. Lookahead has no window here, as no model says what follows it: what is
measured is its pool, filled from the text. `first` is the step that takes in the prompt, in ms; `median` and `p99`
are the other steps, in microseconds; `accepted` and `drafted` are tokens per step; `loss` is the mean -log of the
chance that a confidence gave to what became of its node, over nodes whose parent stood. Last, what the earlier outputs
take in memory.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import median

from pilotfish import LLM, SamplingParams
from pilotfish.bench.workload import read_prompts
from pilotfish.drafters.base import Drafter, DraftRequest
from pilotfish.drafters.lookahead import LookaheadDrafter
from pilotfish.drafters.ngram import NgramDrafter
from pilotfish.drafters.suffix import SuffixDrafter
from pilotfish.tree import DraftTree

VOCAB = 20_000
OUTPUT = 500  # tokens of an earlier output
DRAFTERS: dict[str, Callable[[int], Drafter]] = {
    "ngram": lambda pool: NgramDrafter(),
    "suffix": lambda pool: SuffixDrafter(shared=pool),
    "suffix:shared=0": lambda pool: SuffixDrafter(shared=0),
    "lookahead:window=0": lambda pool: LookaheadDrafter(window=0),
}

Text = tuple[list[int], list[int]]  # prompt and output


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

    def request(self, kind: str, prompt: int, output: int) -> Text:
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


@dataclass
class Tally:
    """What the steps of a kind of text took and brought."""

    firsts: list[float] = field(default_factory=list)  # seconds
    times: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    losses: list[float] = field(default_factory=list)

    def line(self, drafter: str, kind: str) -> dict[str, float | str]:
        steps = len(self.times) + len(self.firsts)
        return {
            "drafter": drafter,
            "output": kind,
            "first_ms": 1e3 * median(self.firsts),
            "median_us": 1e6 * median(self.times or self.firsts),
            "p99_us": 1e6 * sorted(self.times or self.firsts)[len(self.times) * 99 // 100],
            "accepted": self.accepted / steps,
            "drafted": self.drafted / steps,
            "loss": sum(self.losses) / max(1, len(self.losses)),
        }

    def write(self, drafter: Drafter, id: int, text: Text, budget: int) -> None:
        """Draft for a request until its output is written."""
        prompt, output = text
        tokens, done = list(prompt), 0
        while done < len(output):
            depth = min(budget, len(output) - done)
            request = DraftRequest(id, tokens, budget, depth, prompt=len(prompt))
            started = time.perf_counter()
            (tree,) = drafter.propose([request])
            (self.times if done else self.firsts).append(time.perf_counter() - started)
            stood = self._accept(tree, output[done:])
            self.accepted += stood
            self.drafted += len(tree)
            tokens += output[done : done + stood + 1]
            done += stood + 1
        drafter.end(id)

    def _accept(self, tree: DraftTree, truth: list[int]) -> int:
        tokens, parents, chances = tree.tokens.tolist(), tree.parents.tolist(), tree.all_confidences()
        node: int | None = -1
        count = 0
        while node is not None and count < len(truth):
            after = None
            for child in (child for child in range(node + 1, len(tokens)) if parents[child] == node):
                chance = min(max(chances[child], 0.001), 0.999)
                if tokens[child] == truth[count]:
                    after = child
                self.losses.append(-math.log(chance if after == child else 1 - chance))
            node = after
            count += node is not None
        return count


def measure(name: str, pool: int, prompt: int, steps: int, budget: int) -> list[dict[str, float | str]]:
    """Made-up texts."""
    texts = Texts(1)
    drafter = DRAFTERS[name](pool)
    for id in range(pool // OUTPUT):
        tokens = texts.other(1)
        drafter.propose([DraftRequest(id, tokens, 1, 1, prompt=1)])
        tokens += texts.passages(OUTPUT)
        drafter.end(id)
    lines: list[dict[str, float | str]] = []
    id = pool
    for kind in ("novel", "copying", "seen", "loop"):
        tally = Tally()
        while len(tally.times) < steps:
            id += 1
            tally.write(drafter, id, texts.request(kind, prompt, 1000), budget)
        lines.append(tally.line(name, kind))
    return lines


def answers(model: str, prompts: Path, count: int, temperature: float) -> dict[str, list[Text]]:
    """class -> what the model writes without speculation, and the prompts."""
    llm = LLM(model, speculation="off")
    samples = read_prompts(prompts)
    params = SamplingParams(max_tokens=count, temperature=temperature, seed=1)
    completions = llm.generate([sample.prompt for sample in samples], params, chat=True)
    found: dict[str, list[Text]] = {}
    for sample, completion in zip(samples, completions, strict=True):
        found.setdefault(sample.kind, []).append((llm.encode(sample.prompt, chat=True), list(completion.tokens)))
    return found


def replay(name: str, pool: int, budget: int, texts: dict[str, list[Text]]) -> list[dict[str, float | str]]:
    """Real texts, one request after the other; what was written before is in the pool."""
    drafter = DRAFTERS[name](pool)
    lines: list[dict[str, float | str]] = []
    id = 0
    for kind, requests in texts.items():
        tally = Tally()
        for text in requests:
            id += 1
            tally.write(drafter, id, text, budget)
        lines.append(tally.line(name, kind))
    return lines


def memory_per_token(pool: int) -> float:
    """Bytes that the pool takes for a token."""
    texts = Texts(1)
    outputs = [texts.passages(OUTPUT) for _ in range(pool // OUTPUT)]
    tracemalloc.start()
    drafter = SuffixDrafter(shared=pool)
    for id, output in enumerate(outputs):
        tokens = [1]
        drafter.propose([DraftRequest(id, tokens, 1, 1, prompt=1)])
        tokens += output
        drafter.end(id)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert drafter.pool is not None
    return size / drafter.pool.size


def show(lines: Iterable[dict[str, float | str]]) -> None:
    columns = ("first ms", "median us", "p99 us", "accepted", "drafted", "loss")
    print(f"{'drafter':18} {'output':11}" + "".join(f" {column:>9}" for column in columns))
    for line in lines:
        print(
            f"{line['drafter']:18} {line['output']:11} {line['first_ms']:9.2f} {line['median_us']:9.1f} "
            f"{line['p99_us']:9.0f} {line['accepted']:9.2f} {line['drafted']:9.2f} {line['loss']:9.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", type=int, default=200_000)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--model", help="write the texts with this model")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "prompts")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.model:
        texts = answers(options.model, options.prompts, options.tokens, options.temperature)
        lines = [line for name in DRAFTERS for line in replay(name, options.pool, options.budget, texts)]
    else:
        made_up = options.pool, options.prompt, options.steps, options.budget
        lines = [line for name in DRAFTERS for line in measure(name, *made_up)]
    memory = memory_per_token(options.pool)
    if options.json:
        print(json.dumps({"proposals": lines, "pool_bytes_per_token": memory}, indent=1))
        return
    show(lines)
    print(f"the pool takes {memory:.0f} bytes per token")


if __name__ == "__main__":
    main()
