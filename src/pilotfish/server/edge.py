"""What happens to every HTTP request around its handler: its id, keys, the size of its body, its line of log."""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import MutableMapping, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotfish.server.failures import ApiError

logger = logging.getLogger("pilotfish.server")

OPEN_PATHS = frozenset(("/health", "/ready", "/metrics", "/version"))
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Edge:
    """ASGI middleware. An exception of the application becomes 500, with the traceback in the log alone."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], max_body: int) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            self._check(scope, headers)
            await self._app(scope, self._limited(receive), send_with_id)
        except ApiError as error:
            await error_response(error)(scope, receive, send_with_id)
        except Exception:
            logger.exception("a handler failed", extra={"fields": {"request_id": request_id}})
            if status == 0:
                await error_response(ApiError(500, "the server failed on this request"))(scope, receive, send_with_id)
        finally:
            prompt_tokens, completion_tokens = state.get("tokens", (None, None))
            fields = {
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": state.get("status", status),
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "ms": round(1e3 * (time.perf_counter() - started), 3),
            }
            quiet = scope["path"] in OPEN_PATHS and status == 200
            shown = {name: value for name, value in fields.items() if value is not None}
            logger.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": shown})

    def _check(self, scope: Scope, headers: Headers) -> None:
        if self._keys and scope["path"] not in OPEN_PATHS:
            kind, _, key = headers.get("authorization", "").partition(" ")
            # All keys are compared, so the time says nothing about which one was near.
            right = [hmac.compare_digest(key.strip().encode(), known) for known in self._keys]
            if kind.lower() != "bearer" or not any(right):
                raise ApiError(
                    401,
                    "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > self._max_body):
            raise self._too_large()

    def _limited(self, receive: Receive) -> Receive:
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> ApiError:
        # The rest of the body is not read, so the connection can not serve another request.
        return ApiError(413, f"the body is larger than {self._max_body} bytes", headers={"Connection": "close"})


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, headers=error.headers)


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, message, and the `fields` of the record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)
