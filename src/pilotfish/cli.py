"""The command line: names the commands, turns errors into one line and an exit code."""

from __future__ import annotations

import sys

import typer

from pilotfish import bench
from pilotfish.compare import verify
from pilotfish.errors import InputError, PilotfishError
from pilotfish.generate import generate
from pilotfish.load import load
from pilotfish.plan import plan
from pilotfish.server.serve import serve

app = typer.Typer(
    help="Speculative execution of language models: the same text, bit for bit, in fewer passes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(verify)
app.command()(serve)
app.command()(plan)
bench.app.command()(load)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run the command line: exit code 0 done, 2 bad usage or input, 1 anything else."""
    try:
        app()
    except InputError as error:
        _fail(error, 2)
    except PilotfishError as error:
        _fail(error, 1)
    except MemoryError:
        _fail("there is not enough memory; a smaller --context needs less", 1)
    except BrokenPipeError:
        # The reader of our output has gone; nothing is left to say to it.
        sys.stderr.close()
        sys.exit(1)


def _fail(error: Exception | str, code: int) -> None:
    print(f"pilotfish: {error}", file=sys.stderr)
    sys.exit(code)
