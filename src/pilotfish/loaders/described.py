"""What a model's files say without its weights being loaded."""

from __future__ import annotations

from dataclasses import dataclass

from pilotfish.config import ModelConfig


@dataclass(frozen=True)
class ModelDescription:
    """The configuration that `load_model` would give, and how the files keep the weights.

    `stored` names the formats, as keys of quant.FORMATS, the one with the most bytes first; empty where the files do
    not say. `weight_bytes` and `embedding_bytes` (part of the former) are None where no tensors were looked at.
    `note` states any way in which the configuration differs from the files.
    """

    config: ModelConfig
    stored: tuple[str, ...] = ()
    weight_bytes: int | None = None
    embedding_bytes: int | None = None
    note: str = ""
