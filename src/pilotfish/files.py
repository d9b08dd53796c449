"""What a person names on the command line: text files, and sizes in bytes."""

from __future__ import annotations

import re
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


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """A size such as 2GiB, 512MB or 1000000. Raises InputError."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if found is None or float(found[1]) == 0:
        raise InputError(f"the size {text!r} must be a number of bytes from 1 with a unit, as in 2GiB or 512MB")
    return int(float(found[1]) * _UNITS[found[2] or ""])
