"""A model that is ready to be asked: `LLM(...)`, `.generate(...)`, `.stream(...)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pilotfish.backends.native import NativeBackend, usable_cores
from pilotfish.backends.reference import ReferenceBackend
from pilotfish.drafters.base import MAX_DRAFT_TOKENS, Speculation, parse_speculation
from pilotfish.engine import Engine, Target
from pilotfish.errors import InputError
from pilotfish.loaders import load_model
from pilotfish.loaders.chat import ChatTemplate
from pilotfish.loaders.demo import demo_path
from pilotfish.loaders.tokenizer import Tokenizer
from pilotfish.metrics import now_ms
from pilotfish.models.decoder import decoder_program
from pilotfish.program import BLOCK_SIZE, Backend
from pilotfish.request import Request, SamplingParams

Prompt = str | Sequence[int]

DEFAULT_CONTEXT = 32768


@dataclass(frozen=True)
class Completion:
    """A finished request."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    seed: int
    timings: Mapping[str, float]
    speculation: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of `pilotfish generate --json`."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "usage": {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.tokens)},
            "timings": dict(self.timings),
            "speculation": dict(self.speculation),
        }


@dataclass(frozen=True)
class Chunk:
    """New text and tokens of a streamed request; the last one carries the completion."""

    text: str
    tokens: tuple[int, ...]
    completion: Completion | None = None


class LLM:
    """Loads a model once; every call may use another speculation, which changes the speed and nothing else.

    `model` is a `.gguf` file, a Hugging Face directory or "demo". `context` is the most tokens of one request; by
    default the model's own context, at most 32,768, because a KV cache of that length must fit into memory. Raises
    InputError for anything wrong with the arguments or the files.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        speculation: str | Speculation = "off",
        threads: int | None = None,
        context: int | None = None,
        max_num_seqs: int = 8,
        weights: str | None = None,
        backend: Literal["native", "reference"] = "native",
    ) -> None:
        started = now_ms()
        self.speculation = _parse(speculation)
        interpreter = _backend(backend, threads)
        loaded = load_model(demo_path() if str(model) == "demo" else Path(model), weights)
        self.config = loaded.config
        self.note = loaded.note
        self.max_num_seqs = max_num_seqs
        self.tokenizer = Tokenizer.load(loaded.tokenizer)
        tensors = loaded.tensors
        del loaded  # the vocabulary's strings leave memory before the weights come
        if self.tokenizer.vocab_size > self.config.vocab_size:
            raise InputError(
                f"the tokenizer has {self.tokenizer.vocab_size} tokens, the model only {self.config.vocab_size}; "
                "they do not belong together"
            )
        self._chat_template: ChatTemplate | None = None
        program = decoder_program(
            self.config, min(self.config.context_length, DEFAULT_CONTEXT) if context is None else context
        )
        # One full context always fits, and a tree for every request; several requests share what there is.
        num_blocks = -(-program.context_length // BLOCK_SIZE) + max_num_seqs * -(-MAX_DRAFT_TOKENS // BLOCK_SIZE)
        self.weights = interpreter.load(tensors)
        self.target = Target(
            program=program,
            executable=interpreter.prepare(program, self.weights),
            kv=interpreter.new_kv(program.kv, num_blocks),
            num_blocks=num_blocks,
            eos_ids=self.tokenizer.eos_ids,
        )
        self.backend_description = interpreter.description
        self.weight_bytes = sum(
            tensor.nbytes for name, tensor in tensors.items() if name != "embed" or self.config.tied_embeddings
        )
        self.load_ms = now_ms() - started

    def encode(self, prompt: Prompt, chat: bool = False, system: str | None = None) -> list[int]:
        """Token ids of a prompt; with `chat` it is a user's message in the model's own template."""
        if not isinstance(prompt, str):
            return list(prompt)
        if not chat:
            return self.tokenizer.encode(prompt, special=True)
        messages = [{"role": "system", "content": system}] if system is not None else []
        return self.encode_chat([*messages, {"role": "user", "content": prompt}])

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation in the model's own template, ready for the assistant's answer."""
        if self._chat_template is None:
            self._chat_template = self.tokenizer.chat_template()
        return self.tokenizer.encode(self._chat_template.render(messages), special=True)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        system: str | None = None,
        speculation: str | Speculation | None = None,
    ) -> list[Completion]:
        """Complete all prompts in one batch; the answers come in the order of the prompts.

        With `chat` a prompt is a user's message in the model's own template, after the `system` message if given.
        """
        many = _as_many(prompts)
        engine = self.engine(speculation, answers=chat)
        requests = [engine.add(self.encode(prompt, chat, system), params or SamplingParams()) for prompt in many]
        texts = {request.id: "" for request in requests}
        for update in engine.run():
            texts[update.request.id] += update.text
        return [self._completion(request, texts[request.id]) for request in requests]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        system: str | None = None,
        speculation: str | Speculation | None = None,
    ) -> Iterator[Chunk]:
        """Complete one prompt and give its text as it comes."""
        engine = self.engine(speculation, answers=chat)
        request = engine.add(self.encode(prompt, chat, system), params or SamplingParams())
        text = ""
        for update in engine.run():
            text += update.text
            completion = self._completion(request, text) if update.finished else None
            if update.tokens or completion:
                yield Chunk(update.text, update.tokens, completion)

    def engine(self, speculation: str | Speculation | None = None, answers: bool = False) -> Engine:
        """A fresh engine over this model. Only one may run at a time: they share the KV cache.

        The output is text that goes on after the prompt, or with `answers` a text of its own.
        """
        chosen = self.speculation if speculation is None else _parse(speculation)
        return Engine(
            self.target,
            chosen.make(),
            chosen.k,
            max_num_seqs=self.max_num_seqs,
            new_detokenizer=partial(self.tokenizer.stream, continuing=not answers),
        )

    def _completion(self, request: Request, text: str) -> Completion:
        timings, counts = request.timings, request.counts
        assert request.finish_reason is not None
        return Completion(
            text=text,
            tokens=tuple(request.output),
            finish_reason=request.finish_reason,
            prompt_tokens=len(request.prompt),
            seed=request.seed,
            timings={
                "load_ms": round(self.load_ms, 3),
                "prefill_ms": round(timings.prefill_ms, 3),
                "decode_ms": round(timings.decode_ms, 3),
                "draft_ms": round(timings.draft_ms, 3),
                "verify_ms": round(timings.verify_ms, 3),
                "overhead_ms": round(timings.overhead_ms, 3),
                "tokens_per_second": round(timings.tokens_per_second, 2),
            },
            speculation={
                "target_steps": counts.target_steps,
                "drafted": counts.drafted,
                "accepted": counts.accepted,
                "acceptance_length": round(counts.acceptance_length, 3),
                "acceptance_rate": round(counts.acceptance_rate, 3),
                "by_drafter": {
                    name: {"drafted": drafter.drafted, "accepted": drafter.accepted}
                    for name, drafter in counts.by_drafter.items()
                },
            },
        )


def _parse(speculation: str | Speculation) -> Speculation:
    return parse_speculation(speculation) if isinstance(speculation, str) else speculation


def _backend(name: str, threads: int | None) -> Backend:
    if name == "native":
        if threads is not None and threads > usable_cores():
            raise InputError(
                f"{threads} threads were asked for; this process may use {usable_cores()} cores, and more threads "
                "than cores only wait for each other"
            )
        return NativeBackend(threads=threads)
    if name == "reference":
        return ReferenceBackend()
    raise InputError(f"there is no backend {name!r}; it must be native or reference")


def _as_many(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
