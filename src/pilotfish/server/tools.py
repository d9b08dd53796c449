"""Tool calls in the form of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": ...}</tool_call>` in the answer."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from pilotfish.errors import InputError
from pilotfish.loaders.tokenizer import Tokenizer
from pilotfish.params import StructuredOutput
from pilotfish.server.failures import ApiError
from pilotfish.server.protocol import ChatRequest, Function, NamedTool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_PROBE = {"type": "function", "function": {"name": "probe_of_tools", "description": "", "parameters": {}}}
_FORM = re.compile(re.escape(OPEN) + r"\s*\{+\s*[\"'](name|arguments)[\"']")
_TAIL = re.compile(r"\s*(?:<[a-z_]*)?\Z")  # what may belong to a call that begins: space, and a part of its tag
_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def understands_tools(tokenizer: Tokenizer) -> bool:
    """Whether the model's template shows it tools and tells it to call them in this form."""
    if not tokenizer.has_chat_template:
        return False
    try:
        shown = tokenizer.chat_template().render([{"role": "user", "content": "?"}], tools=[_PROBE])
    except InputError:
        return False
    # A tag that is a control token would not be in the answer's text.
    hidden = any(tokenizer.token_bytes(token) in (OPEN.encode(), CLOSE.encode()) for token in tokenizer.special_ids)
    return "probe_of_tools" in shown and _FORM.search(shown) is not None and not hidden


class ToolUse:
    """What a chat request says about tools, checked. Raises ApiError."""

    def __init__(self, body: ChatRequest) -> None:
        self.functions = {tool.function.name: tool.function for tool in body.tools or ()}
        if len(self.functions) < len(body.tools or ()):
            raise ApiError(400, "two tools have the same name", param="tools")
        choice: Any = body.tool_choice
        if choice is None:
            choice = "auto" if self.functions else "none"
        if choice != "none" and not self.functions:
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        if isinstance(choice, NamedTool):
            name = choice.function.name
            if name not in self.functions:
                raise ApiError(400, f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
            self.functions = {name: self.functions[name]}
        self.named = isinstance(choice, NamedTool)
        self.active = choice != "none"
        self.required = choice == "required" or self.named
        self.parallel = body.parallel_tool_calls is not False and not self.named
        self.shown = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if self.active else None
        self.in_history = any(
            message.role == "tool" or (message.role == "assistant" and message.tool_calls) for message in body.messages
        )

    def form(self) -> StructuredOutput | None:
        """The grammar that the answer must follow: where calls are required, or a function is strict.

        In other cases the model is free, and one that writes something else has not called.
        """
        strict = any(function.strict for function in self.functions.values())
        if not self.active or not (self.required or strict):
            return None
        names = [f"f{index}" for index in range(len(self.functions))]
        rules = [
            f"call: ( {' | '.join(names)} ) {json.dumps(chr(10) + CLOSE)}",
            *(_function_rules(name, f) for name, f in zip(names, self.functions.values(), strict=True)),
        ]
        if self.required:
            more = f' ("\\n" {json.dumps(OPEN + chr(10))} call)*' if self.parallel else ""
            rules.insert(0, f"start: {json.dumps(OPEN + chr(10))} call{more}")
        else:
            calls = "( lead call )*" if self.parallel else "( lead call )?"
            rules.insert(0, f"start: {calls} TEXT\nlead[lazy]: /(?s:.*){OPEN}\\n/")
            rules.append(f"TEXT: /(?s:.*)/ & ~/(?s:.*){OPEN}(?s:.*)/")
        return StructuredOutput(grammar="\n".join(rules))

    @property
    def stop(self) -> tuple[str, ...]:
        """Ends the answer with its first call, where only one is wanted."""
        return () if self.parallel or not self.active or self.required else (CLOSE,)


def _function_rules(name: str, function: Function) -> str:
    free = not function.strict and not function.parameters
    schema: dict[str, Any] = (
        {"type": "object"} if free else {"type": "object", **(function.parameters or {"properties": {}})}
    )
    if function.strict and not function.parameters:
        schema["additionalProperties"] = False
    schema.setdefault("x-guidance", _JSON_FORM)
    head = json.dumps(f'{{"name": {json.dumps(function.name)}, "arguments": ')
    return f'{name}: {head} {name}_arguments "}}"\n{name}_arguments: %json {json.dumps(schema)}'


class ToolParser:
    """Takes calls out of a text as it comes. What may be the beginning of a call is held back until it is decided.

    What looks like a call and is none (no JSON, no such function) stays text. Space between calls is dropped.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self.called = False

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """New text and new calls, in OpenAI's form."""
        self._held += text
        shown: list[str] = []
        calls: list[dict[str, Any]] = []
        while True:
            start = self._held.find(OPEN)
            if start < 0:
                tail = _TAIL.search(self._held)
                keep = tail.start() if tail and OPEN.startswith(tail[0].lstrip()) else len(self._held.rstrip())
                shown.append(self._held[:keep])
                self._held = self._held[keep:]
                break
            end, call = self._closed(start + len(OPEN))
            if call is None:
                break
            before = self._held[:start].rstrip()
            shown.append(before)
            calls.append(call)
            self.called = True
            self._held = self._held[end:]
        return "".join(shown), calls

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """What is left: a call that lost its closing tag counts if it is complete."""
        start = self._held.find(OPEN)
        call = None if start < 0 else self._call(self._held[start + len(OPEN) :])
        if call is not None:
            text, calls = self._held[:start].rstrip(), [call]
            self.called = True
        else:
            text, calls = self._held, []
            if self.called and not text.strip():
                text = ""
        self._held = ""
        return text, calls

    def _closed(self, start: int) -> tuple[int, dict[str, Any] | None]:
        """The call whose JSON begins at `start`, and where it ends; arguments may hold the closing tag, too."""
        end = self._held.find(CLOSE, start)
        while end >= 0:
            call = self._call(self._held[start:end])
            if call is not None:
                return end + len(CLOSE), call
            end = self._held.find(CLOSE, end + 1)
        return -1, None

    def _call(self, text: str) -> dict[str, Any] | None:
        try:
            call = json.loads(text, parse_constant=_no_json)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict):
            return None
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False)
        if not written.isascii() and any("\ud800" <= char <= "\udfff" for char in written):
            written = json.dumps(arguments)  # half a surrogate pair travels as an escape only
        function = {"name": name, "arguments": written}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
