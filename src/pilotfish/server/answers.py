"""What clients get back. The OpenAPI document is made of these; streams send the `...Chunk` models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "tool_calls"]


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class CachedTokens(Answer):
    cached_tokens: int


class DrafterUsage(Answer):
    drafted: int
    accepted: int


class SpeculationReport(Answer):
    """What was decided: by what was verified the steps, and what drafts cost against what they saved, in ms.

    `plain_ms`: what the tokens would have taken without drafts, as predicted; `step_ms`: what their steps took; of
    that `draft_ms` in drafters, and `verify_ms` for rows of drafts, as predicted. Of steps that several requests share
    each has its part. All 0 for requests without speculation, and until a request has ended.
    """

    steps: dict[str, int]
    draft_ms: float
    verify_ms: float
    step_ms: float
    plain_ms: float


class SpeculationUsage(Answer):
    """Draft tokens of all samples together; `acceptance_length`: mean tokens per pass of the target."""

    drafted: int
    accepted: int
    acceptance_length: float
    by_drafter: dict[str, DrafterUsage]
    report: SpeculationReport


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    speculation: SpeculationUsage


class PromptLogprob(Answer):
    """`rank` is null for a token that is not among the likeliest that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id as text; null for the first token


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    seed: int
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[ChatLogprob]
    refusal: None = None


class FunctionCall(Answer):
    name: str
    arguments: str


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    seed: int


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class Tokenized(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    prompt: str


class Status(Answer):
    status: str


class Version(Answer):
    version: str


Json = dict[str, Any]
