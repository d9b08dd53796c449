"""The command `serve`."""

from __future__ import annotations

import math
import socket
import sys
from ipaddress import ip_address
from typing import Annotated, Literal

import typer

from pilotfish.arguments import SPECULATION, Context, Model, Threads, Weights
from pilotfish.drafters.speculation import parse_speculation
from pilotfish.errors import InputError
from pilotfish.files import parse_bytes
from pilotfish.llm import LLM


def serve(
    model: Model,
    speculation: Annotated[
        str,
        typer.Option(metavar="S", help=f"for requests that do not choose. {SPECULATION}"),
    ] = "auto",
    host: Annotated[str, typer.Option(metavar="H", help="address to listen on; 0.0.0.0 is all")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="P", min=0, max=65535, help="0: any that is free")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="K", envvar="PILOTFISH_API_KEY", help="clients must send one of these; may be repeated"),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="most requests in one batch")] = 16,
    kv_cache_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="memory of the KV cache, as in 2GiB; auto: a share of what is free")
    ] = "auto",
    context: Context = None,
    weights: Weights = None,
    threads: Threads = None,
    max_queue: Annotated[
        int, typer.Option(metavar="N", min=0, help="requests that may wait; more are answered 429")
    ] = 256,
    request_timeout: Annotated[
        float, typer.Option(metavar="S", min=0, help="seconds after which a request is ended; 0: never")
    ] = 600.0,
    drain_timeout: Annotated[
        float, typer.Option(metavar="S", min=0, help="seconds that running requests have to end after SIGTERM")
    ] = 30.0,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="largest body of a request")] = "8MiB",
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="what clients call the model (default: its own name)")
    ] = None,
) -> None:
    """Serve a model over HTTP with OpenAI's interface. SIGTERM lets running requests end."""
    try:
        from pilotfish.server.run import run
        from pilotfish.server.service import Service, Settings
    except ImportError as error:
        raise InputError(f"the server needs the package {error.name}: pip install 'pilotfish[server]'") from None
    if any(not key or not key.isascii() or key != key.strip() for key in api_key or ()):
        raise InputError("an --api-key must be ASCII text that is not empty, without space around it")
    if not (math.isfinite(request_timeout) and math.isfinite(drain_timeout)):
        raise InputError("--request-timeout and --drain-timeout must be finite numbers of seconds")
    chosen = parse_speculation(speculation)
    memory: int | Literal["auto"] = "auto" if kv_cache_memory == "auto" else parse_bytes(kv_cache_memory)
    settings = Settings(
        api_keys=tuple(api_key or ()),
        max_queue=max_queue,
        max_body=parse_bytes(max_body),
        request_timeout=request_timeout or None,
        served_model_name=served_model_name,
    )
    listener = _listen(host, port)
    if not settings.api_keys and not ip_address(listener.getsockname()[0]).is_loopback:
        print(f"note: whoever reaches {host} may use this server; --api-key asks for a key", file=sys.stderr)

    def load() -> LLM:
        return LLM(
            model,
            speculation=chosen,
            threads=threads,
            context=context,
            max_num_seqs=max_num_seqs,
            weights=weights,
            kv_cache_memory_bytes=memory,
        )

    run(Service(load, settings), listener, drain_timeout)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise InputError(f"can not listen on {host} port {port}: {error.strerror or error}") from None
    return listener
