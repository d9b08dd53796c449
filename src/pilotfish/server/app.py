"""The routes, and the OpenAPI document that says what they take and give."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import pilotfish
from pilotfish.server import answers
from pilotfish.server.answers import Json
from pilotfish.server.chat import chat
from pilotfish.server.completions import complete
from pilotfish.server.edge import OPEN_PATHS, Edge, error_response
from pilotfish.server.failures import ApiError, ErrorBody
from pilotfish.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, Strict, TokenizeRequest
from pilotfish.server.service import Service
from pilotfish.server.tools import ToolUse

Handler = Callable[[Request], Awaitable[Response]]

_REFERENCE = "#/components/schemas/{model}"
_WORK = (400, 404, 408, 413, 415, 429, 500, 503, 504)
_READ = (400, 404, 408, 413, 415, 500, 503)


def create_app(service: Service) -> FastAPI:
    """The ASGI application of a service. Whoever starts the service stops it, too."""
    app = FastAPI(title="pilotfish", version=pilotfish.__version__, docs_url=None, redoc_url=None)
    app.add_middleware(Edge, api_keys=service.settings.api_keys, max_body=service.settings.max_body)
    app.add_exception_handler(ApiError, _on_api_error)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _on_http_error)  # type: ignore[arg-type]
    bodies: dict[str, type[Strict]] = {}
    locked = bool(service.settings.api_keys)

    def takes(path: str, model: type[Strict]) -> Json:
        bodies[path] = model
        schema = {"$ref": _REFERENCE.format(model=model.__name__)}
        return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}

    def post(
        path: str, model: type[Strict], gives: type[BaseModel], *, streams: bool = False
    ) -> Callable[[Handler], Handler]:
        responses = _errors(_WORK if streams else _READ, locked)
        if streams:
            responses[200] = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
        return app.post(path, response_model=gives, responses=responses, openapi_extra=takes(path, model))

    @post("/v1/completions", CompletionRequest, answers.Completion, streams=True)
    async def completions(http: Request) -> Response:
        """Texts that go on after prompts. With `stream` server-sent events."""
        arrived = time.perf_counter()
        return await complete(service, http, await service.read(http, CompletionRequest), arrived)

    @post("/v1/chat/completions", ChatRequest, answers.ChatCompletion, streams=True)
    async def chat_completions(http: Request) -> Response:
        """The assistant's answer to a conversation. With `stream` server-sent events."""
        arrived = time.perf_counter()
        return await chat(service, http, await service.read(http, ChatRequest), arrived)

    @post("/v1/tokenize", TokenizeRequest, answers.Tokenized)
    async def tokenize(http: Request) -> Response:
        """The token ids of a text or a conversation."""
        return JSONResponse(await _tokenize(service, await service.read(http, TokenizeRequest)))

    @post("/v1/detokenize", DetokenizeRequest, answers.Detokenized)
    async def detokenize(http: Request) -> Response:
        """The text of token ids, names of control tokens included."""
        body = await service.read(http, DetokenizeRequest)
        service.check_model(body.model)
        vocab = service.llm.config.vocab_size
        for token in body.tokens:
            if token >= vocab:
                raise ApiError(400, f"tokens has id {token}; the vocabulary has ids 0..{vocab - 1}", param="tokens")
        tokenizer = service.llm.tokenizer
        text = await service.aside(lambda: tokenizer.decode(body.tokens, skip_special=False), len(body.tokens))
        return JSONResponse({"prompt": text})

    def model_card() -> Json:
        length = service.llm.target.program.context_length
        card = {"id": service.model_name, "object": "model", "created": service.created, "owned_by": "pilotfish"}
        return {**card, "max_model_len": length}

    @app.get("/v1/models", response_model=answers.ModelList, responses=_errors((413, 500, 503), locked))
    async def models() -> Response:
        """The one model of this server."""
        return JSONResponse({"object": "list", "data": [model_card()]})

    @app.get("/v1/models/{model:path}", response_model=answers.Model, responses=_errors((404, 413, 500, 503), locked))
    async def model(model: str) -> Response:
        """The model, if that is its name."""
        card = model_card()
        service.check_model(model)
        return JSONResponse(card)

    @app.get("/health", response_model=answers.Status, responses=_errors((413, 500), False))
    async def health() -> Response:
        """200 while the process lives."""
        return JSONResponse({"status": "ok"})

    @app.get("/ready", response_model=answers.Status, responses=_errors((413, 500, 503), False))
    async def ready() -> Response:
        """200 when requests are taken; 503 while the model is loading, and when the server shuts down."""
        if not service.thread.ready:
            raise ApiError(503, "shutting down" if service.thread.draining else "loading", code="not_ready")
        return JSONResponse({"status": "ready"})

    @app.get("/version", response_model=answers.Version, responses=_errors((413, 500), False))
    async def version() -> Response:
        return JSONResponse({"version": pilotfish.__version__})

    @app.get("/metrics", response_class=Response, responses={**_errors((413, 500), False), **_METRICS})
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    document: Json = {}

    def openapi() -> Json:
        if not document:
            document.update(_document(app, bodies, locked))
        return document

    app.openapi = openapi  # type: ignore[method-assign]
    return app


async def _tokenize(service: Service, body: TokenizeRequest) -> Json:
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages, one of the two", param="prompt")
    if body.messages is None:
        if body.tools:
            raise ApiError(400, "tools belong to messages", param="tools")
        tokens = (await service.encode_texts([str(body.prompt)], special=body.add_special_tokens is not False))[0]
    else:
        if body.add_special_tokens is not None:
            raise ApiError(400, "a conversation's tokens are the template's", param="add_special_tokens")
        asked = ChatRequest(messages=body.messages, tools=body.tools)
        tools = ToolUse(asked)
        if (tools.active or tools.in_history) and not service.understands_tools:
            raise ApiError(400, "the model's chat template has no tool calls in a form known here", param="tools")
        tokens = await service.encode_chat(asked.conversation(), tools.shown)
    strings = None
    if body.return_token_strs:
        strings = [service.llm.tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]
    length = service.llm.target.program.context_length
    return {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": strings}


_METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


def _errors(statuses: tuple[int, ...], locked: bool) -> dict[int | str, dict[str, Any]]:
    return {
        status: {"model": ErrorBody, "description": HTTPStatus(status).phrase}
        for status in (*statuses, *((401,) if locked else ()))
    }


async def _on_api_error(http: Request, error: ApiError) -> Response:
    return error_response(error)


async def _on_http_error(http: Request, error: HTTPException) -> Response:
    """What the framework refuses: paths and methods that are not there."""
    return error_response(ApiError(error.status_code, str(error.detail), headers=error.headers))


def _document(app: FastAPI, bodies: Mapping[str, type[Strict]], locked: bool) -> Json:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, definitions = models_json_schema([(model, "validation") for model in bodies.values()], ref_template=_REFERENCE)
    schemas = document["components"]["schemas"]
    schemas |= definitions["$defs"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # the framework's own, which no route gives
            if locked and path not in OPEN_PATHS:
                operation["security"] = [{"key": []}]
    if locked:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document
