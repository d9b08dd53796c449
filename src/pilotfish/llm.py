"""A model that is ready to be asked: `LLM(...)`, `.generate(...)`, `.stream(...)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pilotfish.backends.native import NativeBackend, usable_cores
from pilotfish.backends.reference import ReferenceBackend
from pilotfish.calibrate import Calibration, calibration_seconds
from pilotfish.completion import Chunk, Completion, Logprob
from pilotfish.config import ModelConfig
from pilotfish.control.acceptance import Experience
from pilotfish.control.controller import Controller
from pilotfish.control.memory import MemoryPlan, available_memory, plan_memory
from pilotfish.drafters.base import MAX_DRAFT_TOKENS, Footprint, Host, Measurable
from pilotfish.drafters.speculation import Speculation, drafter_class, parse_speculation
from pilotfish.engine import TOKEN_BUDGET, Engine, Target
from pilotfish.errors import InputError
from pilotfish.loaders import load_model
from pilotfish.loaders.chat import ChatTemplate
from pilotfish.loaders.demo import demo_path
from pilotfish.loaders.grammar import Grammar, GrammarCompiler
from pilotfish.loaders.tokenizer import Detokenizer, Tokenizer
from pilotfish.metrics import now_ms
from pilotfish.models.decoder import decoder_program
from pilotfish.params import SamplingParams, StructuredOutput
from pilotfish.program import BLOCK_SIZE, Backend, Program
from pilotfish.request import Request, TokenLogprob

Prompt = str | Sequence[int]

DEFAULT_CONTEXT = 32768


class LLM:
    """Loads a model once; every call may use another speculation, which changes the speed and nothing else.

    `model` is a `.gguf` file, a Hugging Face directory or "demo". `context` is the most tokens of one request; by
    default the model's own context, at most 32,768, because a KV cache of that length must fit into memory.
    `kv_cache_memory_bytes` is what the KV of all requests and of cached prefixes may take: by default that of one full
    context, with "auto" a share of what is free. Raises InputError for anything wrong with the arguments or the files,
    with a table of all bytes when they do not fit.
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
        kv_cache_memory_bytes: int | Literal["auto"] | None = None,
        backend: Literal["native", "reference"] = "native",
    ) -> None:
        started = now_ms()
        self.speculation = _parse(speculation)
        interpreter = _backend(backend, threads)
        path = demo_path() if str(model) == "demo" else Path(model)
        loaded = load_model(path, weights)
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
        self._engine: Engine | None = None  # the last that was made
        self._grammars = GrammarCompiler(self.tokenizer, self.config.vocab_size)
        program = decoder_program(
            self.config, min(self.config.context_length, DEFAULT_CONTEXT) if context is None else context
        )
        self.weight_bytes = sum(
            tensor.nbytes for name, tensor in tensors.items() if name != "embed" or self.config.tied_embeddings
        )
        held = sum(tensor.nbytes for tensor in tensors.values())
        drafters = _footprints(self.speculation, self.config, self.tokenizer)
        self.memory = _memory(program, self.config, held, max_num_seqs, kv_cache_memory_bytes, drafters)
        num_blocks = self.memory.num_blocks
        self.weights = interpreter.load(tensors)
        self.target = Target(
            program=program,
            executable=interpreter.prepare(program, self.weights),
            kv=interpreter.new_kv(program.kv, num_blocks),
            num_blocks=num_blocks,
            eos_ids=self.tokenizer.eos_ids,
        )
        self.backend_description = interpreter.description
        self.host = Host(
            config=self.config,
            program=program,
            executable=self.target.executable,
            weights=self.weights,
            kv=self.target.kv,
            num_blocks=num_blocks,
            backend=interpreter,
            tokenizer=self.tokenizer,
            max_num_seqs=max_num_seqs,
        )
        self._calibration = Calibration(path, weights, self.host, interpreter.description)
        self._experience = Experience()
        self.load_ms = now_ms() - started

    def encode(self, prompt: Prompt, chat: bool = False, system: str | None = None) -> list[int]:
        """Token ids of a prompt; with `chat` it is a user's message in the model's own template."""
        if not isinstance(prompt, str):
            return list(prompt)
        if not chat:
            return self.tokenizer.encode(prompt, special=True)
        messages = [{"role": "system", "content": system}] if system is not None else []
        return self.encode_chat([*messages, {"role": "user", "content": prompt}])

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation in the model's own template, ready for the assistant's answer."""
        if self._chat_template is None:
            self._chat_template = self.tokenizer.chat_template()
        return self.tokenizer.encode(self._chat_template.render(messages, tools=tools), special=True)

    def prepare(self, params: SamplingParams) -> None:
        """Compile what a request with these parameters needs, so that adding it takes no time. Raises InputError."""
        if params.structured is not None:
            self._grammars.compile(params.structured)

    def memory_table(self) -> list[str]:
        """Every byte of weights, KV and buffers, line by line."""
        return self.memory.lines()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        system: str | None = None,
        speculation: str | Speculation | None = None,
    ) -> list[Completion]:
        """Complete all prompts in one batch; the answers come in the order of the prompts, `params.n` for each.

        With `chat` a prompt is a user's message in the model's own template, after the `system` message if given.
        """
        engine = self.engine(speculation, answers=chat)
        params = params or SamplingParams()
        added: list[tuple[Prompt, list[Request]]] = []
        for prompt in _as_many(prompts):
            added.append((prompt, engine.add(self.encode(prompt, chat, system), params)))
        texts = {request.id: "" for _, requests in added for request in requests}
        for update in engine.run():
            texts[update.request.id] += update.text
        return [
            self._completion(request, self._echo(prompt, request, chat) + texts[request.id], requests[0])
            for prompt, requests in added
            for request in requests
        ]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        system: str | None = None,
        speculation: str | Speculation | None = None,
    ) -> Iterator[Chunk]:
        """Complete one prompt and give its text as it comes. Raises InputError for more than one sample."""
        params = params or SamplingParams()
        if params.n > 1:
            raise InputError(f"n is {params.n}; a stream is of one sample, generate gives several")
        engine = self.engine(speculation, answers=chat)
        request = engine.add(self.encode(prompt, chat, system), params)[0]
        text = self._echo(prompt, request, chat)
        if text:
            yield Chunk(text, ())
        for update in engine.run():
            text += update.text
            completion = self._completion(request, text, request) if update.finished else None
            if update.tokens or completion:
                yield Chunk(update.text, update.tokens, completion)

    def engine(self, speculation: str | Speculation | None = None, answers: bool = False, **options: Any) -> Engine:
        """A fresh engine over this model. It closes the last one, as they share the KV cache.

        The output is text that goes on after the prompt, or with `answers` a text of its own. `options` are Engine's.
        """
        chosen = self.speculation if speculation is None else _parse(speculation)
        texts = ModelTexts(self.tokenizer, self._grammars, answers)
        if self._engine is not None:
            self._engine.close()
        self._engine = Engine(
            self.target,
            speculation=chosen,
            make=lambda part: part.make(self.host),
            controller=self._controller(chosen),
            texts=texts,
            **{"max_num_seqs": self.max_num_seqs, **options},
        )
        return self._engine

    def _controller(self, speculation: Speculation) -> Controller:
        """One with what is known of this machine; where it has something to decide, passes are measured first."""
        costs = None
        if speculation.parts and speculation.k is None and calibration_seconds() > 0:
            costs = self._calibration.target()
            for part in speculation.parts:
                drafter = part.make(self.host)
                if isinstance(drafter, Measurable) and drafter.name not in self._experience.pass_costs:
                    path = Path(str(part.options.get("model", self._calibration.path)))
                    self._experience.pass_costs[drafter.name] = self._calibration.drafter(drafter, path)
        return Controller(costs, self._experience)

    def _echo(self, prompt: Prompt, request: Request, chat: bool) -> str:
        if not request.params.echo:
            return ""
        if isinstance(prompt, str) and not chat:
            return prompt
        return self.tokenizer.decode(request.prompt, skip_special=False)

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> tuple[Logprob, ...]:
        def named(token: int, logprob: float, top: tuple[Logprob, ...] = ()) -> Logprob:
            return Logprob(token, self.tokenizer.token_bytes(token).decode(errors="replace"), logprob, top)

        return tuple(
            named(entry.token, entry.logprob, tuple(named(token, logprob) for token, logprob in entry.top))
            for entry in entries
        )

    def _completion(self, request: Request, text: str, first: Request) -> Completion:
        """`first` is the first sample of the prompt, which alone has computed it."""
        timings, counts, params = request.timings, request.counts, request.params
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
                "drafted_at": list(counts.drafted_at),
                "accepted_at": list(counts.accepted_at),
                **({} if request.report is None else {"report": request.report.as_dict()}),
            },
            error=request.error,
            logprobs=None if params.logprobs is None else self._logprobs(request.logprobs),
            prompt_logprobs=None if first.params.prompt_logprobs is None else self._logprobs(first.prompt_logprobs),
        )


@dataclass(frozen=True)
class ModelTexts:
    """A tokenizer as the engine sees it (output.Texts)."""

    tokenizer: Tokenizer
    grammars: GrammarCompiler
    answers: bool

    def new_detokenizer(self, answers: bool | None) -> Detokenizer:
        return self.tokenizer.stream(continuing=not (self.answers if answers is None else answers))

    def spellings(self, word: str) -> list[list[int]]:
        """With and without a space before it, as most tokenizers write the two differently."""
        bare = word.lstrip()
        if not bare:
            raise InputError(f"the bad word {word!r} is only space")
        spelled = [self.tokenizer.encode(text, special=False) for text in (bare, " " + bare)]
        return [ids for index, ids in enumerate(spelled) if ids not in spelled[:index]]

    def grammar(self, structured: StructuredOutput) -> Grammar:
        return self.grammars.compile(structured)


def _footprints(speculation: Speculation, config: ModelConfig, tokenizer: Tokenizer) -> list[Footprint]:
    """The memory that its drafters take beside the target's."""
    found = []
    for part in speculation.parts:
        footprint = getattr(drafter_class(part.method), "footprint", None)
        if footprint is not None:
            found.append(footprint(config, tokenizer, **part.options))
    return found


