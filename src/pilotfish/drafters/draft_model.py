"""A second model as a drafter: its weights, its KV under the engine's block ids, and the tokens that its head knows."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from pilotfish.config import ModelConfig
from pilotfish.drafters.base import Host
from pilotfish.drafters.choices import RowReader
from pilotfish.drafters.contents import BlockContents
from pilotfish.errors import InputError
from pilotfish.loaders import LoadedModel, load_model
from pilotfish.loaders.demo import demo_path
from pilotfish.loaders.loaded import WEIGHTS, round_weights
from pilotfish.loaders.tokenizer import Tokenizer
from pilotfish.models.decoder import decoder_program
from pilotfish.program import KV, ROW_GROUP, Backend, Executable, Head, KVShape, Program
from pilotfish.quant import FORMATS, Tensor, requantize
from pilotfish.tree import Ints

LEAST_VOCAB = 256
MOST_LEARNT = 2048  # tokens beyond the kept ones that the head may have: its bytes are what trimming saves
LEARN_TOGETHER = 4  # tokens of answers that are waited for
FIRST_VOCAB = 16000  # of `auto`
MISS_WINDOW = 64  # tokens of answers, of which the head of `auto` may lack
MOST_MISSED = 8  # before it gets twice the tokens; with fewer the longer passes cost more than the drafts that fall


def model_path(model: str) -> Path:
    """Where the draft model is, resolved; `demo` is downloaded on first use."""
    return (demo_path() if model == "demo" else Path(model)).resolve()


def read_vocab(text: str) -> int | list[int] | None:
    """`all` (None), a number as in 16k, or the ids in a file, apart by anything. Raises InputError.

    `auto` begins with FIRST_VOCAB.
    """
    if text in ("auto", "all"):
        return FIRST_VOCAB if text == "auto" else None
    if number := re.fullmatch(r"(\d+)(k?)", text):
        count = int(number[1]) * (1000 if number[2] else 1)
        if count < LEAST_VOCAB:
            raise InputError(f"is too small: at least {LEAST_VOCAB} tokens, or all")
        return count
    try:
        ids = [int(word) for word in re.findall(r"[^\s,\[\]]+", Path(text).read_text(encoding="utf-8"))]
    except OSError:
        raise InputError("must be auto, all, a number as in 16k, or a file of token ids") from None
    except ValueError:
        raise InputError("holds something that is no token id: a file of whole numbers is needed") from None
    if not ids or min(ids) < 0:
        raise InputError("must hold token ids, whole numbers from 0 on")
    return ids


def kept_ids(vocab: int | list[int] | None, tokenizer: Tokenizer, size: int) -> Ints | None:
    """Tokens that the head keeps of `size`, ascending; None: all.

    The lowest ids are the most frequent, as byte-pair merges are numbered in the order they were found in; control
    tokens are always kept.
    """
    if vocab is None:
        return None
    chosen = set(range(vocab)) if isinstance(vocab, int) else set(vocab)
    if max(chosen) >= size and not isinstance(vocab, int):
        raise InputError(f"the list of kept tokens has the id {max(chosen)}; the model has ids 0..{size - 1}")
    chosen |= tokenizer.special_ids | tokenizer.eos_ids
    ids = np.array(sorted(token for token in chosen if token < size), np.int32)
    return None if len(ids) == size else ids


class TrimmedHead:
    """The rows of a head for some tokens: those kept for good, then those learnt, in the order of learning.

    With a `most` it keeps more of the lowest ids below it when answers often have tokens that it lacks, as those of
    other languages: their drafts can not stand.
    """

    def __init__(self, head: Tensor, kept: Ints, kind: str | None, most: int | None = None) -> None:
        self._head = head
        self._kind = kind
        self._most = most
        self._keep(kept)

    def _keep(self, kept: Ints) -> None:
        self._kept = kept
        self._capacity = min(MOST_LEARNT, self._head.shape[0] - len(kept))
        self._known = np.zeros(self._head.shape[0], bool)
        self._known[kept] = True
        self._learnt: list[int] = []
        self._waiting: dict[int, None] = {}
        self._seen = self._missed = 0

    @property
    def size(self) -> int:
        """Rows of the matrix."""
        return len(self._kept) + self._capacity

    @property
    def ids(self) -> Ints:
        """The tokens of its first rows; the others mean nothing."""
        return np.concatenate([self._kept, np.array(self._learnt, np.int32)])

    def matrix(self) -> Tensor:
        """[size, inputs], in a format of quant.py."""
        rows = self._take(self.ids)
        self._head.release()
        room = np.zeros((self.size - rows.shape[0]) * rows.row_bytes, np.uint8)
        return Tensor(rows.kind, (self.size, rows.shape[1]), np.concatenate([rows.data, room]))

    def learnt_rows(self) -> tuple[int, Tensor]:
        """Where the matrix changes by learning, and the rows from there on."""
        first = len(self._kept) // ROW_GROUP * ROW_GROUP
        return first, self._take(self.ids[first:])

    def widen(self, answer: Ints) -> bool:
        """Keep twice the tokens if too many of the answers' are lacking. Whether the matrix is another now."""
        if self._most is None or len(self._kept) >= self._most:
            return False
        self._seen += len(answer)
        self._missed += int((~self._known[answer]).sum())
        if self._missed > MOST_MISSED:
            more = np.arange(min(2 * len(self._kept), self._most), dtype=np.int32)
            self._keep(np.union1d(more, self._kept).astype(np.int32))
            return True
        if self._seen >= MISS_WINDOW:
            self._seen = self._missed = 0
        return False

    def learn(self, tokens: Ints, at_once: bool) -> bool:
        """Take rows for tokens that have none. Whether `learnt_rows` are others now: a few tokens wait for more."""
        self._waiting |= dict.fromkeys(tokens[~self._known[tokens]].tolist())
        if not self._waiting or (not at_once and len(self._waiting) < LEARN_TOGETHER):
            return False
        new = list(self._waiting)[: self._capacity]
        self._waiting.clear()
        left = max(0, len(self._learnt) + len(new) - self._capacity)
        self._known[self._learnt[:left]] = False
        self._learnt = [*self._learnt[left:], *new]
        self._known[new] = True
        return True

    def _take(self, ids: Ints) -> Tensor:
        rows = self._head.take_rows(ids)
        return rows if self._kind in (None, rows.kind) else requantize(rows, str(self._kind))


