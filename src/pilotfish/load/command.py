"""The command `bench load`: its arguments, and its report as a table, JSON and a picture.

Why our own: guidellm needs torch, aiperf 138 packages (pandas, scipy, dash), locust sees no tokens of a stream.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pilotfish.bench import read_prompts
from pilotfish.errors import InputError, PilotfishError
from pilotfish.load.client import Level, Prompts, Server, calibrate, measure
from pilotfish.load.process import free_port, running

if TYPE_CHECKING:
    import httpx

BUSY = 0.5  # of a core: above, the client's own work shows in the figures
_LOAD, _PROMPTS, _OUT = "Load", "Requests", "Output"


def _option(help: str, metavar: str | None = None, panel: str | None = None, **more: Any) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(metavar=metavar, help=help, rich_help_panel=panel, **more)
    return found


def load(
    model_path: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="start `pilotfish serve MODEL` and measure it", show_default=False),
    ] = None,
    url: Annotated[str | None, _option("measure the server that runs there", "URL")] = None,
    serve_flags: Annotated[str, _option('flags of `pilotfish serve`, as in "--speculation off"', "FLAGS")] = "",
    api_key: Annotated[str | None, _option("the server's key", "KEY")] = None,
    model: Annotated[str | None, _option("the model's name there (default: its first)", "NAME")] = None,
    clients: Annotated[
        str | None, _option("clients that each wait for an answer, level by level (default: 1,4,16)", "LIST", _LOAD)
    ] = None,
    rate: Annotated[
        str | None, _option("instead: requests per second that wait for nobody, level by level", "LIST", _LOAD)
    ] = None,
    requests: Annotated[int | None, _option("requests of each level (default: 32)", "N", _LOAD, min=1)] = None,
    seconds: Annotated[
        float | None, _option("instead: send for so long, then wait for the answers", "S", _LOAD, min=0.001)
    ] = None,
    seed: Annotated[
        int | None, _option("of prompts and arrivals; the same again may meet a warm prefix cache", "N", _LOAD)
    ] = None,
    prompt_tokens: Annotated[
        str | None, _option("about so many tokens a prompt, from LOW to HIGH (default: 128:256)", "LOW:HIGH", _PROMPTS)
    ] = None,
    shared_prefix: Annotated[
        int, _option("about so many tokens more, which all prompts begin with", "N", _PROMPTS, min=0)
    ] = 0,
    prompts: Annotated[
        Path | None, _option("JSON lines with a prompt each, sent over and over as they are", "FILE", _PROMPTS)
    ] = None,
    max_tokens: Annotated[int, _option("most tokens of an answer", "N", _PROMPTS, min=1)] = 128,
    ignore_eos: Annotated[bool, _option("answers are exactly so long", None, _PROMPTS)] = False,
    temperature: Annotated[float, _option("0 takes the most likely token", "T", _PROMPTS, min=0.0)] = 0.0,
    speculation: Annotated[str | None, _option("sent as the field speculation", "S", _PROMPTS)] = None,
    plot: Annotated[Path | None, _option("a PNG with latency against tokens per second", "FILE", _OUT)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object", rich_help_panel=_OUT)] = False,
) -> None:
    """Load a server of the OpenAI interface and measure throughput and latency.

    Each prompt is new, so that a prefix cache helps only with --shared-prefix. A process of its own sends the load; how
    much of a core that took is reported, too.
    """
    if (url is None) == (model_path is None):
        raise InputError("name either a MODEL to serve or the --url of a server")
    if prompts is not None and prompt_tokens is not None:
        raise InputError("--prompts and --prompt-tokens exclude each other: the prompts of a file are sent as they are")
    if not math.isfinite(temperature) or not math.isfinite(seconds or 0.0):
        raise InputError("--temperature and --seconds must be finite numbers")
    levels = _levels(clients, rate, requests, seconds)
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    source = Prompts(
        seed,
        _range(prompt_tokens or "128:256"),
        shared_prefix,
        given=() if prompts is None else [sample.prompt for sample in read_prompts(prompts)],
    )
    _need("httpx")
    if plot is not None:
        _need("matplotlib")
        if plot.suffix.lower() != ".png" or not plot.parent.is_dir():
            raise InputError(f"--plot {plot} must be a .png file in a folder that exists")
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    fields |= {"seed": seed} if temperature else {}
    fields |= {"ignore_eos": True} if ignore_eos else {}
    fields |= {"speculation": speculation} if speculation is not None else {}
    with ExitStack() as stack:
        if model_path is not None:
            url = f"http://127.0.0.1:{(port := free_port())}"
            stack.enter_context(running(_serve(model_path, port, serve_flags), f"{url}/ready"))
        elif serve_flags:
            raise InputError("--serve-flags is for a MODEL to serve; the server at --url has its own")
        server = _server(str(url), api_key, model, fields)
        result = asyncio.run(_measure_all(server, source, levels, seed))
    if plot is not None:
        draw(result, plot)
    if as_json:
        print(json.dumps(result))
    else:
        _print(result)
    last = result["levels"][-1]
    if last["gone"]:
        raise PilotfishError(
            f"the server at {server.url} is gone: {last['gone']}; "
            f"{last['done']} of {last['requests']} requests of the last level were answered"
        )
    if not any(level["done"] for level in result["levels"]):
        raise PilotfishError(f"no request was answered; the first failed with {last['first_failure']}")


def _need(package: str) -> None:
    try:
        __import__(package)
    except ImportError:
        raise InputError(f"bench load needs {package}: pip install 'pilotfish[bench]'") from None


def _numbers(text: str, flag: str, kind: type[int] | type[float]) -> list[Any]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < value <= 1e5 for value in found):
        raise InputError(f"{flag} {text!r} must be numbers above 0 with commas between, as in 1,4,16")
    return found


def _levels(clients: str | None, rate: str | None, requests: int | None, seconds: float | None) -> list[Level]:
    if clients is not None and rate is not None:
        raise InputError("--clients and --rate exclude each other: clients wait for answers, a rate does not")
    if requests is not None and seconds is not None:
        raise InputError("--requests and --seconds exclude each other")
    count = requests or 32 if seconds is None else None
    if rate is not None:
        return [Level(None, value, count, seconds or 0.0) for value in _numbers(rate, "--rate", float)]
    return [Level(value, None, count, seconds or 0.0) for value in _numbers(clients or "1,4,16", "--clients", int)]


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1] <= 10**6:
        raise InputError(f"--prompt-tokens {text!r} must be a number of tokens, or LOW:HIGH, as in 128:256")
    return found


def _serve(model: str, port: int, flags: str) -> list[str]:
    try:
        own = shlex.split(flags)
    except ValueError as error:
        raise InputError(f"--serve-flags {flags!r}: {error}") from None
    if any(flag.startswith(("--port", "--host")) for flag in own):
        raise InputError("--serve-flags: host and port are chosen here")
    return [sys.executable, "-m", "pilotfish", "serve", model, "--host", "127.0.0.1", "--port", str(port), *own]


def _server(url: str, api_key: str | None, model: str | None, fields: dict[str, Any]) -> Server:
    """The server at that address, and its first model where none is named.

    Raises InputError for a wrong address or key, PilotfishError when nobody answers.
    """
    import httpx

    address = url.rstrip("/").removesuffix("/v1")
    try:
        wrong = httpx.URL(address).scheme not in ("http", "https") or not httpx.URL(address).host
    except httpx.InvalidURL:
        wrong = True
    if wrong:
        raise InputError(f"--url {url!r} must be an address as http://127.0.0.1:8000")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise InputError("--api-key must be printable ASCII characters")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        if model is None:
            model = _first_model(httpx.get(f"{address}/v1/models", headers=headers, trust_env=False, timeout=30.0))
    except httpx.HTTPError as error:
        raise PilotfishError(f"can not reach the server at {address}: {error or type(error).__name__}") from None
    return Server(address, {"model": model, **fields}, headers)


def _first_model(response: httpx.Response) -> str:
    if response.status_code in (401, 403):
        raise InputError(f"the server refuses the key with {response.status_code}; --api-key gives another")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, TypeError, LookupError):
        raise InputError(
            f"/v1/models of the server ({response.status_code}) lists no model; name it with --model"
        ) from None


async def _measure_all(server: Server, prompts: Prompts, levels: Sequence[Level], seed: int) -> dict[str, Any]:
    await calibrate(server, prompts)
    found = []
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        for level in levels:
            task = progress.add_task(_name(level.clients, level.rate), total=level.requests)
            before = await _model_ms(server)
            figures = await measure(server, prompts, level, seed, partial(progress.advance, task))
            after = await _model_ms(server)
            if before is not None and after is not None and figures["seconds"]:
                figures["model_share"] = round((after - before) / 1e3 / figures["seconds"], 4)
            found.append(figures)
            if found[-1]["gone"]:
                break
    return {"url": server.url, "request": server.fields, "seed": seed, "levels": found}


async def _model_ms(server: Server) -> float | None:
    """Milliseconds that a pilotfish server has spent in passes and drafters so far, None where nobody says."""
    import httpx

    async with server.client() as client:
        try:
            text = (await client.get("/metrics")).text
        except httpx.HTTPError:
            return None
    sums = re.findall(r"^pilotfish:(?:draft|verify)_milliseconds_sum (\S+)$", text, re.MULTILINE)
    return sum(map(float, sums)) if sums else None


def _name(clients: int | None, rate: float | None) -> str:
    return f"{clients} client{'s'[: clients != 1]}" if rate is None else f"{rate:g} requests/s"


def _print(result: dict[str, Any]) -> None:
    levels = result["levels"]
    table = Table(title=f"{result['request']['model']} at {result['url']}")
    table.add_column()
    for level in levels:
        table.add_column(_name(level.get("clients"), level.get("rate")), justify="right")
    for title in ("done", "rejected", "failed"):
        counts = [level[title] if title != "failed" else sum(level[title].values()) for level in levels]
        table.add_row("rejected (429)" if title == "rejected" else title, *map(str, counts))
    figures = [
        ("output tokens/s", "output_tokens_per_second", ""),
        ("all tokens/s", "total_tokens_per_second", ""),
        *((f"time to first token {percent}, ms", "ttft_ms", percent) for percent in ("p50", "p90", "p99")),
        *((f"inter-token latency {percent}, ms", "itl_ms", percent) for percent in ("p50", "p99")),
        *((f"whole answer {percent}, ms", "e2e_ms", percent) for percent in ("p50", "p99")),
        ("acceptance length", "acceptance_length", ""),
        ("prompt tokens out of a cache", "cached_tokens", ""),
    ]
    for title, key, percent in figures:
        values = [level[key][percent] if percent else level[key] for level in levels]
        table.add_row(title, *("-" if value is None else f"{value:.{1 if value >= 10 else 2}f}" for value in values))
    Console().print(table)
    for level in levels:
        name = _name(level.get("clients"), level.get("rate"))
        if level["first_failure"]:
            print(f"{name}: the first failure was {level['first_failure']}")
        if level["done"] and level["tokens_counted_by"] == "chunks":
            print(f"{name}: the server sends no usage, so chunks were counted as tokens")
        if "model_share" in level:
            print(f"{name}: {100 * level['model_share']:.1f} % of the time was passes and drafts")
        if level["client_cpu_share"] > BUSY:
            print(f"{name}: the client took {level['client_cpu_share']:.2f} of a core, which shows in the figures")


def draw(result: dict[str, Any], file: Path) -> None:
    """Latency against throughput, a point a level. Raises PilotfishError when the file can not be written."""
    from matplotlib.figure import Figure

    levels = [level for level in result["levels"] if level["done"]]
    load = "clients" if "clients" in result["levels"][0] else "requests/s"
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    figure.suptitle(f"{result['request']['model']}: latency against throughput (at each point: {load})")
    for axes, key, title in zip(
        figure.subplots(1, 2), ("ttft_ms", "itl_ms"), ("time to first token", "inter-token latency"), strict=True
    ):
        for percent, colour in (("p50", "tab:blue"), ("p99", "tab:orange")):
            points = [(level["output_tokens_per_second"], level[key][percent], level) for level in levels]
            points = [point for point in points if point[1] is not None]
            axes.plot([x for x, _, _ in points], [y for _, y, _ in points], "o-", color=colour, label=percent)
            for x, y, level in points if percent == "p99" else []:
                name = str(level["clients"]) if "clients" in level else f"{level['rate']:g}"
                axes.annotate(name, (x, y), textcoords="offset points", xytext=(0, 7), ha="center")
        axes.set(xlabel="output tokens/s", ylabel="ms", yscale="log", title=title)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.margins(x=0.08, y=0.15)
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise PilotfishError(f"can not write {file}: {error.strerror}") from None
