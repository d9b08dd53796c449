"""A time limit for code that can not be trusted to come back."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

POLL_S = 0.05
IDLE_POLLS = 40  # polls without a limit after which the watching thread sleeps until there is one


class TookTooLong(BaseException):
    """Raised in the thread whose time was up. No Exception, so that what is interrupted does not handle it."""


class Watchdog:
    """Interrupts what its thread runs for longer than a limit.

    The interpreter raises TookTooLong between two bytecodes of the watched thread, so an endless loop in Python ends; a
    call into C is waited for. The watching thread polls, so a limit costs the watched thread two locks and no switch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed: tuple[int, float] | None = None  # thread, and when its time is up
        self._fired = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._idle = True
        self._closed = False

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Raise TookTooLong in this thread if the body runs for longer. Not to be nested."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        with self._lock:
            self._armed, self._fired = (threading.get_ident(), time.monotonic() + seconds), False
            if self._idle:
                self._wake.set()
        arrived = False
        try:
            yield
        except TookTooLong:
            arrived = True
            raise
        finally:
            with self._lock:
                self._armed = None
                fired, self._fired = self._fired, False
            if fired and not arrived:
                _take_pending()

    def close(self) -> None:
        """End the watching thread."""
        with self._lock:
            self._closed = True
            self._wake.set()

    def _watch(self) -> None:
        polls = 0
        while True:
            with self._lock:
                if self._closed:
                    return
                polls = 0 if self._armed is not None else polls + 1
                self._idle = polls > IDLE_POLLS
                if self._idle:
                    self._wake.clear()
                elif self._armed is not None and time.monotonic() >= self._armed[1]:
                    thread, self._armed, self._fired = self._armed[0], None, True
                    _raise_in(thread)
            if self._idle:
                self._wake.wait()
            else:
                time.sleep(POLL_S)


def _raise_in(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TookTooLong))


def _take_pending() -> None:
    """The body ended as its time was up: the exception is on its way and must not hit anyone else."""
    until = time.monotonic() + 1
    try:
        while time.monotonic() < until:
            pass
    except TookTooLong:
        pass
