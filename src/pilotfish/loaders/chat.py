"""Chat templates: a conversation to the text that the model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pilotfish.errors import InputError


class ChatTemplate:
    """A model's Jinja template in a sandbox: it comes with the weights, so it is not to be trusted.

    Templates find what transformers offers them: `messages`, `tools`, `documents`, `add_generation_prompt`,
    `bos_token`, `eos_token`, `raise_exception`, `strftime_now`, a `tojson` that does not escape HTML, `break` and
    `continue`, and `generation` blocks, which only mark text for training. Raises InputError if it does not parse.
    """

    def __init__(self, source: str, bos: str, eos: str, tool_use: str | None = None) -> None:
        """`tool_use` is the template that some models have for conversations with tools."""
        self._default = _compile(source)
        self._tool_use = self._default if tool_use is None else _compile(tool_use)
        self._names = {"bos_token": bos, "eos_token": eos}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The conversation as text, up to where the assistant's answer begins.

        `messages` are objects with a `role` and mostly a `content`, of plain JSON values; fields that are null count
        as absent, since templates trip over them. `tools` are JSON schemas of functions. Raises InputError for what is
        no such conversation, and with the template's own words where it refuses one.
        """
        if not messages:
            raise InputError("the conversation has no messages")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InputError(f"a message must be an object with a role, such as 'user'; got {message!r:.80}")
        template = self._tool_use if tools else self._default
        try:
            return template.render(
                messages=[{key: value for key, value in message.items() if value is not None} for message in messages],
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._names,
            )
        except TemplateError as error:
            raise InputError(f"the chat template refuses this conversation: {_one_line(error)}") from None
        except Exception as error:  # a template is a program: it can fail like one
            what = f"{type(error).__name__}: {_one_line(error)}"
            raise InputError(f"the chat template fails on this conversation: {what}") from None


class _GenerationBlock(Extension):
    """Renders what stands in a `generation` block, in a scope of its own as transformers does."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise InputError(f"the model's chat template is broken at line {error.lineno}: {_one_line(error)}") from None
    except Exception as error:
        raise InputError(f"the model's chat template is broken: {_one_line(error)}") from None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
