"""Speculative execution of language models, exact to the bit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pilotfish.completion import Chunk, Completion
    from pilotfish.errors import InputError, PilotfishError
    from pilotfish.llm import LLM
    from pilotfish.params import SamplingParams, StructuredOutput

__version__ = "0.1.0"

# Loaded on first use, so that a part of the package can be used and tested without the rest.
_HOMES = {
    "LLM": "llm",
    "Chunk": "completion",
    "Completion": "completion",
    "InputError": "errors",
    "PilotfishError": "errors",
    "SamplingParams": "params",
    "StructuredOutput": "params",
}
__all__ = ["LLM", "Chunk", "Completion", "InputError", "PilotfishError", "SamplingParams", "StructuredOutput"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pilotfish' has no attribute {name!r}")
    return getattr(import_module(f"pilotfish.{_HOMES[name]}"), name)
