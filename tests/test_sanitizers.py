"""The C++ tests under the address and undefined-behaviour sanitizers, with warnings as errors, and what the objects of
the kernels may hold."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cpp_build import build_tests, kernel_object, program, run, symbols_shared_beyond

COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    probe = tmp_path_factory.mktemp("probe") / "probe.cc"
    probe.write_text("int main() {}\n")
    flags = ["-fsanitize=address,undefined", "-o", str(probe.with_suffix(""))]
    if subprocess.run([COMPILER, *flags, str(probe)], capture_output=True).returncode:
        pytest.skip(f"{COMPILER} has no sanitizers here")
    return build_tests("sanitize", COMPILER, "-DPILOTFISH_SANITIZE=ON")


def test_kernels_under_sanitizers(build: Path) -> None:
    # Looking for leaks needs ptrace, which containers forbid.
    listing = run(
        program("ctest"), "--test-dir", build, "--output-on-failure", "--timeout", "300", ASAN_OPTIONS="detect_leaks=0"
    )
    assert "100% tests passed" in listing


@pytest.mark.skipif(not (shutil.which("objdump") and shutil.which("nm")), reason="needs objdump and nm")
@pytest.mark.parametrize("path", ["portable", "avx2", "avxvnni", "avx512"])
def test_objects_keep_to_their_path(build: Path, path: str) -> None:
    """The linker keeps one copy of a function that several objects define: it must not be one that needs more than the
    machine has, so all that a kernel object shares lies in the namespace of its path."""
    kernels = kernel_object(build, path)
    if not kernels.exists():
        pytest.skip(f"no {path} path on this processor")
    assert symbols_shared_beyond("nm", kernels, path) == []
    registers = set(re.findall(r"%([xyz])mm\d", run("objdump", "--disassemble", kernels)))
    assert registers <= {"portable": set("x"), "avx2": set("xy"), "avxvnni": set("xy"), "avx512": set("xyz")}[path]
