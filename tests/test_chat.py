"""Chat templates against transformers (golden file), what the sandbox offers and refuses, and where templates stand."""

import json
from pathlib import Path
from typing import Any

import pytest

from pilotfish.errors import InputError
from pilotfish.loaders.chat import ChatTemplate
from pilotfish.loaders.gguf_file import read_gguf
from pilotfish.loaders.tokenizer import Tokenizer, TokenizerSource

DATA = Path(__file__).parent / "data"
GOLDEN: dict[str, Any] = json.loads((DATA / "tokenizer_chat.json").read_text(encoding="utf-8"))["models"]
SMALL: dict[str, Any] = json.loads((DATA / "tokenizer_small.json").read_text(encoding="utf-8"))["metadata"]
CASES = [(name, i) for name, model in GOLDEN.items() for i in range(len(model["chats"]))]
HELLO = [{"role": "user", "content": "Hello!"}]


def render(source: str, messages: Any = HELLO, **options: Any) -> str:
    return ChatTemplate(source, "<bos>", "<eos>").render(messages, **options)


# -- against transformers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "index"), CASES)
def test_rendering_equals_transformers(name: str, index: int) -> None:
    model, chat = GOLDEN[name], GOLDEN[name]["chats"][index]
    template = ChatTemplate(model["template"], model["bos_token"], model["eos_token"])
    assert template.render(chat["messages"], chat["add_generation_prompt"], chat["tools"]) == chat["text"]


def test_smollm2_file_gives_the_ids_of_transformers(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.load(TokenizerSource(metadata=read_gguf(smollm2_path).metadata))
    for chat in GOLDEN["smollm2"]["chats"]:
        text = tokenizer.chat_template().render(chat["messages"], chat["add_generation_prompt"])
        assert tokenizer.encode(text, special=True) == chat["ids"]


# -- what templates find -----------------------------------------------------------------------------------------------


def test_names_and_filters() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") == "<bos>Hello!<eos>"
    assert render("{{ add_generation_prompt }}{{ tools is none }}{{ documents is none }}") == "TrueTrueTrue"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"
    assert render("{{ {'b': '<é & \"x\">', 'a': 1} | tojson }}") == '{"b": "<é & \\"x\\">", "a": 1}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{{ strftime_now('%Y') | length }}") == "4"
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("a{% generation %}b{% set c = 1 %}{% endgeneration %}{{ c is defined }}") == "abFalse"
    assert render("  {% if true %}\n  x\n  {% endif %}\n") == "  x\n"


def test_null_fields_count_as_absent() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    source = "{{ messages[0].content is defined }}{{ messages[0].tool_calls[0].name }}"
    assert render(source, messages) == "Falsef"


def test_tools_take_their_own_template_where_there_is_one() -> None:
    template = ChatTemplate("plain", "", "", tool_use="{{ tools[0].name }}")
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[]) == "plain"
    assert template.render(HELLO, tools=[{"name": "f"}]) == "f"


def test_rendering_leaves_the_messages_alone() -> None:
    messages = [{"role": "user", "content": "x", "extra": {"list": [1]}}]
    with pytest.raises(InputError):
        render("{{ messages[0].extra.list.append(2) }}", messages)
    with pytest.raises(InputError):
        render("{{ messages[0].extra.update({'a': 1}) }}", messages)
    assert messages == [{"role": "user", "content": "x", "extra": {"list": [1]}}]


# -- what they are refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{% if %}", "broken at line 1"),
        ("\n\n{% for x in messages %}", "broken at line 3"),
        ("{{ 'x' | nosuchfilter }}", "broken at line 1: No filter named"),
        (None, "template is broken"),
        ("{{ raise_exception('Roles must\\nalternate') }}", "refuses this conversation: Roles must alternate$"),
        ("{{ nothing.here }}", "refuses this conversation: 'nothing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "refuses this conversation: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "refuses this conversation: .*append"),
        ("{{ range(10 ** 9) | list }}", "fails on this conversation: OverflowError"),
        ("{{ 'a' + 1 }}", "fails on this conversation: TypeError"),
        ("{{ 1 / 0 }}", "fails on this conversation: ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on this conversation: RecursionError"),
        ("{% include 'other' %}", "fails on this conversation: TypeError|no loader"),
    ],
)
def test_broken_or_hostile_templates_are_refused_in_one_line(source: Any, told: str) -> None:
    with pytest.raises(InputError, match=told) as caught:
        render(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "no messages"),
        (["Hello"], "must be an object with a role"),
        ([{"content": "Hello"}], "must be an object with a role"),
        ([{"role": 1}], "must be an object with a role"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        render("x", messages)


# -- where templates stand ---------------------------------------------------------------------------------------------


def from_metadata(**templates: Any) -> ChatTemplate:
    keys = {f"tokenizer.{key}": value for key, value in templates.items()}
    return Tokenizer.load(TokenizerSource(metadata={**SMALL, "tokenizer.ggml.pre": "gpt-2", **keys})).chat_template()


def test_gguf_templates() -> None:
    assert from_metadata(chat_template="{{ eos_token }}").render(HELLO) == "<|im_end|>"
    named = {"chat_template": "a", "chat_template.tool_use": "b", "chat_templates": ["tool_use"]}
    assert from_metadata(**named).render(HELLO) == "a"
    assert from_metadata(**named).render(HELLO, tools=[{}]) == "b"
    with pytest.raises(InputError, match="no chat template"):
        from_metadata()
    with pytest.raises(InputError, match="broken at line 1"):
        from_metadata(chat_template="{{")


def test_directory_templates(tmp_path: Path) -> None:
    files = json.loads((DATA / "tokenizer_rules.json").read_text(encoding="utf-8"))["pre"]["gpt-2"]["files"]
    tokens = {token: i for i, token in enumerate(SMALL["tokenizer.ggml.tokens"])}
    tokenizer_json = {**files["tokenizer.json"], "model": {**files["tokenizer.json"]["model"], "vocab": tokens}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json), encoding="utf-8")

    def load(**config: Any) -> ChatTemplate:
        config = {"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": "<|im_end|>", **config}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        return Tokenizer.load(TokenizerSource(directory=tmp_path)).chat_template()

    with pytest.raises(InputError, match="no chat template"):
        load()
    assert load(chat_template="{{ bos_token }}{{ eos_token }}").render(HELLO) == "<|begin_of_text|><|im_end|>"
    named = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
    assert load(chat_template=named).render(HELLO) == "a"
    assert load(chat_template=named).render(HELLO, tools=[{}]) == "b"
    with pytest.raises(InputError, match="must be text or objects of name and template"):
        load(chat_template=[{"name": "default"}])
    (tmp_path / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert load(chat_template="from the settings").render(HELLO) == "from the file"
