"""Load on a server over HTTP: `bench load`."""

from pilotfish.load.command import load

__all__ = ["load"]
