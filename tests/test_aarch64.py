"""The C++ tests on aarch64: cross-compiled, and run by an emulator of user programs."""

import platform
import shutil
from pathlib import Path

import pytest

from cpp_build import ROOT, build_tests, kernel_object, run, symbols_shared_beyond

TOOLS = "aarch64-linux-gnu-"
SYSTEM = "/usr/aarch64-linux-gnu"  # where the libraries of the cross compiler lie
PATHS = ["dotprod", "portable"]
SOURCES = sorted((ROOT / "csrc" / "tests").glob("*_test.cc"))

pytestmark = [
    pytest.mark.skipif(platform.machine() == "aarch64", reason="the machine is aarch64: all other tests cover it"),
    pytest.mark.skipif(not shutil.which(TOOLS + "g++"), reason=f"needs {TOOLS}g++ (Debian: g++-aarch64-linux-gnu)"),
    pytest.mark.skipif(not shutil.which("qemu-aarch64"), reason="needs qemu-aarch64 (Debian: qemu-user)"),
]


@pytest.fixture(scope="module")
def build() -> Path:
    return build_tests("aarch64", TOOLS + "g++", "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64")


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_kernels_under_emulation(build: Path, source: Path) -> None:
    output = run("qemu-aarch64", "-L", SYSTEM, "-cpu", "max", build / "csrc" / "tests" / source.stem)
    tested = [line.removeprefix("path: ") for line in output.splitlines() if line.startswith("path: ")]
    assert tested == (PATHS if "tested_paths()" in source.read_text() else [])


@pytest.mark.parametrize("path", PATHS)
def test_objects_keep_to_their_path(build: Path, path: str) -> None:
    assert symbols_shared_beyond(TOOLS + "nm", kernel_object(build, path), path) == []
