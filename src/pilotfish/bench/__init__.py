"""Benchmarks: the cost of a forward pass by its rows, and decoding speed by class of prompt.

Machines are shared and noisy: what is compared runs alternately in one process, and medians are printed.
"""

from __future__ import annotations

import typer

from pilotfish.bench.curve import curve
from pilotfish.bench.decode import decode
from pilotfish.bench.suite import suite
from pilotfish.bench.workload import Sample, machine, read_prompts

__all__ = ["Sample", "app", "machine", "read_prompts"]

app = typer.Typer(help="Measure this machine with a model.", no_args_is_help=True)
app.command()(curve)
app.command()(decode)
app.command()(suite)
