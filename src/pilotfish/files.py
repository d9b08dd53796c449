"""Text files that a person names on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

from pilotfish.errors import InputError


def read_text(file: str, what: str) -> str:
    """The text in a file, or stdin for -. Raises InputError."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise InputError(f"can not read the {what} file {file}: {error.strerror}") from None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"the {what} file {file} is not UTF-8 text: byte {error.start} is invalid") from None
