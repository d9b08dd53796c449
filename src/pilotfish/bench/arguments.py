"""Arguments that several benchmark commands have."""

from __future__ import annotations

from typing import Annotated

import typer

PROMPTS_HELP = 'JSON lines {"class": ..., "prompt": ...}: a file, or a folder of .jsonl files'
Classes = Annotated[str | None, typer.Option(metavar="LIST", help="only these classes, with commas between")]
PerClass = Annotated[int | None, typer.Option(metavar="N", min=1, help="at most N prompts of a class, evenly spread")]
Repeat = Annotated[int, typer.Option(metavar="N", min=1, help="runs of each prompt and setting")]
Control = Annotated[bool, typer.Option("--control", help="also run off a second time, which shows the noise")]
MaxTokens = Annotated[int, typer.Option(metavar="N", min=2, help="most tokens of each answer")]
