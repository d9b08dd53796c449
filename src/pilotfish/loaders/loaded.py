"""What every loader gives back, and the checks that they share."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pilotfish.config import ModelConfig, RopeScaling
from pilotfish.errors import InputError
from pilotfish.loaders.keys import short
from pilotfish.loaders.tokenizer import TokenizerSource
from pilotfish.models.decoder import expected_shapes
from pilotfish.quant import Tensor, quantize, requantize

WEIGHTS = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_1"}
_ROUNDING = {"bf16": "bfloat16", "int8": "int8 groups of 32", "int4": "int4 groups of 32"}


@dataclass(frozen=True)
class LoadedModel:
    """A model as its files have it.

    `tensors` has the canonical names: `embed`, `head` (absent when tied), `norm` and `layers.{i}.` followed by
    `attn_norm`, `q`, `k`, `v`, `o`, `q_bias`, `k_bias`, `v_bias`, `o_bias`, `q_norm`, `k_norm`, `mlp_norm`, `gate`,
    `up` or `down`. Vectors are always F32; matrices keep the format of the file. Rows of q and k pair for the rotation
    as ModelConfig says. `note` states any way in which this differs from the files; "": every value is exact.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    tokenizer: TokenizerSource
    note: str


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Put `what` in front of an InputError that is raised within."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{what}: {error}") from None


def map_file(path: Path) -> mmap.mmap:
    """The bytes of a file, read only when touched; NumPy views keep it open. Raises InputError when it can not be."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise InputError(f"can not be read: {error.strerror}") from None
    except ValueError:
        raise InputError("the file is empty") from None


def collect(config: ModelConfig, found: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Give the tensors of a file their canonical names.

    `names` turns a canonical name, without `layers.{i}.`, into the name in the file, with `{}` for the layer.
    Raises InputError when a tensor is missing, has another shape than the configuration asks for, or is left over.
    """
    tensors: dict[str, Tensor] = {}
    left = dict(found)
    for name, shape in expected_shapes(config):
        layer = name.split(".")[1] if "." in name else ""
        file_name = names[name.rsplit(".", 1)[-1]].format(layer)
        tensor = left.pop(file_name, None)
        if tensor is None:
            raise InputError(f"tensor {file_name} is missing; its shape would be {list(shape)}")
        if tensor.shape != shape:
            raise InputError(f"tensor {file_name} has shape {list(tensor.shape)}, expected {list(shape)}")
        with naming(f"tensor {file_name}"):
            tensors[name] = quantize(tensor.dequantize(), "F32") if len(shape) == 1 else tensor
    if left:
        raise InputError(f"tensor {short(next(iter(left)))} has no place in a {config.architecture} model")
    return tensors


def round_weights(tensors: dict[str, Tensor], weights: str | None) -> tuple[dict[str, Tensor], str]:
    """Bring every matrix into the format that the user asked for, with a note of the loss; None changes nothing."""
    if weights is None:
        return tensors, ""
    kind = WEIGHTS[weights]
    changing = [name for name, tensor in tensors.items() if len(tensor.shape) > 1 and tensor.kind != kind]

    def rounded(name: str) -> Tensor:
        with naming(f"tensor {name} can not become {weights}"):
            return requantize(tensors[name], kind)

    with ThreadPoolExecutor() as pool:  # NumPy works outside the interpreter lock
        replaced = dict(zip(changing, pool.map(rounded, changing), strict=True))
    return tensors | replaced, f"weights rounded to {_ROUNDING[weights]} on request" if changing else ""


def check_weights(weights: str | None) -> None:
    """Raise InputError unless `weights` is something that `round_weights` knows."""
    if weights is not None and weights not in WEIGHTS:
        raise InputError(f"weights {weights!r} are not known; give one of {', '.join(WEIGHTS)}")


def usable_context(stated: int, scaling: RopeScaling | None, window: int | None) -> tuple[int, str]:
    """The context length of a model, and a note if a sliding window of `window` tokens shortens it.

    Yarn stretches the original context by its factor, whether or not the files state the result. Within its window a
    model with sliding attention attends to everything. Raises InputError when the scaling's numbers make no sense.
    """
    if scaling is not None:
        _check_scaling(scaling)
    if scaling is not None and scaling.kind == "yarn":
        stated = max(stated, int(scaling.original_context * scaling.factor))
    if window is None or window >= stated:
        return stated, ""
    return window, f"context limited to the model's sliding window of {window} tokens"


def _check_scaling(scaling: RopeScaling) -> None:
    if not 0 < scaling.factor <= 1024:
        raise InputError(f"the rope scaling's factor is {scaling.factor}; it must be positive and at most 1024")
    if scaling.kind in ("llama3", "yarn") and scaling.original_context < 1:
        raise InputError(f"the rope scaling's original context is {scaling.original_context}; it must be at least 1")
    if not 0 < scaling.low_freq_factor < scaling.high_freq_factor:
        raise InputError(
            f"the rope scaling's low_freq_factor {scaling.low_freq_factor} must be positive and below its "
            f"high_freq_factor {scaling.high_freq_factor}"
        )
    if not 0 < scaling.beta_slow < scaling.beta_fast:
        raise InputError(
            f"the rope scaling's beta_slow {scaling.beta_slow} must be positive and below its "
            f"beta_fast {scaling.beta_fast}"
        )
    if not all(0 < factor < math.inf for factor in scaling.factors):
        raise InputError("the rope scaling's factors must be positive and finite")
