"""How much of the processors other work took while something was measured: what to believe of the figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from time import monotonic


class Neighbours:
    """Watches from when it is made. `own` are processes that belong to the measurement beside this one."""

    def __init__(self, own: Sequence[int] = ()) -> None:
        self._own = own
        self._began = self._read()

    def cores(self) -> float | None:
        """Processors that others, and the host of a virtual machine, kept busy on average; None if nobody counts it."""
        now = self._read()
        if self._began is None or now is None or now[0] <= self._began[0]:
            return None
        seconds, busy = now[0] - self._began[0], now[1] - self._began[1]
        return round(max(0.0, busy / seconds), 2)

    def _read(self) -> tuple[float, float] | None:
        """The clock, and seconds that others have had so far."""
        try:
            ticks = os.sysconf("SC_CLK_TCK")
            fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
            idle = fields[3] + fields[4]  # idle, iowait
            own = sum(os.times()[:2]) + sum(_process_ticks(process) for process in self._own) / ticks
        except (OSError, ValueError, IndexError):
            return None
        return monotonic(), (sum(fields) - idle) / ticks - own


def _process_ticks(process: int) -> int:
    # The name, in parentheses, may hold spaces.
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