@dataclass
class DraftModel:
    """A model ready to draft, shared by the drafters of a target that name it."""

    name: str
    program: Program
    executable: Executable
    reader: RowReader
    kv: KV
    contents: BlockContents
    target_vocab: int
    backend: Backend = field(repr=False)
    weights: dict[str, object] = field(repr=False)
    head: TrimmedHead | None = field(default=None, repr=False)

    @staticmethod
    def load(
        loaded: LoadedModel, tokenizer: Tokenizer, host: Host, weights: str | None, vocab: str, size: int
    ) -> DraftModel:
        """`vocab` as read_vocab has it; tokens are drafted below `size`. Raises InputError where these do not fit."""
        config = loaded.config
        context = min(config.context_length, host.program.context_length)
        program = decoder_program(config, context)
        kept = kept_ids(read_vocab(vocab), tokenizer, min(config.vocab_size, size))
        tensors = dict(loaded.tensors)
        head = None
        embed = None
        if kept is not None:
            most = min(config.vocab_size, size) if vocab == "auto" else None
            head = TrimmedHead(tensors["embed" if config.tied_embeddings else "head"], kept, kind_of(weights), most)
            tensors.pop("head", None)
        if kept is not None or not config.tied_embeddings:
            embed = tensors.pop("embed")  # only looked up: rounding it would save no time
        rounded = round_weights(tensors, weights)[0]
        held = dict(host.backend.load(rounded | ({} if embed is None else {"embed": embed})))
        executable = None if head is not None else host.backend.prepare(program, held)
        model = DraftModel(
            config.name,
            program,
            executable,  # type: ignore[arg-type]
            RowReader(None, size),
            host.backend.new_kv(program.kv, host.num_blocks),
            BlockContents(host.num_blocks),
            size,
            host.backend,
            held,
        )
        if head is not None:
            model.bind_head(head)
        return model

    def lend_kv(self) -> KV:
        """The KV, for someone who may write to it: nothing is known of it afterwards."""
        self.contents.clear()
        return self.kv

    def learn(self, tokens: Ints, prompt: bool) -> None:
        """See to it that the head knows these tokens of a prompt or an answer."""
        head = self.head
        if head is None:
            return
        tokens = tokens[tokens < self.target_vocab]
        if not prompt and head.widen(tokens):
            self.bind_head(head)
        elif head.learn(tokens, prompt):
            self.backend.replace_rows(self.weights["head"], *head.learnt_rows())
            self.reader = RowReader(head.ids, self.target_vocab)

    def bind_head(self, head: TrimmedHead) -> None:
        """Run with this head from now on."""
        self.head = head
        *ops, last = self.program.ops
        assert isinstance(last, Head)
        self.program = replace(self.program, ops=(*ops, replace(last, weight="head")), head_size=head.size)
        self.weights["head"] = self.backend.load({"head": head.matrix()})["head"]
        self.executable = self.backend.prepare(self.program, self.weights)
        self.reader = RowReader(head.ids, self.target_vocab)


def kind_of(weights: str | None) -> str | None:
    return None if weights is None else WEIGHTS[weights]


def differing_token(one: Tokenizer, other: Tokenizer) -> int | None:
    """The first id that does not spell the same in both, of those that both have; None: there is none."""
    for token in range(min(one.vocab_size, other.vocab_size)):
        if one.token_bytes(token) != other.token_bytes(token):
            return token
    return None


@lru_cache(maxsize=1)
def open_model(path: Path) -> tuple[LoadedModel, Tokenizer]:
    """The files, mapped, and their tokenizer: once for the memory plan and for loading. Raises InputError."""
    try:
        loaded = load_model(path)
        return loaded, Tokenizer.load(loaded.tokenizer)
    except InputError as error:
        raise InputError(f"the draft model: {error}") from None


def weight_bytes(loaded: LoadedModel, tokenizer: Tokenizer, weights: str | None, vocab: str, target_vocab: int) -> int:
    """Bytes of the weights in memory as `DraftModel.load` has them."""
    config, kind = loaded.config, kind_of(weights)
    kept = kept_ids(read_vocab(vocab), tokenizer, min(config.vocab_size, target_vocab))

    def size(tensor: Tensor, rows: int | None = None, rounded: bool = True) -> int:
        form = FORMATS[kind if rounded and kind is not None and len(tensor.shape) > 1 else tensor.kind]
        count = tensor.num_rows if rows is None else rows
        return count * (tensor.shape[-1] // form.elements * form.bytes)

    total = 0
    for name, tensor in loaded.tensors.items():
        if name == "embed":
            total += size(tensor, rounded=config.tied_embeddings and kept is None)
        elif name != "head" or kept is None:
            total += size(tensor)
    if kept is not None:
        head = loaded.tensors["embed" if config.tied_embeddings else "head"]
        most = min(config.vocab_size, target_vocab) if vocab == "auto" else len(kept)
        total += size(head, min(most + MOST_LEARNT, head.num_rows))
    return total


def kv_shape(config: ModelConfig) -> KVShape:
    return KVShape(config.num_layers, config.num_kv_heads, config.head_dim)
