"""Tool calls: taken out of the text as it streams, forced by a grammar, refused where the template knows none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from pilotfish import LLM
from pilotfish.loaders.chat import ChatTemplate
from pilotfish.loaders.tokenizer import Tokenizer
from pilotfish.params import StructuredOutput
from pilotfish.server.protocol import ChatRequest
from pilotfish.server.tools import ToolParser, ToolUse, understands_tools
from serving import served

# What Qwen's does, in short.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Call functions as <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>. {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "maximum": 9, "minimum": 1},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
USER = [{"role": "user", "content": "How is the weather in Rome?"}]


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "shown", "called"),
    [
        ("just text", "just text", []),
        ("a < b and <tool", "a < b and <tool", []),
        ("text \n", "text \n", []),
        (_call("f", a=1), "", [("f", {"a": 1})]),
        (f"I look. \n{_call('f', a=1)}\n{_call('g')}\n", "I look.", [("f", {"a": 1}), ("g", {})]),
        (f"{_call('f')} and so on", " and so on", [("f", {})]),
        (_call("f", a="</tool_call>"), "", [("f", {"a": "</tool_call>"})]),
        ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", {})]),
        ('<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
        ("<tool_call>f()</tool_call> x", "<tool_call>f()</tool_call> x", []),
        (_call("unknown"), _call("unknown"), []),
        ('<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',) * 2 + ([],),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',) * 2 + ([],),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',) * 2 + ([],),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800é"}}</tool_call>', "", [("f", {"a": "\ud800é"})]),
    ],
)
def test_parser(text: str, shown: str, called: list[tuple[str, Any]]) -> None:
    """The same in pieces of every size, and nothing of a call is ever shown."""
    for size in range(1, len(text) + 1):
        parser = ToolParser(["f", "g"])
        out, calls = "", []
        for at in range(0, len(text), size):
            piece, new = parser.push(text[at : at + size])
            out += piece
            calls += new
            if called:
                assert "<tool" not in out
        piece, new = parser.finish()
        out += piece
        calls += new
        got = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
        assert (out, got) == (shown, called), size
        assert all(call["function"]["arguments"].encode() for call in calls)  # it can travel as UTF-8
        assert len({call["id"] for call in calls}) == len(calls)


@pytest.fixture(scope="module")
def tool_model(smollm2: LLM) -> Iterator[LLM]:
    """SmolLM2 with a template that knows tools."""
    patch = pytest.MonkeyPatch()
    template = ChatTemplate(TEMPLATE, "", "")
    patch.setattr(Tokenizer, "chat_template", lambda tokenizer: template)
    patch.setattr(smollm2, "_chat_template", template)
    yield smollm2
    patch.undo()


@pytest.fixture(scope="module")
def client(tool_model: LLM) -> Iterator[openai.OpenAI]:
    with (
        served(lambda: tool_model) as (url, _),
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_templates_are_probed(smollm2: LLM, tool_model: LLM) -> None:
    assert understands_tools(tool_model.tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        for other in (TEMPLATE.replace("tool_call>\n{", "tool_call>\n<"), TEMPLATE.replace("if tools", "if documents")):
            template = ChatTemplate(other, "", "")
            patch.setattr(Tokenizer, "chat_template", lambda tokenizer, template=template: template)
            assert not understands_tools(tool_model.tokenizer)


def _use(**fields: Any) -> ToolUse:
    return ToolUse(ChatRequest.model_validate({"messages": USER, "tools": [WEATHER, CLOCK], **fields}))


@pytest.mark.parametrize(
    ("fields", "legal", "illegal"),
    [
        (
            {"tool_choice": "required"},
            [_call("get_weather", city="Rome", days=3), _call("clock"), f"{_call('clock')}\n{_call('clock', a=[1])}"],
            ["Well", _call("get_weather", city="Oslo", days=3), _call("other"), f"{_call('clock')} "],
        ),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            [_call("clock")],
            [f"{_call('clock')}\n{_call('clock')}"],
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
            [_call("clock", a={"b": 1})],
            [_call("get_weather", city="Rome", days=3)],
        ),
        (
            {"tools": [WEATHER | {"function": {**WEATHER["function"], "strict": True}}, CLOCK]},
            ["Well, well.", f"Well.\n{_call('get_weather', city='Rome', days=3)}\n{_call('clock', x=1)} and so on"],
            [_call("get_weather", city="Oslo", days=3), _call("other"), "<tool_call>\nx"],
        ),
    ],
    ids=["required", "one", "named", "strict"],
)
def test_grammar(smollm2: LLM, fields: dict[str, Any], legal: list[str], illegal: list[str]) -> None:
    form = _use(**fields).form()
    assert isinstance(form, StructuredOutput)
    start = smollm2._grammars.compile(form)
    for text in legal:
        grammar = start.copy()
        tokens = smollm2.tokenizer.encode(text, special=False)
        assert grammar.legal(tokens) == len(tokens), text
        for token in tokens:
            grammar.push(token)
        ends = [token in smollm2.tokenizer.eos_ids for token in range(64)]
        assert grammar.ended or any(grammar.legal([token]) for token, end in enumerate(ends) if end), text
    for text in illegal:
        tokens = smollm2.tokenizer.encode(text, special=False)
        assert start.copy().legal(tokens) < len(tokens), text


def test_free_calls_need_no_grammar() -> None:
    assert _use().form() is None and _use().stop == ()
    assert _use(parallel_tool_calls=False).stop == ("</tool_call>",)
    assert _use(tool_choice="none").shown is None


def test_required_call(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": USER, "tools": [WEATHER], "max_tokens": 64, "temperature": 0}
    whole = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    call = (choice.message.tool_calls or [])[0]
    assert call.type == "function" and call.id.startswith("call_")
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Paris", "Rome") and 1 <= arguments["days"] <= 9

    stream = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False, stream=True)
    pieces = [chunk.choices[0] for chunk in stream]
    calls = [call for piece in pieces for call in piece.delta.tool_calls or ()]
    assert "".join(piece.delta.content or "" for piece in pieces) == ""
    assert [(call.index, call.function.name, call.function.arguments) for call in calls if call.function] == [
        (0, "get_weather", call.function.arguments)
    ]
    assert pieces[-1].finish_reason == "tool_calls"

    named = client.chat.completions.create(
        **{**asked, "tools": [WEATHER, CLOCK]}, tool_choice={"type": "function", "function": {"name": "get_weather"}}
    )
    assert [call.function.name for call in named.choices[0].message.tool_calls or ()] == ["get_weather"]

    answered = [
        *USER,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    after = client.chat.completions.create(**{**asked, "messages": answered, "max_tokens": 8})
    assert after.usage is not None and whole.usage is not None
    assert after.usage.prompt_tokens > whole.usage.prompt_tokens + 10


def test_what_does_not_go_together(client: openai.OpenAI) -> None:
    for fields, param in (
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ):
        body = {"model": "m", "messages": USER, "max_tokens": 4, **fields}
        done = httpx.post(f"{client.base_url}chat/completions", json=body)
        assert done.status_code == 400 and done.json()["error"]["param"] == param, done.text
    broken = [
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}],
        }
    ]
    done = httpx.post(f"{client.base_url}chat/completions", json={"messages": [*USER, *broken], "max_tokens": 4})
    assert done.status_code == 400 and "not JSON" in done.text
