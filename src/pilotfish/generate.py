"""The command `generate`: every sampling feature as a flag, text or JSON out."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from pilotfish.arguments import SPECULATION, Context, Model, Threads, Weights
from pilotfish.completion import Completion
from pilotfish.drafters.speculation import parse_speculation, parse_speculative_config
from pilotfish.errors import InputError, PilotfishError
from pilotfish.files import read_text
from pilotfish.llm import LLM
from pilotfish.params import ACCEPTANCE_RULES, MAX_LOGPROBS, SamplingParams, StructuredOutput

_CHOICE, _END, _FORM, _OUT = "Choice of tokens", "End of the answer", "Structured output (one of them)", "Output"


def _option(help: str, metavar: str | None = None, panel: str | None = None) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(metavar=metavar, help=help, rich_help_panel=panel)
    return found


def generate(
    model: Model,
    prompt: Annotated[str | None, _option("the prompt", "TEXT")] = None,
    prompt_file: Annotated[str | None, _option("a file with the prompt; - is stdin", "FILE")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="the prompt is a user's message in the model's template")
    ] = False,
    system: Annotated[str | None, _option("the system message, with --chat", "TEXT")] = None,
    speculation: Annotated[str | None, _option(SPECULATION, "S")] = None,
    speculative_config: Annotated[
        str | None, _option("the same in vLLM's words, instead of --speculation", "JSON")
    ] = None,
    acceptance: Annotated[
        str,
        _option(
            f"the rule that drafts stand by: {', '.join(ACCEPTANCE_RULES)}; with match the text is that without "
            "speculation, with the others it follows the same law (typical-lossy: not even that)",
            "RULE",
        ),
    ] = "match",
    context: Context = None,
    weights: Weights = None,
    threads: Threads = None,
    temperature: Annotated[float, _option("0 takes the most likely token", "T", _CHOICE)] = 0.0,
    top_k: Annotated[int, _option("sample from the N likeliest tokens; 0: all", "N", _CHOICE)] = 0,
    top_p: Annotated[float, _option("sample from the likeliest that hold this probability", "P", _CHOICE)] = 1.0,
    min_p: Annotated[float, _option("least probability relative to the likeliest", "P", _CHOICE)] = 0.0,
    typical_p: Annotated[
        float, _option("sample from those nearest to the mean surprise that hold this probability", "P", _CHOICE)
    ] = 1.0,
    repetition_penalty: Annotated[
        float, _option("above 1: tokens of prompt and answer are less likely to come again", "X", _CHOICE)
    ] = 1.0,
    presence_penalty: Annotated[
        float, _option("taken from the logits of all tokens of the answer, -2 to 2", "X", _CHOICE)
    ] = 0.0,
    frequency_penalty: Annotated[
        float, _option("the same for each time that the token is there, -2 to 2", "X", _CHOICE)
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None, _option("added to the token's logit, -100 to 100; may be repeated", "ID=X", _CHOICE)
    ] = None,
    allowed_token_ids: Annotated[str | None, _option("only these tokens, commas between", "IDS", _CHOICE)] = None,
    banned_token_ids: Annotated[str | None, _option("never these tokens, commas between", "IDS", _CHOICE)] = None,
    bad_word: Annotated[
        list[str] | None, _option("never the tokens of this text in a row; may be repeated", "TEXT", _CHOICE)
    ] = None,
    seed: Annotated[
        int | None, _option("makes sampling repeatable; sample i of several has N + i", "N", _CHOICE)
    ] = None,
    max_tokens: Annotated[int, _option("most tokens of the answer", "N", _END)] = 256,
    min_tokens: Annotated[int, _option("no end and no stop text counts before so many", "N", _END)] = 0,
    stop: Annotated[list[str] | None, _option("end before this text; may be repeated", "TEXT", _END)] = None,
    stop_token_ids: Annotated[str | None, _option("end with one of these tokens, commas between", "IDS", _END)] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="go on after the model's end token", rich_help_panel=_END)
    ] = False,
    json_object: Annotated[
        bool, typer.Option("--json-object", help="the answer is a JSON object", rich_help_panel=_FORM)
    ] = False,
    json_schema: Annotated[str | None, _option("JSON that this schema describes", "FILE", _FORM)] = None,
    regex: Annotated[str | None, _option("a text that this expression matches", "REGEX", _FORM)] = None,
    choice: Annotated[list[str] | None, _option("one of these texts; may be repeated", "TEXT", _FORM)] = None,
    grammar: Annotated[
        str | None, _option("a text of this grammar, in Lark's syntax or in llama.cpp's GBNF", "FILE", _FORM)
    ] = None,
    n: Annotated[int, _option("samples of the one prompt", "N", _OUT)] = 1,
    logprobs: Annotated[
        int | None,
        _option(
            "the log-probability of each token under the model itself (before penalties, filters and masks), and those "
            f"of the N likeliest, up to {MAX_LOGPROBS}; needs --json",
            "N",
            _OUT,
        ),
    ] = None,
    prompt_logprobs: Annotated[int | None, _option("the same for the prompt; needs --json", "N", _OUT)] = None,
    echo: Annotated[bool, typer.Option("--echo", help="begin with the prompt", rich_help_panel=_OUT)] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="tell what was drafted, and whether it paid", rich_help_panel=_OUT)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON object instead of the text", rich_help_panel=_OUT)
    ] = False,
) -> None:
    """Complete a prompt; the text streams to the terminal, a summary goes to stderr."""
    text = _read_prompt(prompt, prompt_file)
    if speculation is not None and speculative_config is not None:
        raise InputError("give --speculation or --speculative-config, not both")
    if system is not None and not chat:
        raise InputError("--system needs --chat")
    if (logprobs is not None or prompt_logprobs is not None) and not as_json:
        raise InputError("--logprobs and --prompt-logprobs need --json, which has room for them")
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_biases(logit_bias or ()),
        allowed_token_ids=None if allowed_token_ids is None else _ids("--allowed-token-ids", allowed_token_ids),
        banned_token_ids=_ids("--banned-token-ids", banned_token_ids),
        bad_words=bad_word or (),
        seed=seed,
        n=n,
        stop=stop or (),
        stop_token_ids=_ids("--stop-token-ids", stop_token_ids),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        structured=_structured(json_object, json_schema, regex, choice or (), grammar),
        acceptance=acceptance,
    )
    chosen = (
        parse_speculative_config(speculative_config) if speculative_config else parse_speculation(speculation or "off")
    )
    llm = LLM(model, speculation=chosen, threads=threads, context=context, weights=weights)
    if llm.note:
        print(f"note: {llm.note}", file=sys.stderr)
    if n == 1 and not as_json:
        completions = [_stream(llm, text, params, chat, system)]
    else:
        completions = llm.generate(text, params, chat=chat, system=system)
    if as_json:
        objects = [completion.as_dict() for completion in completions]
        print(json.dumps(objects[0] if n == 1 else {"samples": objects}, ensure_ascii=False))
    for index, completion in enumerate(completions):
        if n > 1 and not as_json:
            print(f"--- sample {index + 1} of {n}, seed {completion.seed}", file=sys.stderr)
            print(completion.text)
        if not as_json:
            print(summary(completion), file=sys.stderr)
        if explain:
            print("\n".join(explanation(completion)), file=sys.stderr)
        if completion.error is not None:
            raise PilotfishError(completion.error)


def _stream(llm: LLM, prompt: str, params: SamplingParams, chat: bool, system: str | None) -> Completion:
    completion: Completion | None = None
    for chunk in llm.stream(prompt, params, chat=chat, system=system):
        print(chunk.text, end="", flush=True)
        completion = chunk.completion or completion
    print()
    assert completion is not None
    return completion


def summary(completion: Completion) -> str:
    """One line for people."""
    timings, speculation = completion.timings, completion.speculation
    line = (
        f"{len(completion.tokens)} tokens, {timings['tokens_per_second']:.1f} tokens/s, "
        f"prefill of {completion.prompt_tokens} tokens {timings['prefill_ms']:.0f} ms"
    )
    if speculation["drafted"]:
        line += (
            f", acceptance length {speculation['acceptance_length']:.2f} "
            f"({speculation['accepted']} of {speculation['drafted']} drafts accepted)"
        )
    return line


def explanation(completion: Completion) -> list[str]:
    """What the controller decided for the request, and what came of it, in lines for people."""
    speculation = completion.speculation
    report = speculation.get("report")
    if report is None:
        return ["speculation was off"]
    steps = sum(report["steps"].values())
    lines = [
        f"{steps} steps: " + ", ".join(f"{count} {what}" for what, count in sorted(report["steps"].items())),
        *(
            f"{name}: {counts['accepted']} of {counts['drafted']} drafts accepted"
            for name, counts in speculation["by_drafter"].items()
        ),
        f"drafting took {report['draft_ms']:.1f} ms, rows of drafts about {report['verify_ms']:.1f} ms",
    ]
    if report["plain_ms"] and report["step_ms"]:
        lines.append(
            f"the steps took {report['step_ms']:.1f} ms; without drafts they would have taken about "
            f"{report['plain_ms']:.1f} ms ({report['plain_ms'] / report['step_ms']:.2f} times that)"
        )
    return lines


def _structured(
    json_object: bool, json_schema: str | None, regex: str | None, choice: Sequence[str], grammar: str | None
) -> StructuredOutput | None:
    if not (json_object or json_schema is not None or regex is not None or choice or grammar is not None):
        return None
    return StructuredOutput(
        json_object=json_object,
        json_schema=None if json_schema is None else read_text(json_schema, "JSON schema"),
        regex=regex,
        choice=choice,
        grammar=None if grammar is None else read_text(grammar, "grammar"),
    )


def _biases(given: Sequence[str]) -> dict[int, float]:
    biases = {}
    for text in given:
        token, _, bias = text.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise InputError(f"--logit-bias {text!r} is not ID=X, as in 42=-1.5") from None
    return biases


def _ids(flag: str, text: str | None) -> list[int]:
    try:
        return [] if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{flag} {text!r} must be token ids with commas between, as in 3,17") from None


def _read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise InputError("give the prompt with --prompt TEXT or --prompt-file FILE, one of the two")
    return prompt if prompt is not None else read_text(str(prompt_file), "prompt")
