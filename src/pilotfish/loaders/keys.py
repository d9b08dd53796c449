"""Typed reading of a model's metadata, so that a wrong or unknown value is named and none is passed over."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from pilotfish.errors import InputError


def short(value: object) -> str:
    """A value as part of one line."""
    text = "".join(char if char.isprintable() else "?" for char in " ".join(str(value).split()))
    return text if len(text) <= 60 else f"{text[:60]}..."


class Keys:
    """Values by key, null meaning absent; remembers which were read. `prefix` stands before a key in errors."""

    def __init__(self, values: Mapping[str, Any], prefix: str) -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self._prefix = prefix
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def integer(self, key: str, default: int | None = None) -> int:
        """Raises InputError when the key is missing without a default, or is no whole number of 32 bits."""
        value: int = self._get(key, (int,), default, "a whole number")
        if abs(value) >= 1 << 31:
            raise InputError(f"{self._prefix}{key} is {short(value)}; it must fit in 32 bits")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Raises InputError when the key is missing without a default, or is no finite number."""
        value = self._get(key, (int, float), default, "a number")
        if not abs(value) <= sys.float_info.max:
            raise InputError(f"{self._prefix}{key} is {short(value)}; it must be finite")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Raises InputError when the key is missing without a default, or is no text."""
        value: str = self._get(key, (str,), default, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Raises InputError when the key is neither true nor false."""
        value: bool = self._get(key, (bool,), default, "true or false")
        return value

    def neutral(self, values: Mapping[str, Any]) -> None:
        """Raise InputError when one of these keys is there with another value than the one without effect."""
        for key, expected in values.items():
            self._read.add(key)
            if key in self._values and not np.array_equal(self._values[key], expected):
                raise InputError(f"{self._prefix}{key} = {short(self._values[key])} is not supported")

    def all_read(self, without_effect: tuple[str, ...]) -> None:
        """Raise InputError when a key is left that may change what the model computes."""
        for key, value in self._values.items():
            if key not in self._read and key not in without_effect:
                raise InputError(f"{self._prefix}{key} = {short(value)} is not supported")

    def _get(self, key: str, types: tuple[type, ...], default: Any, wanted: str) -> Any:
        self._read.add(key)
        value = self._values.get(key, default)
        if value is None:
            raise InputError(f"{self._prefix}{key} is missing")
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise InputError(f"{self._prefix}{key} is {short(value)}; it must be {wanted}")
        return value
