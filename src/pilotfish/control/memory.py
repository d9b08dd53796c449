"""Every byte that serving a model takes, before any of them is taken."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SHARE_OF_FREE = 2  # without a wish, KV gets one part in so many of what weights and buffers leave free


@dataclass(frozen=True)
class MemoryPlan:
    """What goes where. `parts` are names and bytes; KV of all models together is `num_blocks` blocks."""

    parts: Mapping[str, int]
    num_blocks: int
    kv_bytes: int
    available_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.available_bytes

    def lines(self) -> list[str]:
        """The table, for people."""
        rows = [*self.parts.items(), ("total", self.total_bytes), ("free on this machine", self.available_bytes)]
        width = max(len(name) for name, _ in rows)
        return [f"{name:<{width}}  {size:>15,} bytes  {size / 2**20:>10,.1f} MiB" for name, size in rows]


def plan_memory(
    *,
    weights: Mapping[str, int],
    kv_bytes_per_block: Mapping[str, int],
    logits_bytes: int,
    workspace_bytes: int,
    block_size: int,
    least_blocks: int,
    most_blocks: int,
    wanted_kv_bytes: int | None,
    available_bytes: int,
) -> MemoryPlan:
    """Divide memory. `weights` and `kv_bytes_per_block` have an entry for each model, all of which share the blocks.

    KV gets what is wanted, or a share of what is free, between `least_blocks` (one request of full length) and
    `most_blocks` (more could never be used).
    """
    block_bytes = sum(kv_bytes_per_block.values())
    fixed = sum(weights.values()) + logits_bytes + workspace_bytes
    if wanted_kv_bytes is None:
        share = (available_bytes - fixed) // SHARE_OF_FREE // block_bytes
        num_blocks = max(least_blocks, min(share, most_blocks))
    else:
        num_blocks = wanted_kv_bytes // block_bytes
    parts = {f"weights of {name}": size for name, size in weights.items()}
    tokens = num_blocks * block_size
    parts |= {f"KV of {name}, {tokens:,} tokens": size * num_blocks for name, size in kv_bytes_per_block.items()}
    parts |= {"logits to verify": logits_bytes, "workspace of a pass": workspace_bytes}
    return MemoryPlan(parts, num_blocks, num_blocks * block_bytes, available_bytes)


def available_memory() -> int:
    """Bytes that this process could still take: what the machine has free, or its control group if that is less."""
    limits = [_free_of_machine()]
    for most, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limits.append(int(Path(most).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
    return max(0, min(limits))


def _free_of_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
