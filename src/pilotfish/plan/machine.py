"""The device that is planned for: by its datasheet, by two figures given, or this machine, measured."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass

from rich.console import Console

from pilotfish.backends.native import gmac_per_s, read_gb_per_s, usable_cores
from pilotfish.control.memory import available_memory
from pilotfish.errors import InputError


@dataclass(frozen=True)
class Machine:
    """What a roofline needs, and the memory there is; None where nobody said."""

    name: str
    gb_per_s: float
    tflop_per_s: float  # dense, of 16-bit floats; for this machine of small integers
    memory_bytes: int | None
    measured: bool = False


# Memory in GB, its GB/s and dense TFLOP/s of 16-bit floats (no sparsity), one device, from the makers' datasheets.
_DEVICES: dict[str, tuple[int, float, float]] = {
    "a10": (24, 600, 125),
    "a100": (80, 2039, 312),  # SXM
    "a100-40gb": (40, 1555, 312),
    "b200": (180, 8000, 2250),
    "h100": (80, 3350, 989),  # SXM
    "h100-pcie": (80, 2000, 756),
    "h200": (141, 4800, 989),
    "l4": (24, 300, 121),
    "l40s": (48, 864, 362),
    "mi300x": (192, 5300, 1307),
    "rtx3090": (24, 936, 71),
    "rtx4090": (24, 1008, 165),
    "t4": (16, 320, 65),
    "v100": (32, 900, 125),
}


def device(name: str) -> Machine:
    """A device of the table. Raises InputError when it is not there."""
    found = _DEVICES.get(name.lower())
    if found is None:
        raise InputError(
            f"--device {name!r} is not known; known are {', '.join(_DEVICES)}; else give --bandwidth and --peak"
        )
    gigabytes, gb_per_s, tflop_per_s = found
    return Machine(name.lower(), gb_per_s, tflop_per_s, gigabytes * 10**9)


def choose(name: str | None, gb_per_s: float | None, tflop_per_s: float | None) -> Machine:
    """The device of that name with what else is given in place of its figures; with nothing given this machine.

    Raises InputError when figures make no sense or one of two is missing.
    """
    for flag, value in (("--bandwidth", gb_per_s), ("--peak", tflop_per_s)):
        if value is not None and not (0 < value < math.inf):
            raise InputError(f"{flag} {value:g} must be a positive number")
    if name is not None:
        found = device(name)
        if gb_per_s is None and tflop_per_s is None:
            return found
        return Machine(
            f"{found.name}, changed", gb_per_s or found.gb_per_s, tflop_per_s or found.tflop_per_s, found.memory_bytes
        )
    if gb_per_s is not None and tflop_per_s is not None:
        return Machine("as given", gb_per_s, tflop_per_s, None)
    if gb_per_s is not None or tflop_per_s is not None:
        raise InputError("--bandwidth and --peak describe one device: give both, or --device NAME beside one of them")
    return measure()


def measure() -> Machine:
    """This machine with all its cores: what it reads, and its products of small integers (takes a second)."""
    with Console(stderr=True).status("measuring this machine") if sys.stderr.isatty() else nullcontext():
        gb_per_s, gmacs = read_gb_per_s(), gmac_per_s()
    name = f"this machine ({usable_cores()} cores)"
    return Machine(name, gb_per_s, 2e-3 * gmacs, available_memory(), measured=True)
