"""Parameters and bytes of a model from its configuration, and what a batch of requests takes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pilotfish.config import ModelConfig
from pilotfish.control.memory import MemoryPlan
from pilotfish.engine import TOKEN_BUDGET
from pilotfish.errors import InputError
from pilotfish.loaders import ModelDescription, load_config
from pilotfish.loaders.demo import MEMBER, cache_folder
from pilotfish.models.decoder import decoder_program, expected_shapes
from pilotfish.plan.configurations import configuration, unknown
from pilotfish.program import BLOCK_SIZE, KVShape
from pilotfish.quant import FORMATS

DRAFT_SHARES = (0.05, 0.25)  # of the target's parameters: what draft models usually have
_LOGIT_BYTES = 4  # float32
_FILE = "file"
# How each format keeps matrices: elements of a group and its bytes, scales included. int8 and int4 are those that
# `--weights` makes.
_FORMATS: dict[str, tuple[int, int]] = {
    "fp16": (1, 2),
    "bf16": (1, 2),
    "fp8": (1, 1),
    "int8": (FORMATS["Q8_0"].elements, FORMATS["Q8_0"].bytes),
    "int4": (FORMATS["Q4_1"].elements, FORMATS["Q4_1"].bytes),
}
_STORED = {"F16": "fp16", "BF16": "bf16", "F32": "fp32"}


@dataclass(frozen=True)
class ModelSizes:
    """A model in figures. A pass reads `pass_bytes`: everything but an embedding that is not the head as well."""

    config: ModelConfig
    name: str
    format: str
    parameters: int
    nominal_parameters: int
    weight_bytes: int
    pass_bytes: int
    operations_per_row: int  # multiplications and additions of its matrices for one row
    note: str = ""

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers in the halves that the engine keeps."""
        return _kv_bytes_per_block(self.config) // BLOCK_SIZE

    @property
    def attention_operations_per_token(self) -> int:
        """Operations of one row over one token of context: scores, and sums of values."""
        return 4 * self.config.num_layers * self.config.num_heads * self.config.head_dim

    @property
    def nominal_bytes(self) -> int:
        return round(self.weight_bytes / self.parameters * self.nominal_parameters)


def model_sizes(model: str, weights_format: str, what: str) -> ModelSizes:
    """Find a model by path, name or the word demo, and reckon its sizes.

    `weights_format` is fp16, bf16, fp8, int8, int4, or "file": as the files have them, fp16 where they do not say.
    Raises InputError; `what` names the flag of the format.
    """
    if weights_format != _FILE and weights_format not in _FORMATS:
        raise InputError(f"{what} {weights_format!r} must be one of {', '.join(_FORMATS)} or {_FILE}")
    found = _describe(model)
    config = found.config
    shapes = list(_shapes(config))
    parameters = sum(count * math.prod(shape) for _, shape, count in shapes)
    nominal = _nominal(config.name, parameters)
    operations = 2 * sum(
        count * math.prod(shape) for name, shape, count in shapes if len(shape) == 2 and not _only_embeds(name, config)
    )
    if weights_format == _FILE and found.weight_bytes is not None:
        total = found.weight_bytes
        unread = 0 if config.tied_embeddings else found.embedding_bytes or 0
        form = "+".join(kind for kind in found.stored if kind != "F32") or "F32"  # vectors are always F32
    else:
        form = weights_format
        if form == _FILE:
            form = _STORED[found.stored[0]] if found.stored else "fp16"
        total = sum(count * _bytes(shape, form) for _, shape, count in shapes)
        unread = sum(count * _bytes(shape, form) for name, shape, count in shapes if _only_embeds(name, config))
    return ModelSizes(
        config, config.name or model, form, parameters, nominal, total, total - unread, operations, found.note
    )


def _describe(model: str) -> ModelDescription:
    if model == "demo":
        cached = cache_folder() / Path(MEMBER).name
        if cached.is_file():
            return load_config(cached)
        built_in = configuration("smollm2-135m")
        assert built_in is not None
        return ModelDescription(built_in, note="demo is not downloaded yet: planned from its configuration")
    path = Path(model)
    try:
        exists = path.exists()
    except (OSError, ValueError):  # names that no file can have
        exists = False
    if exists:
        return load_config(path)
    found = configuration(model)
    if found is not None:
        return ModelDescription(found)
    if path.suffix in (".gguf", ".json"):
        return load_config(path)  # raises, and says what would be right
    raise unknown(model)


