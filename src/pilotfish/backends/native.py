"""Programs on the CPU: one C++ call for each forward pass, on its own threads, with the interpreter lock released."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

import pilotfish._native as _native
from pilotfish.errors import InputError
from pilotfish.params import SamplingParams
from pilotfish.program import (
    KV,
    Attention,
    Embed,
    Feed,
    Floats,
    GatedAct,
    Gather,
    Head,
    KVShape,
    Linear,
    Norm,
    Op,
    Program,
    Result,
    RopeKV,
    Tap,
)
from pilotfish.quant import Tensor
from pilotfish.sampling import Ids, broken_row
from pilotfish.sampling import choose as choose_by_rule
from pilotfish.tree import TreeBatch

PATH_VARIABLE = "PILOTFISH_PATH"


class NativeBackend:
    """Interprets programs with the kernels of one instruction-set path.

    `threads` is the number of threads that compute, by default all cores this process may use. `path` is avx512,
    avxvnni, avx2, dotprod (aarch64) or portable, by default what the environment variable PILOTFISH_PATH says, else the
    best this machine runs. All paths and numbers of threads give the same bits. A process forked from the one that made
    the backend can not use it.
    """

    name = "native"

    def __init__(self, threads: int | None = None, path: str | None = None) -> None:
        """Raise InputError when the machine lacks the path or there would be no thread."""
        self.path = _choose_path(path or _wanted_path())
        self._pool = _native.Pool(_choose_threads(threads))

    @property
    def threads(self) -> int:
        return cast(int, self._pool.threads)

    @property
    def description(self) -> str:
        return f"{self.path} kernels, {self.threads} threads"

    def load(self, tensors: Mapping[str, Tensor]) -> Mapping[str, object]:
        """Matrices in panels for the kernels, vectors as float32: value for value what the tensors hold."""
        loaded = {}
        for name, tensor in tensors.items():
            loaded[name] = _load(name, tensor)
            tensor.release()  # or the file would be in memory twice at the end
        return loaded

    def replace_rows(self, weight: object, first: int, rows: Tensor) -> None:
        """See Backend. Raises ValueError when the rows do not fit."""
        cast(Any, weight).replace_rows(first, _load("rows", rows))

    def new_kv(self, shape: KVShape, num_blocks: int) -> KV:
        """All slots zero; memory is taken from the system as blocks are first written."""
        return cast(KV, _native.Kv(shape.layers, shape.kv_heads, shape.head_dim, num_blocks))

    def prepare(self, program: Program, weights: Mapping[str, object]) -> NativeExecutable:
        """Raise InputError when the program's tensors are missing or of another shape."""
        native = _native.Executable(
            self.path,
            self._pool,
            program.num_heads,
            program.kv.kv_heads,
            program.kv.head_dim,
            program.kv.layers,
            program.vocab_size,
            np.ascontiguousarray(program.rope_cos, np.float32),
            np.ascontiguousarray(program.rope_sin, np.float32),
            list(program.widths.values()),
        )
        binder = _Binder(program, weights, native)
        for op in program.ops:
            binder.bind(op)
        return NativeExecutable(native, program, binder.has_head, binder.tap_widths)


@dataclass(frozen=True)
class StageTime:
    """What one stage of a pass took: operations that run without waiting for each other."""

    ops: tuple[Op, ...]
    ms: float
    barriers: int


class NativeExecutable:
    """A program bound to weights. Passes from several threads come one after the other."""

    def __init__(self, native: Any, program: Program, has_head: bool, tap_widths: Sequence[int]) -> None:
        self._native = native
        self._program = program
        self._has_head = has_head
        self._tap_widths = tuple(tap_widths)

    def forward(self, batch: TreeBatch, kv: KV, logits: bool, feeds: Sequence[Floats] = ()) -> Result:
        """One pass through the weights. Writes the KV of every row; gives logits only when asked.

        Raise ValueError when the batch points outside the vocabulary, the context, the block tables or the cache, and
        when `feeds` are not what the program's Feeds take.
        """
        return self._forward(batch, kv, logits, None, feeds)

    def profile(self, batch: TreeBatch, kv: KV) -> list[StageTime]:
        """One pass, with the time of what lies between two barriers: each stage holds one or more operations."""
        stages: list[list[int]] = self._native.stages
        times = np.empty(len(stages)), np.empty(len(stages), np.int32)
        self._forward(batch, kv, False, times)
        return [
            StageTime(tuple(self._program.ops[op] for op in ops), ms, barriers)
            for ops, ms, barriers in zip(stages, times[0].tolist(), times[1].tolist(), strict=True)
        ]

    def _forward(
        self,
        batch: TreeBatch,
        kv: KV,
        logits: bool,
        times: tuple[NDArray[np.float64], NDArray[np.int32]] | None,
        feeds: Sequence[Floats] = (),
    ) -> Result:
        wanted = len(batch.logit_rows) if self._has_head else 0
        argmax = np.empty(wanted, np.int32)
        scores: Floats | None = np.empty((wanted, self._program.num_logits), np.float32) if logits else None
        taps: tuple[Floats, ...] = tuple(np.empty((batch.num_rows, width), np.float32) for width in self._tap_widths)
        self._native.forward(
            batch.tokens,
            batch.positions,
            batch.slots,
            batch.prefix_lens,
            batch.path_starts,
            batch.path_slots,
            batch.row_starts,
            batch.block_tables,
            batch.logit_rows,
            kv,
            argmax,
            scores,
            taps,
            times,
            [np.ascontiguousarray(feed, np.float32) for feed in feeds],
        )
        return Result(argmax, scores, taps)


