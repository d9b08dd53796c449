"""What took long to find out, kept in a folder for the next start; and a bar while it takes long."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

logger = logging.getLogger("pilotfish")

_T = TypeVar("_T")


def kept_or_made(
    folder: Path,
    key: Mapping[str, object],
    field: str,
    what: str,
    *,
    make: Callable[[], _T],
    write: Callable[[_T], object],
    read: Callable[[Any], _T],
) -> _T:
    """What `key` describes: read from its file in `folder`, else made and kept there, in `field` of a JSON object.

    `read` turns what `write` gave back; it raises ValueError, TypeError or KeyError for anything else. A file that is
    damaged or of another key is made again. A folder that can not be written costs only the next start the time; `what`
    is for the line that says so.
    """
    described = json.loads(json.dumps(key, sort_keys=True, default=str))
    name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]
    path = folder / f"{name}.json"
    try:
        content = json.loads(path.read_text())
        if isinstance(content, dict) and content.get("key") == described:
            return read(content[field])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass  # as if there were none
    made = make()
    try:
        _write(path, {"key": described, field: write(made)})
    except OSError as error:
        logger.warning("%s can not be kept in %s and will be found out again: %s", what, folder, error)
    return made


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """In one piece, or not at all: another process may read or write the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False) as file:
        try:
            json.dump(content, file)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


@contextmanager
def shown(what: str) -> Iterator[Callable[[float], None]]:
    """Something to call with the share that is done, which shows as a bar on stderr when that is a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda done: bar.update(task, completed=done)
