"""What clients may send: OpenAI's fields, vLLM's further ones for sampling, and our own `speculation`.

A field that is not here is refused by name. A field that is here is done, or it is typed so that only the value which
asks for nothing passes.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pilotfish.params import ACCEPTANCE_RULES, MAX_LOGPROBS, MAX_SAMPLES, SamplingParams, StructuredOutput
from pilotfish.server.failures import ApiError

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Unsupported = Annotated[None, Field(description="not supported; must be null")]
Text = Annotated[str, Field(min_length=1)]


def _no_number(value: object) -> object:
    if not isinstance(value, bool):
        raise ValueError("Input should be a valid boolean")  # 0.0 equals False
    return value


No = Annotated[Literal[False], BeforeValidator(_no_number)]


class Strict(BaseModel):
    """No unknown fields, and no value is turned into another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: No | None = None


class StructuredOutputs(Strict):
    """A form that the whole answer must have, in vLLM's words; exactly one of them."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json", description="a JSON schema")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: Annotated[str | None, Field(description="Lark as llguidance has it, or llama.cpp's GBNF")] = None
    json_object: bool | None = None

    def form(self) -> StructuredOutput:
        return StructuredOutput(
            json_object=bool(self.json_object),
            json_schema=self.json_,
            regex=self.regex,
            choice=self.choice or (),
            grammar=self.grammar,
        )


class SchemaFormat(Strict):
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: Annotated[bool | None, Field(description="the schema holds in any case")] = None


class PlainFormat(Strict):
    type: Literal["text", "json_object"]

    def form(self) -> StructuredOutput | None:
        return StructuredOutput(json_object=True) if self.type == "json_object" else None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: SchemaFormat

    def form(self) -> StructuredOutput | None:
        return StructuredOutput(json_schema=self.json_schema.schema_)


ResponseFormat = Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")]


class Sampling(Strict):
    """The fields that completions and chat share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, Field(ge=1, le=MAX_SAMPLES)] = None
    max_tokens: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    temperature: Annotated[float | None, Field(ge=0, le=100, description="default 1")] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: Text | list[Text] | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**64)] = None
    user: Annotated[str | None, Field(description="taken, changes nothing")] = None
    # vLLM's
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31, description="0 or -1: all")] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100)] = None
    min_tokens: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    bad_words: list[Text] | None = None
    allowed_token_ids: Annotated[list[TokenId] | None, Field(min_length=1)] = None
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int | None, Field(ge=-(2**31), lt=2**31, description="lower runs earlier")] = None
    # ours
    typical_p: Annotated[float | None, Field(gt=0, le=1)] = None
    banned_token_ids: list[TokenId] | None = None
    acceptance: Annotated[str | None, Field(description=f"one of {', '.join(ACCEPTANCE_RULES)}")] = None
    speculation: Annotated[
        str | dict[str, str | int | float] | None,
        Field(
            description="off, auto, a drafter as in ngram:k=4, or an object such as "
            '{"method": "ngram", "num_speculative_tokens": 4}; default: the server\'s'
        ),
    ] = None

    def sampling(self, default_max_tokens: int | None, **more: Any) -> SamplingParams:
        """The engine's parameters. Raises InputError and ApiError."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only for stream: true", param="stream_options")
        given: dict[str, Any] = {name: getattr(self, name) for name in _PASSED if getattr(self, name) is not None}
        given.setdefault("temperature", 1.0)
        given["max_tokens"] = default_max_tokens if self.max_tokens is None else self.max_tokens
        given["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        given["logit_bias"] = _biases(self.logit_bias or {})
        given["structured"] = self._form()
        if self.seed is not None:
            given["seed"] = self.seed % 2**64  # OpenAI's are signed
        if self.top_k == -1:
            given["top_k"] = 0
        return SamplingParams(**{**given, **more})

    def _form(self) -> StructuredOutput | None:
        form = None if self.response_format is None else self.response_format.form()
        if self.structured_outputs is None:
            return form
        if form is not None:
            raise ApiError(400, "give response_format or structured_outputs, not both", param="structured_outputs")
        return self.structured_outputs.form()

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


# What SamplingParams calls by the same name and takes as it is.
_PASSED = (
    *("n", "temperature", "top_p", "top_k", "min_p", "typical_p", "min_tokens", "ignore_eos", "prompt_logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "acceptance"),
    *("stop_token_ids", "bad_words", "allowed_token_ids", "banned_token_ids"),
)


def _biases(given: dict[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise ApiError(400, f"logit_bias: {token[:40]!r} is not a token id", param="logit_bias")
        biases[int(token)] = bias
    return biases


class CompletionRequest(Sampling):
    """OpenAI's /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    best_of: Annotated[int | None, Field(ge=1, description="must equal n")] = None
    suffix: Unsupported = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class SystemMessage(Strict):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Strict):
    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(Strict):
    name: str
    arguments: Annotated[str, Field(description="JSON text")]


class CalledTool(Strict):
    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None  # clients send back what a stream gave them


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    refusal: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    annotations: Annotated[list[Any] | None, Field(max_length=0)] = None  # clients send back what they got


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Strict):
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool | None, Field(description="the arguments must follow the schema")] = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    """OpenAI's /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    tools: Annotated[list[Tool] | None, Field(max_length=128)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # Taken where they ask for nothing, or only describe the request.
    modalities: Annotated[list[Literal["text"]] | None, Field(min_length=1)] = None
    store: No | None = None
    service_tier: Literal["auto", "default"] | None = None
    verbosity: Literal["medium"] | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    web_search_options: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as templates take them: content is text, arguments of calls are objects. Raises ApiError."""
        return [_for_template(index, message) for index, message in enumerate(self.messages)]


def _for_template(index: int, message: Any) -> dict[str, Any]:
    shown: dict[str, Any] = message.model_dump(exclude_none=True)
    if shown["role"] == "developer":
        shown["role"] = "system"
    if isinstance(message.content, list):
        shown["content"] = "\n".join(part.text for part in message.content)
    for call in shown.get("tool_calls", ()):
        call.pop("index", None)
        where = f"messages.{index}.tool_calls"
        try:
            arguments = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            raise ApiError(400, f"{where}: the arguments of {call['id']} are not JSON", param=where) from None
        if not isinstance(arguments, dict):
            raise ApiError(400, f"{where}: the arguments of {call['id']} are not a JSON object", param=where)
        call["function"]["arguments"] = arguments
    return shown


class TokenizeRequest(Strict):
    """vLLM's: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message] | None, Field(min_length=1)] = None
    tools: list[Tool] | None = None
    add_special_tokens: Annotated[
        bool | None,
        Field(description="of a prompt; false: control tokens that the text spells are mere text, too; default true"),
    ] = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[TokenId]