class _Binder:
    """Translates operations for the native interpreter, which trusts buffers and shapes: they are checked here."""

    def __init__(self, program: Program, weights: Mapping[str, object], native: Any) -> None:
        self.program = program
        self.weights = weights
        self.native = native
        self.numbers = {name: number for number, name in enumerate(program.widths)}
        self.written: dict[str, bool] = {}  # buffers written so far; whether they hold only the wanted rows
        self.tap_widths: list[int] = []
        self.has_head = False

    def bind(self, op: Op) -> None:
        native, widths, head_dim = self.native, self.program.widths, self.program.kv.head_dim
        match op:
            case Embed():
                weight = self.matrix(op.weight, (self.program.vocab_size, widths[op.out]))
                native.embed(weight, self.write(op.out, False))
            case Feed():
                native.feed(self.write(op.out, False))
            case Norm():
                x, weight = self.read(op.x), self.vector(op.weight, widths[op.x])
                native.norm(x, weight, op.eps, self.write(op.out, self.written[op.x], widths[op.x]))
            case Linear():
                self.linear(op)
            case RopeKV():
                norms = [None if name is None else self.vector(name, head_dim) for name in (op.q_norm, op.k_norm)]
                native.rope_kv(self.qkv(op.qkv, op.layer), op.layer, *norms, op.eps)
            case Attention():
                out = self.write(op.out, False, self.program.num_heads * head_dim)
                native.attention(self.qkv(op.qkv, op.layer), op.layer, out)
            case GatedAct():
                _need(widths[op.x] % 2 == 0, f"{op.x} is [gate | up] but its width is odd")
                native.gated(self.read(op.x), self.write(op.out, self.written[op.x], widths[op.x] // 2))
            case Tap():
                native.tap(self.read(op.x, False))
                self.tap_widths.append(widths[op.x])
            case Gather():
                native.gather(self.read(op.x, False), self.write(op.out, True, widths[op.x]))
            case Head():
                _need(not self.has_head, "there are two heads")
                native.head(self.read(op.x, True), self.matrix(op.weight, (self.program.num_logits, widths[op.x])))
                self.has_head = True

    def linear(self, op: Linear) -> None:
        parts, columns = [], []
        for part in op.parts:
            weight = self.matrix(part.weight, (None, self.program.widths[op.x]))
            bias = None if part.bias is None else self.vector(part.bias, weight.outputs)
            parts.append((weight, bias, part.column))
            columns.append((part.column, part.column + weight.outputs))
        columns.sort()
        ends = [0, *(end for _, end in columns)]
        starts = [*(start for start, _ in columns), self.program.widths[op.out]]
        _need(all(e <= s for e, s in zip(ends, starts, strict=True)), f"the parts do not fit side by side in {op.out}")
        _need(op.out != op.x, f"a linear reads and writes {op.x}")
        x = self.read(op.x)
        if op.add:
            self.read(op.out, self.written[op.x])
        self.native.linear(x, parts, self.write(op.out, self.written[op.x]), op.add)

    def qkv(self, name: str, layer: int) -> int:
        shape = self.program.kv
        _need(self.program.num_heads % shape.kv_heads == 0, "the heads are no multiple of the key-value heads")
        _need(shape.head_dim % 16 == 0, "head_dim is no multiple of 16")
        width = (self.program.num_heads + 2 * shape.kv_heads) * shape.head_dim
        _need(self.program.widths[name] == width, f"{name} is [q | k | v] but not {width} wide")
        _need(0 <= layer < shape.layers, f"there is no KV layer {layer}")
        return self.read(name, False)

    def read(self, name: str, only_wanted: bool | None = None) -> int:
        _need(name in self.written, f"{name} is read before it is written")
        if only_wanted is not None:
            _need(self.written[name] == only_wanted, f"{name} holds the wrong rows: see Gather")
        return self.numbers[name]

    def write(self, name: str, only_wanted: bool, width: int | None = None) -> int:
        _need(self.written.setdefault(name, only_wanted) == only_wanted, f"{name} is used for all and for wanted rows")
        _need(width in (None, self.program.widths[name]), f"{name} should be {width} wide")
        return self.numbers[name]

    def matrix(self, name: str, shape: tuple[int | None, int]) -> Any:
        weight = self.tensor(name)
        if not isinstance(weight, _native.Weight):
            raise InputError(f"the tensor {name} has one dimension; it should be a matrix")
        found = (weight.outputs, weight.inputs)
        if found != (found[0] if shape[0] is None else shape[0], shape[1]):
            wanted = ["any" if size is None else size for size in shape]
            raise InputError(f"the tensor {name} has shape {list(found)}, not {wanted}".replace("'", ""))
        return weight

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        weight = self.tensor(name)
        found = list(weight.shape) if isinstance(weight, np.ndarray) else [weight.outputs, weight.inputs]
        if found != [size]:
            raise InputError(f"the tensor {name} has shape {found}, not {[size]}")
        return cast(NDArray[np.float32], weight)

    def tensor(self, name: str) -> Any:
        if name not in self.weights:
            raise InputError(f"the model lacks the tensor {name}")
        return self.weights[name]


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"this is no program: {what}")


def _load(name: str, tensor: Tensor) -> object:
    if len(tensor.shape) == 1:
        return np.ascontiguousarray(tensor.dequantize(), np.float32)
    if len(tensor.shape) != 2:
        raise InputError(f"the tensor {name} has {len(tensor.shape)} dimensions; only 1 and 2 are supported")
    try:
        return _native.pack(tensor.kind, *tensor.shape, tensor.data)
    except ValueError as error:
        raise InputError(f"the tensor {name}: {error}") from error


def path_names() -> list[str]:
    """The instruction-set paths that this machine runs, best first."""
    return list(_native.path_names())


def _wanted_path() -> str | None:
    return os.environ.get(PATH_VARIABLE) or None


@cache  # it is asked for every sampled token
def _choose_path(wanted: str | None) -> str:
    runnable = path_names()
    if wanted is None:
        return runnable[0]
    if wanted not in runnable:
        raise InputError(
            f"the instruction-set path {wanted!r} does not run here; this machine runs {', '.join(runnable)}"
        )
    return wanted


def choose(logits: Floats, params: SamplingParams, seed: int, position: int, path: str | None = None) -> int:
    """The token that `sampling.choose` gives for `logits` [vocab], fast and with the interpreter lock released.

    `path` is that of `NativeBackend`. Rows with a `typical_p` take the time of the rule itself, which no kernel knows.
    Raises PilotfishError if the highest logit is not finite.
    """
    path = _choose_path(path or _wanted_path())
    if params.typical_p < 1 and params.temperature > 0:
        return choose_by_rule(logits, params, seed, position)
    top_k = min(params.top_k, len(logits))
    token = _native.sample(path, logits, params.temperature, params.min_p, top_k, params.top_p, seed, position)
    if token < 0:
        raise broken_row(logits)
    return cast(int, token)


def log_probabilities(logits: Floats, top: int, path: str | None = None) -> tuple[float, Ids]:
    """What `sampling.log_probabilities` gives for `logits` [vocab], fast and with the interpreter lock released.

    `path` is that of `NativeBackend`. Raises PilotfishError if the highest logit is not finite, ValueError if `top` is
    not from 0 to 20.
    """
    found = _native.log_probabilities(_choose_path(path or _wanted_path()), logits, top)
    if found is None:
        raise broken_row(logits)
    return cast(tuple[float, Ids], found)


def usable_cores() -> int:
    """How many threads of this process can run at the same time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _choose_threads(wanted: int | None) -> int:
    if wanted is None:
        return usable_cores()
    if wanted < 1:
        raise InputError(f"{wanted} threads were asked for; at least 1 is needed")
    return wanted


def read_gb_per_s(threads: int | None = None) -> float:
    """How fast this many threads read memory: plain decoding can not be faster than this over the bytes of weights."""
    return cast(float, _native.Pool(_choose_threads(threads)).read_gb_per_s())


def gmac_per_s(threads: int | None = None) -> float:
    """Billions of multiply-adds of small integers in a second, from registers: what bounds passes of many rows."""
    return cast(float, _native.Pool(_choose_threads(threads)).gmac_per_s(_choose_path(_wanted_path())))
