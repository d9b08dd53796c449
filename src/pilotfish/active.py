"""A request while the engine works on it: how it takes in tokens, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotfish.errors import InputError, PilotfishError, RequestError
from pilotfish.history import History
from pilotfish.node_rows import token_logprob
from pilotfish.output import OutputText, Texts
from pilotfish.params import SamplingParams
from pilotfish.program import Floats, Program
from pilotfish.request import FinishReason, Request


@dataclass(frozen=True)
class Update:
    """What a step brought to one request."""

    request: Request
    tokens: tuple[int, ...]
    text: str  # "" without a tokenizer
    finished: bool


@dataclass
class Active:
    """What the engine keeps for a request beside the ledger's entry."""

    request: Request
    end_ids: frozenset[int]  # tokens that end it
    text: OutputText | None
    history: History | None  # None: nothing changes the logits
    latency_target_ms: float | None
    forced: list[int] = field(default_factory=list)  # what the grammar forces in the step that is planned

    @property
    def needs_logits(self) -> bool:
        params = self.request.params
        return params.temperature > 0 or params.logprobs is not None or self.history is not None

    def wants_prompt(self, start: int) -> bool:
        """Whether rows from `start` on bring log-probabilities of the prompt that are still missing."""
        request = self.request
        known = len(request.prompt_logprobs)
        return request.params.prompt_logprobs is not None and start <= known < len(request.prompt) - 1

    def take_prompt_logprobs(self, start: int, logits: Floats) -> None:
        """The row [rows, vocab] of each prompt token from `start` on says how likely the next was."""
        request = self.request
        top = request.params.prompt_logprobs
        assert top is not None
        for at in range(len(request.prompt_logprobs), min(start + len(logits), len(request.prompt) - 1)):
            request.prompt_logprobs.append(token_logprob(logits[at - start], request.prompt[at + 1], top))

    def append(self, tokens: Sequence[int], limit: int) -> Update:
        """Add emitted tokens one by one, as plain decoding would, until the request ends or has `limit` tokens."""
        request, history = self.request, self.history
        shown: list[str] = []
        taken = 0
        for token in tokens:
            taken += 1
            request.tokens.append(token)
            reason: FinishReason | None = None
            if history is not None:
                try:
                    history.walk(tokens[:taken])
                except RequestError as error:
                    reason, request.error = "error", str(error)
            if token in self.end_ids:
                reason = reason or "stop"
            elif self.text is not None:
                shown.append(self.text.push(token))
                if self.text.stopped:
                    reason = reason or "stop"
            if history is not None and history.ended:
                reason = reason or "stop"  # a structured output that is complete needs no end token
            if len(request.tokens) >= limit:
                reason = reason or "length"
            if reason is not None:
                request.finish_reason = reason
                if self.text is not None:
                    shown.append(self.text.finish())
                break
        if history is not None:
            history.commit()
        return Update(request, tuple(tokens[:taken]), "".join(shown), request.finish_reason is not None)

    def fail(self, error: Exception) -> Update:
        """End the request with an error, its own or (anything but a RequestError) the engine's."""
        request = self.request
        request.finish_reason = "error"
        request.fault = not isinstance(error, RequestError)
        request.error = str(error) if isinstance(error, PilotfishError) else f"{type(error).__name__}: {error}"
        return Update(request, (), self.text.finish() if self.text is not None else "", True)


def most_tokens(program: Program, prompt: Sequence[int], params: SamplingParams, texts: Texts | None) -> int:
    """How many tokens the request may have in the end. Raises InputError if anything that it names does not exist."""
    context, vocab = program.context_length, program.vocab_size
    if len(prompt) >= context:
        raise InputError(f"the prompt has {len(prompt)} tokens; the context of {context} must leave room for one more")
    named = {
        "the prompt": prompt,
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids or (),
        "banned_token_ids": params.banned_token_ids,
        "stop_token_ids": params.stop_token_ids,
    }
    for name, ids in named.items():
        for token in ids:
            if not 0 <= token < vocab:
                raise InputError(f"{name} has token id {token}; the vocabulary has ids 0..{vocab - 1}")
    if texts is None and (params.stop or params.bad_words or params.structured):
        raise InputError("stop strings, bad words and structured output need a tokenizer")
    return context if params.max_tokens is None else min(context, len(prompt) + params.max_tokens)


def new_history(
    prompt: Sequence[int], params: SamplingParams, vocab_size: int, end_ids: frozenset[int], texts: Texts | None
) -> History | None:
    """What the request's tokens do to its logits, None: nothing. Raises InputError for a grammar that is none."""
    if not params.adjusts:
        return None
    bad_words: list[Sequence[int]] = []
    grammar = None
    if texts is not None:
        bad_words = [ids for word in params.bad_words for ids in texts.spellings(word)]
        grammar = None if params.structured is None else texts.grammar(params.structured)
    return History(params, prompt, vocab_size, end_ids, bad_words, grammar)
