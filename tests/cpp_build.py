"""Builds the C++ tests of csrc/tests in a folder of their own."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, **environment: str) -> str:
    """What the command writes; it must succeed."""
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def program(name: str) -> Path:
    """A program of CMake, from the path or from the Python package."""
    found = shutil.which(name)
    if found:
        return Path(found)
    package = pytest.importorskip("cmake", reason="needs CMake, from the system or from the Python package")
    return Path(package.CMAKE_BIN_DIR) / name


def build_tests(name: str, compiler: str, *options: str) -> Path:
    """The folder build/NAME with the test programs, warnings as errors. It is kept: a second run compiles what has
    changed."""
    folder = ROOT / "build" / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:  # two test runs may share the checkout
        fcntl.flock(lock, fcntl.LOCK_EX)
        always = ["-DPILOTFISH_MODULE=OFF", "-DPILOTFISH_TESTS=ON", "-DPILOTFISH_STRICT=ON"]
        run(program("cmake"), "-S", ROOT, "-B", folder, f"-DCMAKE_CXX_COMPILER={compiler}", *always, *options)
        run(program("cmake"), "--build", folder, "--parallel", str(os.cpu_count() or 1))
    return folder


def kernel_object(folder: Path, path: str) -> Path:
    """The kernels of one path."""
    return folder / "CMakeFiles" / f"kernels_{path}.dir" / "csrc" / "kernels.cc.o"


def symbols_shared_beyond(nm: str, kernels: Path, path: str) -> list[str]:
    """What the linker may take from this object for others, or from others for it, outside the namespace of its
    path."""
    shared = [line for line in run(nm, "--demangle", kernels).splitlines() if re.search(r" [WVu] ", line)]
    return [line for line in shared if f"pilotfish::{path}::" not in line]
