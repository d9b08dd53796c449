"""The C++ tests under the address and undefined-behaviour sanitizers, with warnings as errors, and what the objects of
the kernels may hold."""

import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "sanitize"  # kept: a second run compiles what has changed
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


def run(*command: str | Path, **environment: str) -> str:
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


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    probe = tmp_path_factory.mktemp("probe") / "probe.cc"
    probe.write_text("int main() {}\n")
    flags = ["-fsanitize=address,undefined", "-o", str(probe.with_suffix(""))]
    if subprocess.run([COMPILER, *flags, str(probe)], capture_output=True).returncode:
        pytest.skip(f"{COMPILER} has no sanitizers here")
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / ".lock").open("w") as lock:  # two test runs may share the checkout
        fcntl.flock(lock, fcntl.LOCK_EX)
        options = ["-DPILOTFISH_MODULE=OFF", "-DPILOTFISH_TESTS=ON", "-DPILOTFISH_SANITIZE=ON", "-DPILOTFISH_STRICT=ON"]
        run(program("cmake"), "-S", ROOT, "-B", BUILD, f"-DCMAKE_CXX_COMPILER={COMPILER}", *options)
        run(program("cmake"), "--build", BUILD, "--parallel", str(os.cpu_count() or 1))
    return BUILD


def test_kernels_under_sanitizers(build: Path) -> None:
    # Looking for leaks needs ptrace, which containers forbid.
    listing = run(
        program("ctest"), "--test-dir", build, "--output-on-failure", "--timeout", "300", ASAN_OPTIONS="detect_leaks=0"
    )
    assert "100% tests passed" in listing


@pytest.mark.skipif(not (shutil.which("objdump") and shutil.which("nm")), reason="needs objdump and nm")
@pytest.mark.parametrize("path", ["portable", "avx2", "avx512"])
def test_objects_keep_to_their_path(build: Path, path: str) -> None:
    """The linker keeps one copy of a function that several objects define: it must not be one that needs more than the
    machine has, so all that a kernel object shares lies in the namespace of its path."""
    kernels = build / "CMakeFiles" / f"kernels_{path}.dir" / "csrc" / "kernels.cc.o"
    if not kernels.exists():
        pytest.skip(f"no {path} path on this processor")
    shared = [line for line in run("nm", "--demangle", kernels).splitlines() if re.search(r" [WVu] ", line)]
    assert [line for line in shared if f"pilotfish::{path}::" not in line] == []
    registers = set(re.findall(r"%([xyz])mm\d", run("objdump", "--disassemble", kernels)))
    assert registers <= {"portable": set("x"), "avx2": set("xy"), "avx512": set("xyz")}[path]
