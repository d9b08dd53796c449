"""Tables of a comparison on the screen or in Markdown, and how far it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pilotfish.metrics import now_ms

HEADINGS = (
    "speculation",
    "class",
    "tokens/s",
    "over off",
    "worst prompt",
    "whole request",
    "acceptance length",
    "equal",
)
_LEFT = 2  # columns of words


def _cells(text: str, kind: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        text,
        kind,
        f"{row['tokens_per_second']:.1f}",
        f"{row['over_off']:.2f}",
        f"{row['worst_over_off']:.2f}",
        f"{row['request_over_off']:.2f}",
        f"{row['acceptance_length']:.2f}",
        "yes" if row["equal"] else "NO",
    )


def show(title: str, report: Mapping[str, Mapping[str, Mapping[str, Any]]], markdown: bool = False) -> None:
    """Print the rows of a report: setting, class, row."""
    lines = [_cells(text, kind, row) for text, kinds in report.items() for kind, row in kinds.items()]
    if markdown:
        rule = ["---"] * _LEFT + ["--:"] * (len(HEADINGS) - _LEFT)
        print(f"**{title}**\n")
        for cells in (HEADINGS, rule, *lines):
            print(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        print()
        return
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading.replace(" ", "\n"), justify="left" if number < _LEFT else "right")
    for cells in lines:
        table.add_row(*cells)
    Console().print(table)


@contextmanager
def progress(total: int, lines: bool = False) -> Iterator[Callable[[int, str], None]]:
    """Gives `done(count, what)`, to be told of runs that are over and of what they were.

    On a terminal a bar on stderr shows it with the time left; elsewhere, with `lines`, a line for each new `what`.
    """
    if not sys.stderr.isatty():
        yield _lines(total) if lines else lambda count, what: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("runs", total=total)
        yield lambda count, what: bar.update(task, advance=count, description=what)


def _lines(total: int) -> Callable[[int, str], None]:
    started = now_ms()
    last = ""
    over = 0

    def done(count: int, what: str) -> None:
        nonlocal last, over
        over += count
        if what == last:
            return
        last = what
        left_min = (now_ms() - started) / 60e3 * (total - over) / max(1, over)
        print(f"{what}: run {over} of {total}, about {left_min:.0f} min left", file=sys.stderr, flush=True)

    return done
