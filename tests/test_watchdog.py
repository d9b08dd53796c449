"""Time limits: what takes too long is interrupted, what does not is never hit."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from pilotfish.watchdog import TookTooLong, Watchdog


def test_an_endless_loop_ends() -> None:
    dog = Watchdog()
    with pytest.raises(TookTooLong), dog.limit(0.05):
        while True:
            pass
    dog.close()


def test_a_handler_of_exceptions_does_not_keep_it() -> None:
    dog = Watchdog()
    with pytest.raises(TookTooLong), dog.limit(0.05):
        while True:
            with suppress(Exception):
                time.sleep(0.001)
    dog.close()


def test_what_ends_in_time_is_never_hit() -> None:
    dog = Watchdog()
    for turn in range(2000):
        with dog.limit(30):
            turn += 1
    for _ in range(30):  # ends about when its time is up: the exception must not come later
        try:
            with dog.limit(0.05):
                time.sleep(0.05)
        except TookTooLong:
            pass
        time.sleep(0.01)
    dog.close()


def test_it_wakes_up_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pilotfish.watchdog.IDLE_POLLS", 1)
    dog = Watchdog()
    for _ in range(3):
        with pytest.raises(TookTooLong), dog.limit(0.02):
            while True:
                pass
        time.sleep(0.3)
    dog.close()
