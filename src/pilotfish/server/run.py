"""The server as a process: signals, logs, and what it prints when it is ready."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from types import FrameType

import uvicorn

from pilotfish.server.app import create_app
from pilotfish.server.edge import JsonLines
from pilotfish.server.service import Service

_LAST_SECONDS = 2  # after the drain, to send what is left

logger = logging.getLogger("pilotfish.server")


class _Server(uvicorn.Server):
    """Drains on the first signal, then ends; a second one ends it at once. Either way the exit code is 0."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_timeout: float) -> None:
        super().__init__(config)
        self._service = service
        self._drain_timeout = drain_timeout
        self._draining: asyncio.Task[None] | None = None

    async def run_until_signal(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        telling = asyncio.ensure_future(self._tell(listener))
        await self.serve(sockets=[listener])
        telling.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not uvicorn's own, which closes the listener at once and raises the signal again at the end.
        self._loop.call_soon_threadsafe(self._on_signal)

    def _on_signal(self) -> None:
        if self._draining is not None:
            self.should_exit = self.force_exit = True
            return
        logger.info("draining")
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        await self._service.thread.drain(self._drain_timeout)
        self.should_exit = True

    async def _tell(self, listener: socket.socket) -> None:
        """Say where the server is, once the model is there and requests are taken."""
        thread = self._service.thread
        while not (thread.loaded.is_set() and self.started):
            await asyncio.sleep(0.02)
        if thread.llm is None:
            self.should_exit = True
            return
        if thread.llm.note:
            print(f"note: {thread.llm.note}", file=sys.stderr)
        for line in thread.llm.memory_table():
            print(line, file=sys.stderr)
        host, port = listener.getsockname()[:2]
        print(f"http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)


def run(service: Service, listener: socket.socket, drain_timeout: float) -> None:
    """Serve until a signal comes. Raises what the loading of the model raised."""
    lines = logging.StreamHandler()
    lines.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[lines], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    config = uvicorn.Config(
        create_app(service),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=_LAST_SECONDS,
    )
    service.start()
    asyncio.run(_Server(config, service, drain_timeout).run_until_signal(listener))
    if service.thread.failure is not None:
        raise service.thread.failure
    if not service.thread.stop(_LAST_SECONDS):
        # It hangs in a load or in a long step, and the interpreter can not end while C++ runs.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
