"""/v1/chat/completions: the assistant's answer to a conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response

from pilotfish.server.answers import Json
from pilotfish.server.engine_thread import Generation, Progress
from pilotfish.server.failures import ApiError
from pilotfish.server.logprobs import chat_logprobs, prompt_logprobs
from pilotfish.server.protocol import ChatRequest
from pilotfish.server.reply import Envelope, EventStream, usage, whole
from pilotfish.server.service import Service, sampling
from pilotfish.server.tools import ToolParser, ToolUse


async def chat(service: Service, http: Request, body: ChatRequest, arrived: float) -> Response:
    """Answer a request whole or as a stream. Raises ApiError."""
    service.check_model(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "give max_tokens or max_completion_tokens, not both", param="max_completion_tokens")
    if body.max_tokens == 0:
        raise ApiError(400, "max_tokens must be at least 1", param="max_tokens")
    tools = ToolUse(body)
    if (tools.active or tools.in_history) and not service.understands_tools:
        raise ApiError(400, "the model's chat template has no tool calls in a form known here", param="tools")
    more: Json = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    params = sampling(body, body.max_completion_tokens, **more)
    if tools.active:
        if params.structured is not None:
            raise ApiError(400, "a form of the answer and tools exclude each other", param="tools")
        params = sampling(
            body, body.max_completion_tokens, **more, structured=tools.form(), stop=(*params.stop, *tools.stop)
        )
    prompt = await service.encode_chat(body.conversation(), tools.shown)
    generation = await service.generate(body, [prompt], params, answers=True, arrived=arrived)
    pieces = _Pieces(service, body, generation, tools)
    if body.stream:
        wrap = Envelope("chatcmpl", "chat.completion.chunk", service.model_name)
        return EventStream(service, generation, _objects(wrap, body, generation, pieces))
    wrap = Envelope("chatcmpl", "chat.completion", service.model_name)
    return await whole(service, http, generation, lambda: _folded(wrap, generation, pieces))


class _Pieces:
    """Turns what the engine brings into pieces of choices: `delta`, `logprobs` and, at the end, `finish_reason`."""

    def __init__(self, service: Service, body: ChatRequest, generation: Generation, tools: ToolUse) -> None:
        self._tokenizer = service.llm.tokenizer
        self._body = body
        self._generation = generation
        self._parsers = [ToolParser(list(tools.functions)) for _ in range(generation.samples)] if tools.active else None
        self._calls = [0] * generation.samples

    def prompt_logprobs(self) -> Json:
        """A field of the whole answer, there once the first sample has begun; nothing unless it was asked for."""
        top = self._body.prompt_logprobs
        first = self._generation.requests[0][0]
        return {} if top is None else {"prompt_logprobs": prompt_logprobs(self._tokenizer, first.prompt_logprobs, top)}

    async def pieces(self) -> AsyncIterator[Json]:
        async for progress in self._generation.progress():
            yield self._piece(progress)

    def _piece(self, progress: Progress) -> Json:
        index, text = progress.index, progress.text
        calls: list[Json] = []
        parser = self._parsers[index] if self._parsers else None
        if parser is not None:
            text, calls = parser.push(text)
            if progress.finished:
                rest, last = parser.finish()
                text, calls = text + rest, calls + last
        delta: Json = {"content": text} if text else {}
        if calls:
            first = self._calls[index]
            delta["tool_calls"] = [{"index": first + at, **call} for at, call in enumerate(calls)]
            self._calls[index] += len(calls)
        piece: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._body.logprobs and progress.logprobs:
            piece["logprobs"] = {"content": chat_logprobs(self._tokenizer, progress.logprobs), "refusal": None}
        if progress.finished:
            reason = progress.request.finish_reason
            piece["finish_reason"] = "tool_calls" if reason == "stop" and self._calls[index] else reason
            piece["seed"] = progress.request.seed
        return piece


async def _objects(wrap: Envelope, body: ChatRequest, generation: Generation, pieces: _Pieces) -> AsyncIterator[Json]:
    nothing = {"usage": None} if body.include_usage else {}
    begun: set[int] = set()
    told = False
    async for piece in pieces.pieces():
        if piece["index"] not in begun:
            begun.add(piece["index"])
            role = {"index": piece["index"], "delta": {"role": "assistant", "content": ""}}
            about = {}
            if not told and piece["index"] == 0:
                told, about = True, pieces.prompt_logprobs()
            yield wrap([{**role, "logprobs": None, "finish_reason": None}], **about, **nothing)
        if piece["delta"] or piece["logprobs"] or piece["finish_reason"]:
            yield wrap([piece], **nothing)
    if body.include_usage:
        yield wrap([], usage=usage(generation))


async def _folded(wrap: Envelope, generation: Generation, pieces: _Pieces) -> Json:
    """The whole answer is its pieces put together, so the two can not differ."""
    texts = [""] * generation.samples
    calls: list[list[Json]] = [[] for _ in texts]
    logprobs: list[list[Json]] = [[] for _ in texts]
    choices: list[Json] = [{} for _ in texts]
    async for piece in pieces.pieces():
        index, delta = piece["index"], piece["delta"]
        texts[index] += delta.get("content", "")
        calls[index] += [
            {name: value for name, value in call.items() if name != "index"} for call in delta.get("tool_calls", ())
        ]
        if piece["logprobs"] is not None:
            logprobs[index] += piece["logprobs"]["content"]
        if piece["finish_reason"] is not None:
            choices[index] = {"index": index, "finish_reason": piece["finish_reason"], "seed": piece["seed"]}
    for choice, text, made, entries in zip(choices, texts, calls, logprobs, strict=True):
        message: Json = {"role": "assistant", "content": text if text or not made else None, "refusal": None}
        if made:
            message["tool_calls"] = made
        choice["message"] = message
        wanted = generation.params.logprobs is not None
        choice["logprobs"] = {"content": entries, "refusal": None} if wanted else None
    return wrap(choices, usage=usage(generation), **pieces.prompt_logprobs())
