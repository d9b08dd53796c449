"""How many instructions the kernels take, counted and not timed: the same on every run, however busy the machine is.

    python benchmarks/instructions.py [--json]

Builds `kernel_bench` with CMake into a temporary directory and runs it under valgrind's callgrind (Debian: valgrind).
Callgrind knows AVX2 but neither AVX-512 nor AVX-VNNI, so the paths it counts are avx2 and portable on x86-64.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PATHS = ("avx2", "dotprod", "portable")
LINEAR = [
    ["linear", kind, rows, 64, 1536, 1] for kind in ("Q4_K", "Q6_K", "Q4_1", "Q8_0", "BF16") for rows in (1, 4, 8, 16)
]
CASES = [*LINEAR, *(["attend", 128, rows, 6, 1] for rows in (1, 8))]


def build(folder: Path) -> Path:
    """The compiled kernel_bench."""
    options = ["-DPILOTFISH_MODULE=OFF", "-DPILOTFISH_BENCH=ON"]
    for command in (["cmake", "-S", ROOT, "-B", folder, *options], ["cmake", "--build", folder, "--parallel"]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "kernel_bench"


def count(bench: Path, path: str, case: list[object]) -> dict[str, Any] | None:
    """Instructions of one run of the kernel; None when the machine, or valgrind, lacks the path."""
    done = subprocess.run(
        [
            "valgrind",
            "--tool=callgrind",
            "--callgrind-out-file=/dev/null",
            "--toggle-collect=measured",
            bench,
            path,
            *map(str, case),
        ],
        capture_output=True,
        text=True,
    )
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or collected is None:
        return None
    report = json.loads(done.stdout)
    instructions = int(collected.group(1))
    return {
        "path": path,
        "kernel": report["kernel"],
        "rows": report["rows"],
        "instructions": instructions,
        "per_1000_macs": round(1000 * instructions / report["macs"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for tool in ("valgrind", "cmake"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is needed and not installed")
    with tempfile.TemporaryDirectory() as folder:
        bench = build(Path(folder))
        found = [result for path in PATHS for case in CASES if (result := count(bench, path, case))]
    if args.json:
        print(json.dumps(found))
        return
    print("path      kernel  rows  instructions  per 1000 multiply-adds")
    for row in found:
        print(
            f"{row['path']:<9} {row['kernel']:<7} {row['rows']:4} {row['instructions']:13} {row['per_1000_macs']:12.2f}"
        )


if __name__ == "__main__":
    main()
