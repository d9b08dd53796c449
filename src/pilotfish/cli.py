"""The command line: reads arguments, prints results, turns errors into one line and an exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from pilotfish import bench
from pilotfish.drafters.base import parse_speculation, parse_speculative_config
from pilotfish.errors import InputError, PilotfishError
from pilotfish.llm import LLM, Completion
from pilotfish.request import SamplingParams

app = typer.Typer(
    help="Speculative execution of language models: the same text, bit for bit, in fewer passes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")

MODEL = typer.Argument(metavar="MODEL", help="a .gguf file, a Hugging Face model directory, or demo")
SPECULATION = (
    "off, or ngram[:k=K,n=4,min=2]: K draft tokens per step (default: as many as pay), n-grams of min to n tokens"
)


@app.command()
def generate(
    model: Annotated[str, MODEL],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="the prompt")] = None,
    prompt_file: Annotated[str | None, typer.Option(metavar="FILE", help="a file with the prompt; - is stdin")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="the prompt is a user's message in the model's template")
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="the system message, with --chat")] = None,
    speculation: Annotated[str | None, typer.Option(metavar="S", help=SPECULATION)] = None,
    speculative_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="the same in vLLM's words, instead of --speculation")
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="most tokens of the answer")] = 256,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 takes the most likely token")] = 0.0,
    top_k: Annotated[int, typer.Option(metavar="N", help="sample from the N likeliest tokens; 0: all")] = 0,
    top_p: Annotated[
        float, typer.Option(metavar="P", help="sample from the likeliest that hold this probability")
    ] = 1.0,
    min_p: Annotated[float, typer.Option(metavar="P", help="least probability relative to the likeliest")] = 0.0,
    seed: Annotated[int | None, typer.Option(metavar="N", help="makes sampling repeatable")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="end before this text; may be repeated")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on after the model's end token")] = False,
    context: Annotated[int | None, typer.Option(metavar="N", help="most tokens of prompt and answer")] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="requantise on load: bf16, int8 or int4 (default: as in the file)"),
    ] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="worker threads (default: the usable cores)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of the text")] = False,
) -> None:
    """Complete a prompt; the text streams to the terminal, a summary goes to stderr."""
    text = _read_prompt(prompt, prompt_file)
    if speculation is not None and speculative_config is not None:
        raise InputError("give --speculation or --speculative-config, not both")
    if system is not None and not chat:
        raise InputError("--system needs --chat")
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop or (),
        ignore_eos=ignore_eos,
    )
    chosen = (
        parse_speculative_config(speculative_config) if speculative_config else parse_speculation(speculation or "off")
    )
    llm = LLM(model, speculation=chosen, threads=threads, context=context, weights=weights)
    if llm.note:
        print(f"note: {llm.note}", file=sys.stderr)
    completion: Completion | None = None
    for chunk in llm.stream(text, params, chat=chat, system=system):
        if not as_json:
            print(chunk.text, end="", flush=True)
        completion = chunk.completion or completion
    assert completion is not None
    if as_json:
        print(json.dumps(completion.as_dict(), ensure_ascii=False))
    else:
        print()
        print(summary(completion), file=sys.stderr)


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


def _read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise InputError("give the prompt with --prompt TEXT or --prompt-file FILE, one of the two")
    if prompt is not None:
        return prompt
    assert prompt_file is not None
    try:
        data = sys.stdin.buffer.read() if prompt_file == "-" else Path(prompt_file).read_bytes()
    except OSError as error:
        raise InputError(f"can not read the prompt file {prompt_file}: {error.strerror}") from None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt file {prompt_file} is not UTF-8 text: byte {error.start} is invalid") from None


def main() -> None:
    """Run the command line: exit code 0 done, 2 bad usage or input, 1 anything else."""
    try:
        app()
    except InputError as error:
        _fail(error, 2)
    except PilotfishError as error:
        _fail(error, 1)
    except MemoryError:
        _fail("there is not enough memory; a smaller --context needs less", 1)
    except BrokenPipeError:
        # The reader of our output has gone; nothing is left to say to it.
        sys.stderr.close()
        sys.exit(1)


def _fail(error: Exception | str, code: int) -> None:
    print(f"pilotfish: {error}", file=sys.stderr)
    sys.exit(code)