def _memory(
    program: Program,
    config: ModelConfig,
    weight_bytes: int,
    max_num_seqs: int,
    wanted: int | Literal["auto"] | None,
    drafters: Sequence[Footprint],
) -> MemoryPlan:
    """Divide memory; raises InputError when it is not enough."""
    tree_blocks = max_num_seqs * -(-MAX_DRAFT_TOKENS // BLOCK_SIZE)
    context_blocks = -(-program.context_length // BLOCK_SIZE)
    least = context_blocks + tree_blocks  # one full context always fits, and a tree for every request
    name = config.name or "the model"
    plan = plan_memory(
        weights={
            # panels are padded, and scales of a few kinds grow
            name: weight_bytes + weight_bytes // 50,
            **{drafter.name: drafter.weight_bytes + drafter.weight_bytes // 50 for drafter in drafters},
        },
        kv_bytes_per_block={
            name: program.kv.bytes_per_block,
            **{drafter.name: drafter.kv_bytes_per_block for drafter in drafters},
        },
        logits_bytes=4 * config.vocab_size * min(TOKEN_BUDGET, max_num_seqs * (1 + MAX_DRAFT_TOKENS)),
        workspace_bytes=TOKEN_BUDGET * sum(program.widths.values()) * 6,  # floats, and groups of 8-bit integers
        block_size=BLOCK_SIZE,
        least_blocks=least,
        most_blocks=least if wanted is None else 2 * max_num_seqs * context_blocks + tree_blocks,
        wanted_kv_bytes=wanted if isinstance(wanted, int) else None,
        available_bytes=available_memory(),
    )
    if isinstance(wanted, int) and plan.num_blocks < max_num_seqs:
        few = max_num_seqs * program.kv.bytes_per_block
        raise InputError(f"{wanted} bytes of KV cache are too few for {max_num_seqs} requests; give at least {few}")
    # Without a wish, pages of KV that no request reaches are never taken.
    if not plan.fits and (wanted is not None or plan.total_bytes - plan.kv_bytes > plan.available_bytes):
        table = "\n".join(plan.lines())
        raise InputError(f"this does not fit into memory; a smaller --context or --kv-cache-memory needs less\n{table}")
    return plan


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
