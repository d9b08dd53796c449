"""/v1/completions: texts that go on after their prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response

from pilotfish.server.answers import Json
from pilotfish.server.engine_thread import Generation, Progress
from pilotfish.server.failures import ApiError
from pilotfish.server.logprobs import CompletionLogprobs, prompt_logprobs
from pilotfish.server.protocol import CompletionRequest
from pilotfish.server.reply import Envelope, EventStream, usage, whole
from pilotfish.server.service import Service, sampling

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def complete(service: Service, http: Request, body: CompletionRequest, arrived: float) -> Response:
    """Answer a request whole or as a stream. Raises ApiError."""
    service.check_model(body.model)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "best_of must equal n; other numbers are not supported", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens 0 is only for echo, to score a prompt", param="max_tokens")
    more = {"logprobs": body.logprobs}
    if body.echo and body.logprobs is not None:
        more["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    if body.max_tokens == 0:
        more["max_tokens"] = 1  # the engine's least; it is left out of the answer
    params = sampling(body, DEFAULT_MAX_TOKENS, **more)
    given = _prompts(body)
    prompts = await service.encode_texts(given)
    generation = await service.generate(body, prompts, params, answers=False, arrived=arrived)
    choices = _Choices(service, body, generation, given)
    wrap = Envelope("cmpl", "text_completion", service.model_name)
    if body.stream:
        return EventStream(service, generation, _objects(wrap, body, generation, choices))
    return await whole(service, http, generation, lambda: _folded(wrap, generation, choices))


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


class _Choices:
    """Turns what the engine brings into pieces of choices."""

    def __init__(
        self, service: Service, body: CompletionRequest, generation: Generation, given: list[str | list[int]]
    ) -> None:
        self.scored = body.max_tokens == 0  # the prompt alone is wanted
        self._tokenizer = service.llm.tokenizer
        self._body = body
        self._generation = generation
        self._given = given
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()

    async def pieces(self) -> AsyncIterator[Json]:
        async for progress in _firsts_first(self._generation):
            yield self._piece(progress)

    def _piece(self, progress: Progress) -> Json:
        body, index = self._body, progress.index
        scored = self.scored
        piece: Json = {"index": index, "text": "" if scored else progress.text, "logprobs": None, "finish_reason": None}
        writer = None
        if body.logprobs is not None:
            writer = self._logprobs.setdefault(index, CompletionLogprobs(self._tokenizer, body.logprobs))
        if index not in self._begun:
            self._begun.add(index)
            self._begin(piece, writer)
        if writer is not None and not scored:
            _extend(piece, writer.output(progress.logprobs))
        if progress.finished:
            piece["finish_reason"] = "length" if scored else progress.request.finish_reason
            piece["seed"] = progress.request.seed
        return piece

    def _begin(self, piece: Json, writer: CompletionLogprobs | None) -> None:
        body = self._body
        at = piece["index"] // self._generation.params.n
        first, given = self._generation.requests[at][0], self._given[at]
        if body.prompt_logprobs is not None:
            piece["prompt_logprobs"] = prompt_logprobs(self._tokenizer, first.prompt_logprobs, body.prompt_logprobs)
        if body.echo:
            text = given if isinstance(given, str) else self._tokenizer.decode(given, skip_special=False)
            piece["text"] = text + piece["text"]
            if writer is not None:
                piece["logprobs"] = writer.echo(first.prompt, first.prompt_logprobs, text)


async def _firsts_first(generation: Generation) -> AsyncIterator[Progress]:
    """The progress of other samples of a prompt comes after the first one's first, which tells of the prompt."""
    begun: set[int] = set()
    held: dict[int, list[Progress]] = {}
    async for progress in generation.progress():
        prompt, sample = divmod(progress.index, generation.params.n)
        if sample and prompt not in begun:
            held.setdefault(prompt, []).append(progress)
            continue
        yield progress
        begun.add(prompt)
        for waiting in held.pop(prompt, ()):
            yield waiting


def _extend(piece: Json, lists: Json) -> None:
    if piece["logprobs"] is None:
        piece["logprobs"] = lists
    else:
        for name, entries in lists.items():
            piece["logprobs"][name] += entries


async def _objects(
    wrap: Envelope, body: CompletionRequest, generation: Generation, choices: _Choices
) -> AsyncIterator[Json]:
    nothing = {"usage": None} if body.include_usage else {}
    async for piece in choices.pieces():
        if piece["text"] or piece["logprobs"] or piece["finish_reason"] or "prompt_logprobs" in piece:
            yield wrap([piece], **nothing)
    if body.include_usage:
        yield wrap([], usage=_usage(generation, choices.scored))


async def _folded(wrap: Envelope, generation: Generation, choices: _Choices) -> Json:
    """The whole answer is its pieces put together, so the two can not differ."""
    folded: dict[int, Json] = {}
    async for piece in choices.pieces():
        choice = folded.setdefault(piece["index"], {**piece, "text": "", "logprobs": None})
        choice["text"] += piece["text"]
        if piece["logprobs"] is not None:
            _extend(choice, piece["logprobs"])
        choice |= {name: piece[name] for name in ("finish_reason", "seed") if name in piece}
    ordered = [folded[index] for index in range(generation.samples)]
    return wrap(ordered, usage=_usage(generation, choices.scored))


def _usage(generation: Generation, scored: bool) -> Json:
    counts = usage(generation)
    if scored:
        counts |= {"completion_tokens": 0, "total_tokens": counts["prompt_tokens"]}
    return counts
