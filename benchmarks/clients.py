"""Several requests at once: which speculation gives the most tokens, and whether the controller finds it.

    python benchmarks/clients.py MODEL [--draft DRAFT] [--clients 1,4,16] [--tokens 64] [--longest 120] [--each 2]
        [--turns 2] [--json]

Each of the clients sends its next prompt when its answer has come, so the batch is full all the time; the run ends when
the first client has nothing left to send. Settings take turns: off, n-gram, suffix and draft model with fixed lengths,
and what the controller chooses. Prompts are those of benchmarks/prompts of at most `--longest` tokens, all different;
they are in the prefix cache before the clock starts, so it measures decoding, and what a draft model has to catch up.
Every text must be that of `off`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from pilotfish.bench import machine, read_prompts
from pilotfish.drafters.speculation import Speculation, parse_speculation
from pilotfish.llm import LLM
from pilotfish.metrics import now_ms
from pilotfish.params import SamplingParams

KV_BYTES = 1 << 30  # all prompts stay in the cache
PROMPTS = Path(__file__).parent / "prompts"


def settings(draft: str | None) -> list[str]:
    """`off` and the fixed ones, then those under the controller."""
    found = ["off", "ngram:k=3", "suffix:k=3", "suffix:k=8"]
    if draft is not None:
        found += [f"draft:{draft},k=2", f"draft:{draft},k=4"]
    return [*found, "auto", *([f"auto+draft:{draft}"] if draft is not None else [])]


def run(
    llm: LLM, speculation: Speculation, clients: int, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[float, dict[int, tuple[int, ...]]]:
    """Tokens per second while all clients wait for an answer, and what was written for each prompt."""
    engine = llm.engine(speculation, answers=True, max_num_seqs=clients)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=1), speculation=Speculation())
    for _ in engine.run():
        pass
    left = list(enumerate(prompts))[::-1]
    places: dict[int, int] = {}
    answers: dict[int, tuple[int, ...]] = {}

    def send() -> None:
        place, prompt = left.pop()
        places[engine.add(prompt, params)[0].id] = place

    for _ in range(clients):
        send()
    written, started = 0, now_ms()
    while True:
        for update in engine.step():
            written += len(update.tokens)
            if update.finished:
                answers[places[update.request.id]] = tuple(update.request.output)
                if not left:
                    return 1e3 * written / (now_ms() - started), answers
                send()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--draft")
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--longest", type=int, default=120, help="tokens of a prompt at most")
    parser.add_argument("--each", type=int, default=2, help="prompts that each client sends after its first")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    llm = LLM(args.model, context=4096, max_num_seqs=16, kv_cache_memory_bytes=KV_BYTES)
    parsed = {text: parse_speculation(text) for text in settings(args.draft)}
    prompts = [llm.encode(sample.prompt, chat=True) for sample in read_prompts(PROMPTS)]
    prompts = [prompt for prompt in prompts if len(prompt) <= args.longest]
    random.Random(0).shuffle(prompts)
    report: dict[str, dict[str, dict[str, float | bool]]] = {}
    for clients in map(int, args.clients.split(",")):
        speeds: dict[str, list[float]] = {text: [] for text in parsed}
        equal = dict.fromkeys(parsed, True)
        for speculation in parsed.values():  # everyone knows its costs, and the caches are warm
            run(llm, speculation, 1, prompts[-2:], 12)
        for turn in range(args.turns):
            count = min(len(prompts), clients + args.each * clients)
            chosen = [prompts[(turn * count + index) % len(prompts)] for index in range(count)]
            plain: dict[int, tuple[int, ...]] = {}
            for text, speculation in parsed.items():
                speed, answers = run(llm, speculation, clients, chosen, args.tokens)
                plain = plain or answers
                equal[text] = equal[text] and all(plain[at] == answers[at] for at in plain.keys() & answers.keys())
                speeds[text].append(speed)
        fixed = [text for text in parsed if not text.startswith("auto")]
        best = [max(speeds[text][turn] for text in fixed) for turn in range(args.turns)]
        report[str(clients)] = {
            text: {
                "tokens_per_second": round(median(found), 2),
                "over_off": round(median(x / y for x, y in zip(found, speeds["off"], strict=True)), 3),
                "over_best_fixed": round(median(x / y for x, y in zip(found, best, strict=True)), 3),
                "equal": equal[text],
            }
            for text, found in speeds.items()
        }
        if not args.json:
            for text, row in report[str(clients)].items():
                print(f"{clients:>3} clients  {text:<44} {row}")
    if args.json:
        print(json.dumps({"clients": report, "model": llm.config.name, "machine": machine(llm)}))


if __name__ == "__main__":
    main()
