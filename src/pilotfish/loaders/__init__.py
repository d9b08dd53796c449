"""Loaders: model files in, one configuration and one tensor dictionary out."""

from __future__ import annotations

from pathlib import Path

from pilotfish.errors import InputError
from pilotfish.loaders.described import ModelDescription
from pilotfish.loaders.gguf import describe_gguf, load_gguf
from pilotfish.loaders.hf import describe_hf, load_hf
from pilotfish.loaders.loaded import LoadedModel

__all__ = ["LoadedModel", "ModelDescription", "load_config", "load_model"]


def load_model(path: Path, weights: str | None = None) -> LoadedModel:
    """Load a `.gguf` file or a Hugging Face model directory.

    `weights` (bf16, int8, int4) rounds the matrices on request; None keeps the values of the files exactly. Raises
    InputError when the path is neither, or the model can not be used.
    """
    if path.is_dir():
        return load_hf(path, weights)
    if not path.exists():
        raise InputError(f"{path} does not exist; a model is a .gguf file, a Hugging Face directory or the word demo")
    if path.suffix != ".gguf":
        raise InputError(f"{path} is not a .gguf file or a directory")
    return load_gguf(path, weights)


def load_config(path: Path) -> ModelDescription:
    """Read a model's configuration alone: a `.gguf` file, a Hugging Face directory or its config.json.

    Needs neither weights nor a tokenizer beside a config.json. Raises InputError when the path is none of these, or the
    model can not be used.
    """
    if path.is_dir():
        return describe_hf(path / "config.json")
    if not path.exists():
        raise InputError(f"{path} does not exist; give a .gguf file, a Hugging Face directory or a config.json")
    if path.suffix == ".json":
        return describe_hf(path)
    if path.suffix != ".gguf":
        raise InputError(f"{path} is not a .gguf file, a Hugging Face directory or a config.json")
    return describe_gguf(path)
