"""What a client is told when it does not get what it asked for: OpenAI's error body."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from pilotfish.errors import InputError

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 499: "client_closed_request"}


class ApiError(Exception):
    """Ends an HTTP request with `status` and OpenAI's error body. `param` is the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        # A message may quote what came in; half a surrogate pair can not go out.
        message = str(self).encode(errors="replace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every answer other than 200 holds."""

    error: ErrorDetail


def refused(error: InputError, fields: Container[str]) -> ApiError:
    """400 for what the engine refuses; its messages begin with the name of the parameter, if one is at fault."""
    first = re.match(r"\w+", str(error))
    param = first[0] if first and first[0] in fields else None
    return ApiError(400, str(error), param=param)


def invalid(errors: Sequence[Mapping[str, Any]], fields: Container[str]) -> ApiError:
    """400 for a body that is not of the model's form, from pydantic's list of errors.

    A field of several types brings one error for each of them; those of the first field at fault make the message.
    """
    first = errors[0]["loc"][0] if errors[0]["loc"] else None
    if first is None:
        return ApiError(400, f"the request must be a JSON object: {errors[0]['msg']}")
    name = str(first)
    mine = [error for error in errors if error["loc"][:1] == (first,)]
    if mine[0]["type"] == "extra_forbidden" and name not in fields:
        return ApiError(400, f"there is no parameter {name!r}", param=name, code="unknown_parameter")
    if mine[0]["type"] == "none_required":
        return ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")
    if any("content" in error["loc"] and error["loc"][-1] == "type" for error in mine):
        return ApiError(400, f"{name}: only parts of type 'text' are supported", param=name)
    if len(mine) == 1:
        name = ".".join(str(part) for part in mine[0]["loc"])
    messages = list(dict.fromkeys(str(error["msg"]) for error in mine))
    return ApiError(400, f"{name}: {'; or '.join(messages[:4])}", param=name)
