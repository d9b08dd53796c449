"""How answers go out: whole or as server-sent events, and never to a client that has gone."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from pilotfish.request import DraftCounts, Report
from pilotfish.server.answers import Json
from pilotfish.server.engine_thread import Generation
from pilotfish.server.failures import ApiError
from pilotfish.server.service import Service

_GRACE_SECONDS = 10.0  # that a reader has to take in what came before the request's time was over


class Envelope:
    """What all objects of one answer have in common."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        self._fields = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def __call__(self, choices: list[Json], **more: Any) -> Json:
        return {**self._fields, "choices": choices, **more}


def usage(generation: Generation) -> Json:
    """OpenAI's counts and what speculation did, over all samples of a request."""
    firsts = [samples[0] for samples in generation.requests]
    requests = [request for samples in generation.requests for request in samples]
    prompt_tokens = sum(len(request.prompt) for request in firsts)
    completion_tokens = sum(len(request.tokens) - len(request.prompt) for request in requests)
    counts = [request.counts for request in requests]
    by_drafter: dict[str, DraftCounts] = {}
    for count in counts:
        for name, drafter in count.by_drafter.items():
            total = by_drafter.setdefault(name, DraftCounts())
            total.drafted += drafter.drafted
            total.accepted += drafter.accepted
    report = Report()
    for request in requests:
        if request.report is not None:
            report.add(request.report)
    steps, accepted = sum(count.target_steps for count in counts), sum(count.accepted for count in counts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in firsts)},
        "speculation": {
            "drafted": sum(count.drafted for count in counts),
            "accepted": accepted,
            "acceptance_length": round(1 + accepted / steps, 3) if steps else 0.0,
            "by_drafter": {
                name: {"drafted": total.drafted, "accepted": total.accepted} for name, total in by_drafter.items()
            },
            "report": report.as_dict(),
        },
    }


def _note(scope: Mapping[str, Any], generation: Generation, status: int | None = None) -> None:
    """For the line of log."""
    requests = [request for samples in generation.requests for request in samples]
    output = sum(len(request.tokens) - len(request.prompt) for request in requests)
    scope["state"]["tokens"] = (sum(len(prompt) for prompt in generation.prompts), output)
    if status is not None:
        scope["state"]["status"] = status


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _race(work: Awaitable[Any], receive: Receive, seconds: float | None) -> bool:
    """Whether `work` ended before the client left and the time was over; if not, it is cancelled."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def whole(
    service: Service, http: Request, generation: Generation, answer: Callable[[], Awaitable[Json]]
) -> Response:
    """The answer as one JSON object; the generation is cancelled when the client goes, or anything fails."""
    content: Json = {}

    async def work() -> None:
        content.update(await answer())

    try:
        if not await _race(work(), http.receive, None):
            _note(http.scope, generation, 499)
            return Response(status_code=499)  # nobody reads it
        return JSONResponse(content)
    finally:
        service.thread.cancel(generation)
        _note(http.scope, generation)


class EventStream(Response):
    """Server-sent events, as OpenAI sends them: objects, then [DONE]. A failure is an object with `error`."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, generation: Generation, objects: AsyncIterator[Json]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._service = service
        self._generation = generation
        self._objects = objects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = self._generation.deadline
        limit = None if deadline is None else max(0.0, deadline - time.monotonic()) + _GRACE_SECONDS
        try:
            if not await _race(self._send(scope, send), receive, limit):
                _note(scope, self._generation, 499)
        finally:
            self._service.thread.cancel(self._generation)
            _note(scope, self._generation)

    async def _send(self, scope: Scope, send: Send) -> None:
        async def event(data: str) -> None:
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for item in self._objects:
                await event(json.dumps(item, ensure_ascii=False, separators=(",", ":")))
        except ApiError as error:
            scope["state"]["status"] = error.status
            await event(json.dumps(error.body()))
        await event("[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
