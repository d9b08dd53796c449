"""Arguments that several commands have, said once."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="a .gguf file, a Hugging Face model directory, or demo")]
Weights = Annotated[
    str | None, typer.Option(metavar="KIND", help="requantise on load: bf16, int8 or int4 (default: as in the file)")
]
Threads = Annotated[int | None, typer.Option(metavar="N", help="worker threads (default: the usable cores)")]
Context = Annotated[int | None, typer.Option(metavar="N", help="most tokens of prompt and answer")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]

SPECULATION = (
    "off; auto: all that needs no second model; drafters with their options: ngram[:k=K,n=4,min=2], "
    "suffix[:k=K,depth=32,shared=200000,min=10], grammar, lookahead, layer-skip[:auto|exit=E|skip=LIST], "
    "draft:MODEL[,vocab=16k,weights=int4]; several joined by +, as in auto+draft:small.gguf. With k= one drafter has "
    "a fixed budget, else as much is drafted as pays"
)
