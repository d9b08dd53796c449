"""What many tests need: the real model, fetched once and kept in the cache folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pilotfish import LLM

# What is tested must not hang on what passes cost here; tests/test_calibrate.py measures.
os.environ.setdefault("PILOTFISH_CALIBRATION_SECONDS", "0")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    from pilotfish.loaders.demo import demo_path

    return demo_path()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> LLM:
    """The same, loaded once for the session."""
    from pilotfish import LLM

    return LLM(smollm2_path, context=2048)
