"""A server in a process of its own, for as long as it is measured."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, sleep
from typing import IO

from pilotfish.errors import InputError, PilotfishError

READY_SECONDS = 600.0  # a large model on a slow disk
STOP_SECONDS = 20.0


def free_port() -> int:
    """A port of this machine that nobody listens on just now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def running(command: Sequence[str], ready: str) -> Iterator[subprocess.Popen[bytes]]:
    """The server of `command`, from when the address `ready` answers 200 until the block ends.

    For the main thread. Raises InputError when the server ends with exit code 2, PilotfishError when it ends otherwise
    or is not ready in time.
    """
    import httpx

    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        except OSError as error:
            raise InputError(f"can not start {command[0]}: {error.strerror}") from None
        # Ended from outside, this process would leave the server behind.
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            with httpx.Client(trust_env=False, timeout=10.0) as client:
                until = monotonic() + READY_SECONDS
                while not _answers(client, ready):
                    if process.poll() is not None:
                        kind = InputError if process.returncode == 2 else PilotfishError
                        raise kind(f"the server ended with exit code {process.returncode}: {_last_line(log)}")
                    if monotonic() > until:
                        raise PilotfishError(f"the server was not ready in {READY_SECONDS:.0f} s: {_last_line(log)}")
                    sleep(0.1)
            yield process
        finally:
            signal.signal(signal.SIGTERM, before)
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(client: object, address: str) -> bool:
    import httpx

    assert isinstance(client, httpx.Client)
    try:
        return client.get(address).status_code == 200
    except httpx.TransportError:
        return False


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = (line.strip(" │") for line in reversed(log.read().decode(errors="replace").splitlines()))
    return next((line for line in lines if any(map(str.isalnum, line))), "it said nothing").removeprefix("pilotfish: ")