def _shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, shape and number of the tensors; layers are alike, so one of them is asked for."""
    for name, shape in expected_shapes(replace(config, num_layers=1)):
        yield name, shape, config.num_layers if name.startswith("layers.") else 1


def _only_embeds(name: str, config: ModelConfig) -> bool:
    return name == "embed" and not config.tied_embeddings


def _bytes(shape: tuple[int, ...], form: str) -> int:
    if form == "fp32":
        return 4 * math.prod(shape)
    if len(shape) == 1:
        return shape[0] * (4 if form in ("int8", "int4") else 2)
    elements, size = _FORMATS[form]
    return shape[0] * -(-shape[1] // elements) * size


def _nominal(name: str, parameters: int) -> int:
    """The size that people call the model by: that of its name where it is near, else rounded."""
    for number, unit in re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z])", name.lower()):
        stated = round(float(number) * {"b": 1e9, "m": 1e6}[unit])
        if 0.8 < stated / parameters < 1.25:
            return stated
    digits = 0 if parameters >= 3e9 else 1
    if parameters >= 1e9:
        return round(round(parameters / 1e9, digits) * 1e9)
    return int(float(f"{parameters:.2g}"))


def _kv_bytes_per_block(config: ModelConfig) -> int:
    return KVShape(config.num_layers, config.num_kv_heads, config.head_dim).bytes_per_block


@dataclass(frozen=True)
class BatchSizes:
    """What requests of `context` tokens each take when `drafts` tokens of each are drafted and verified."""

    target: ModelSizes
    draft: ModelSizes | None
    context: int
    drafts: int

    @property
    def models(self) -> dict[str, ModelSizes]:
        return {"target": self.target} | ({} if self.draft is None else {"draft": self.draft})

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all models: they share the blocks."""
        return sum(model.kv_bytes_per_token for model in self.models.values())

    def kv_bytes(self, model: ModelSizes, batch: int) -> int:
        """Whole blocks for each request."""
        return batch * -(-self.context // BLOCK_SIZE) * _kv_bytes_per_block(model.config)

    def plan(self, batch: int, memory_bytes: int | None) -> MemoryPlan:
        """All bytes by name; `num_blocks` are the blocks that memory has room for beside everything but their KV."""
        parts = {f"{role} weights": model.weight_bytes for role, model in self.models.items()}
        parts |= {f"{role} KV": self.kv_bytes(model, batch) for role, model in self.models.items()}
        verify = self.verification(batch)
        parts |= verify | {"workspace of a pass": self._workspace_bytes(batch)}
        kv = sum(size for name, size in parts.items() if name.endswith(" KV"))
        available = memory_bytes or 0
        block_bytes = self.kv_bytes_per_token * BLOCK_SIZE
        blocks = max(0, available - sum(parts.values()) + kv) // block_bytes
        return MemoryPlan(parts, blocks, kv, available)

    def verification(self, batch: int) -> dict[str, int]:
        """Logits of every row that is judged, and KV of the drafts until they are."""
        found = {"logits to verify": _LOGIT_BYTES * self.target.config.vocab_size * batch * (self.drafts + 1)}
        if self.draft is not None and self.drafts:
            found["logits of the draft"] = _LOGIT_BYTES * self.draft.config.vocab_size * batch
        if self.drafts:
            found["rows of draft trees"] = batch * self.drafts * self.kv_bytes_per_token
        return found

    def most_requests(self, memory_bytes: int) -> int:
        """How many such requests fit into memory at once."""
        if not self.plan(1, memory_bytes).fits:
            return 0
        low, high = 1, 2
        while self.plan(high, memory_bytes).fits:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.plan(middle, memory_bytes).fits else (low, middle)
        return low

    def _workspace_bytes(self, batch: int) -> int:
        """Row buffers of a pass: floats, and the same in groups of small integers (as `LLM` reckons)."""
        rows = max(TOKEN_BUDGET, batch * (self.drafts + 1))
        return sum(
            rows * 6 * sum(decoder_program(replace(model.config, num_layers=1), 1).widths.values())
            for model in self.models.values()
        )
