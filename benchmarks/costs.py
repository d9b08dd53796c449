"""How well the cost model predicts what a pass takes.

    python benchmarks/costs.py MODEL [--draft MODEL] [--seconds 3] [--steps 25] [--json]

Calibrates, then runs real steps: 1 to 8 requests, prompts of many lengths, n-gram drafts of several lengths, short and
long contexts. Before each pass the model predicts its time, then it is told. `measured` is the error of the
calibration alone, `corrected` that of the model which learns from the steps, `error` in both the median of
|predicted - real| / real; `bias` the median of predicted / real - 1 of the second. `--draft` does the same for another
model.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from pilotfish.bench import machine
from pilotfish.calibrate import measure
from pilotfish.control.cost import CostModel, Load
from pilotfish.llm import LLM
from pilotfish.loaders.kept import shown
from pilotfish.metrics import now_ms
from pilotfish.params import SamplingParams
from pilotfish.program import KV, Executable, Floats, Result
from pilotfish.tree import TreeBatch

CONTEXT = 4096
# Requests at a time, tokens of each one's prompt, draft tokens (0: none).
MIX = (
    (1, 100, 0),
    (1, 300, 4),
    (1, 1500, 8),
    (2, 200, 3),
    (4, 60, 0),
    (4, 120, 2),
    (4, 700, 6),
    (8, 40, 0),
    (8, 90, 4),
    (8, 300, 1),
    (1, 3000, 2),
    (2, 1200, 0),
)
BINS = (1, 2, 4, 8, 16, 32, 64, 128, 512)


@dataclass
class Watch:
    """An executable that tells what each pass had to do and what it took."""

    executable: Executable
    tell: Callable[[Load, float], None]

    def forward(self, batch: TreeBatch, kv: KV, logits: bool, feeds: Sequence[Floats] = ()) -> Result:
        load = Load.of(batch)
        started = now_ms()
        result = self.executable.forward(batch, kv, logits, feeds)
        self.tell(load, now_ms() - started)
        return result


@dataclass(frozen=True)
class Seen:
    load: Load
    real_ms: float
    measured_ms: float  # what the calibration alone says
    corrected_ms: float


def prompt(llm: LLM, tokens: int, rng: random.Random) -> list[int]:
    """Words of this text in another order, some of which repeat, so that drafts are found."""
    words = (__doc__ or "").split()
    phrases = [" ".join(words[at : at + 6]) for at in range(0, len(words), 6)]
    ids: list[int] = []
    while len(ids) < tokens:
        ids += llm.encode(" " + rng.choice(phrases))
    return ids[:tokens]


def evaluate(name: str, seconds: float, steps: int) -> dict[str, Any]:
    llm = LLM(name, context=CONTEXT)
    target = llm.target
    started = now_ms()
    with shown(f"measuring {name}") as progress:
        samples = measure(
            target.executable,
            target.kv,
            target.program,
            num_blocks=target.num_blocks,
            seconds=seconds,
            progress=progress,
        )
    calibration_ms = now_ms() - started
    fixed, model = CostModel.fit(samples), CostModel.fit(samples)
    seen: list[Seen] = []

    def tell(load: Load, ms: float) -> None:
        seen.append(Seen(load, ms, fixed.ms(load), model.ms(load)))
        model.observe(load, ms)

    llm.target = replace(target, executable=Watch(target.executable, tell))
    rng = random.Random(1)
    for requests, length, k in MIX:
        engine = llm.engine(f"ngram:k={k}" if k else "off", max_num_seqs=8)
        for _ in range(requests):
            engine.add(prompt(llm, length, rng), SamplingParams(max_tokens=steps * (k + 1), ignore_eos=True))
        stop = len(seen) + steps + -(-requests * length // 512)
        while engine.busy and len(seen) < stop:
            engine.step()
    model.check()
    lines = [summary("all", seen)]
    for least, most in zip(BINS, [*(bound - 1 for bound in BINS[1:-1]), BINS[-1]], strict=False):
        within = [item for item in seen if least <= item.load.rows <= most]
        if within:
            lines.append(summary(f"{least}-{most}" if most > least else str(least), within))
    passes = {load: [ms for other, ms in samples if other == load] for load, _ in samples}
    spreads = [(max(ms) - min(ms)) / median(ms) for ms in passes.values() if len(ms) > 1]
    return {
        "model": llm.config.name or name,
        "machine": machine(llm),
        "calibration_ms": round(calibration_ms),
        "shapes": len(passes),
        "passes": len(samples),
        "spread": round(median(spreads), 3) if spreads else None,
        "cost": fixed.as_dict(),
        "corrected": model.as_dict(),
        "rows": lines,
    }


def summary(rows: str, seen: list[Seen]) -> dict[str, Any]:
    return {
        "rows": rows,
        "passes": len(seen),
        "median_ms": round(median(item.real_ms for item in seen), 2),
        "measured_error": round(median(abs(item.measured_ms / item.real_ms - 1) for item in seen), 4),
        "corrected_error": round(median(abs(item.corrected_ms / item.real_ms - 1) for item in seen), 4),
        "bias": round(median(item.corrected_ms / item.real_ms - 1 for item in seen), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--draft", metavar="MODEL")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [evaluate(name, options.seconds, options.steps) for name in (options.model, options.draft) if name]
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for report in found:
        print(f"{report['model']} ({report['machine']}): {report['shapes']} shapes, {report['passes']} passes")
        print(f"in {report['calibration_ms']} ms; the same shape differs by {report['spread'] or 0:.0%}")
        cost = report["cost"]
        print("  rows " + " ".join(f"{rows}:{ms:.1f}" for rows, ms in zip(cost["rows"], cost["ms"], strict=True)))
        print(
            "  ms for 1000 tokens of context {:.3f}, of work {:.3f}, for an output {:.3f}".format(
                1e3 * cost["context_ms"], 1e3 * cost["work_ms"], cost["output_ms"]
            )
        )
        print(f"  speed in the end {report['corrected']['speed']:.2f}")
        print(f"  {'rows':>8} {'passes':>7} {'median ms':>10} {'measured':>9} {'corrected':>10} {'bias':>7}")
        for line in report["rows"]:
            print(
                f"  {line['rows']:>8} {line['passes']:>7} {line['median_ms']:>10.2f} {line['measured_error']:>9.1%} "
                f"{line['corrected_error']:>10.1%} {line['bias']:>7.1%}"
            )


if __name__ == "__main__":
    main()
