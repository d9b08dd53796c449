"""The running server: its settings, its engine, and what all handlers do with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
from anyio import to_thread
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from pilotfish.drafters.speculation import check_loaded, parse_request_speculation
from pilotfish.errors import InputError
from pilotfish.llm import LLM
from pilotfish.params import SamplingParams
from pilotfish.server.answers import Json
from pilotfish.server.engine_thread import EngineThread, Generation
from pilotfish.server.failures import ApiError, invalid, refused
from pilotfish.server.metrics import Metrics
from pilotfish.server.protocol import Sampling, Strict
from pilotfish.server.tools import understands_tools

Body = TypeVar("Body", bound=Strict)
Value = TypeVar("Value")

_LARGE = 65536  # bytes of a body that is parsed, and characters of a text that is tokenized, off the event loop


@dataclass(frozen=True)
class Settings:
    """What the command line says. `request_timeout` in seconds, None: no limit."""

    api_keys: Sequence[str] = ()
    max_queue: int = 256
    max_body: int = 8 << 20
    request_timeout: float | None = 600.0
    body_timeout: float = 60.0
    served_model_name: str | None = None


class Service:
    """One model, served. `start` loads it on the engine's thread."""

    def __init__(self, load: Callable[[], LLM], settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.metrics = Metrics()
        self.thread = EngineThread(load, self.metrics, self.settings.max_queue)
        self.created = int(time.time())
        self._tools: bool | None = None

    def start(self) -> None:
        self.thread.start()

    @property
    def llm(self) -> LLM:
        """The model. Raises ApiError while it is loading."""
        if self.thread.llm is None:
            raise ApiError(503, "the server is still loading the model", code="not_ready", headers={"Retry-After": "1"})
        return self.thread.llm

    @property
    def model_name(self) -> str:
        return self.settings.served_model_name or self.llm.config.name or "pilotfish"

    @property
    def understands_tools(self) -> bool:
        if self._tools is None:
            self._tools = understands_tools(self.llm.tokenizer)
        return self._tools

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not served here."""
        if name is not None and name != self.model_name:
            message = f"there is no model {name!r} here; this server has {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def read(self, http: Request, model: type[Body]) -> Body:
        """The body of a request. Raises ApiError for one that is not JSON of this form, or comes too slowly."""
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        # Browsers send other types across origins without asking; a page must not reach a server on localhost so.
        if kind != "application/json":
            raise ApiError(415, f"the Content-Type is {kind!r}; it must be application/json")
        try:
            with anyio.fail_after(self.settings.body_timeout):
                data = await http.body()
        except TimeoutError:
            message = f"the body did not come within {self.settings.body_timeout:g} s"
            raise ApiError(408, message, code="timeout", headers={"Connection": "close"}) from None
        except ClientDisconnect:
            raise ApiError(499, "the client went away") from None

        def parse() -> Body:
            try:
                value = from_json(data, allow_inf_nan=False)
            except ValueError as error:
                raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
            try:
                return model.model_validate(value)
            except ValidationError as error:
                found = error.errors(include_url=False, include_context=False, include_input=False)
                raise invalid(found, fields_of(model)) from None

        return await self.aside(parse, len(data))

    async def encode_texts(self, prompts: Sequence[str | list[int]], special: bool = True) -> list[list[int]]:
        """Token ids of texts; what is token ids stays. Raises ApiError."""
        tokenizer = self.llm.tokenizer

        def encode() -> list[list[int]]:
            return [tokenizer.encode(text, special=special) if isinstance(text, str) else text for text in prompts]

        return await self._encode(encode, sum(map(len, prompts)), "prompt")

    async def encode_chat(self, messages: Sequence[Json], tools: Sequence[Json] | None) -> list[int]:
        """Token ids of a conversation in the model's template. Raises ApiError."""
        # Templates are programs that come with the weights: how long one runs, nobody knows.
        return await self._encode(lambda: self.llm.encode_chat(messages, tools=tools), _LARGE, "messages")

    async def _encode(self, encode: Callable[[], Value], size: int, param: str) -> Value:
        try:
            return await self.aside(encode, size)
        except InputError as error:
            raise ApiError(400, str(error), param=param) from None

    async def aside(self, call: Callable[[], Value], size: int) -> Value:
        """What `call` returns; on another thread if it has much to do (`size` in characters or tokens)."""
        return call() if size < _LARGE else await to_thread.run_sync(call)

    async def generate(
        self, body: Sampling, prompts: Sequence[Sequence[int]], params: SamplingParams, answers: bool, arrived: float
    ) -> Generation:
        """Give prompts to the engine; they are in its queue when this returns. Raises ApiError."""
        fields, context = fields_of(type(body)), self.llm.target.program.context_length
        for prompt in prompts:
            if len(prompt) + (params.max_tokens or 1) > context:
                wanted = "" if params.max_tokens is None else f" and max_tokens is {params.max_tokens}"
                raise ApiError(
                    400,
                    f"the prompt has {len(prompt)} tokens{wanted}; the context has {context} tokens",
                    param="max_tokens" if len(prompt) < context else None,
                    code="context_length_exceeded",
                )
        try:
            speculation = None if body.speculation is None else parse_request_speculation(body.speculation)
            if speculation is not None:
                check_loaded(speculation, self.llm.speculation)
            if params.structured is not None:
                await to_thread.run_sync(self.llm.prepare, params)
        except InputError as error:
            raise refused(error, fields) from None
        limit = self.settings.request_timeout
        generation = Generation(
            prompts=prompts,
            params=params,
            speculation=speculation,
            priority=body.priority or 0,
            answers=answers,
            fields=fields,
            deadline=None if limit is None else time.monotonic() + limit - (time.perf_counter() - arrived),
            arrived=arrived,
        )
        self.thread.submit(generation)
        try:
            await generation.admitted
        except BaseException:
            self.thread.cancel(generation)
            raise
        return generation


def fields_of(model: type[Strict]) -> frozenset[str]:
    """The names that clients know its fields by."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def sampling(body: Sampling, default_max_tokens: int | None, **more: Any) -> SamplingParams:
    """`body.sampling` with its InputError as an ApiError."""
    try:
        return body.sampling(default_max_tokens, **more)
    except InputError as error:
        raise refused(error, fields_of(type(body))) from None
