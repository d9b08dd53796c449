"""A server in this process, on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from pilotfish import LLM
from pilotfish.server.app import create_app
from pilotfish.server.service import Service, Settings


@contextlib.contextmanager
def served(load: Callable[[], LLM], **settings: Any) -> Iterator[tuple[str, Service]]:
    """The address and the service; the model is loaded."""
    service = Service(load, Settings(**{"served_model_name": "m", **settings}))
    service.start()
    listener = socket.create_server(("127.0.0.1", 0))
    # Small buffers: a reader that stops is soon felt here.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    config = uvicorn.Config(create_app(service), log_config=None, lifespan="off", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        assert service.thread.loaded.wait(60) and service.thread.llm is not None
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", service
    finally:
        server.should_exit = True
        thread.join(10)
        assert service.thread.stop(10)
        assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
