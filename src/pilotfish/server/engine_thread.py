"""The engine on a thread of its own, and what HTTP handlers hold of it.

Handlers live on an event loop that must never wait for the engine, and the engine never waits for a reader. Commands
go to the thread through a queue; what a step brought goes back with one call into each event loop.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial

from pilotfish.active import Update
from pilotfish.drafters.speculation import Speculation
from pilotfish.errors import InputError
from pilotfish.llm import LLM
from pilotfish.params import SamplingParams
from pilotfish.request import Request, TokenLogprob
from pilotfish.server.failures import ApiError, refused
from pilotfish.server.metrics import Metrics

logger = logging.getLogger("pilotfish.server")

_FAULT = "the engine failed on this request; the server's log says why"


@dataclass(frozen=True)
class Progress:
    """What a step brought to one sample. `request` is the engine's and changes until `finished`."""

    index: int  # of the sample: prompts x n, those of a prompt together
    request: Request
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finished: bool


@dataclass(eq=False)
class Generation:
    """The prompts of one HTTP request on their way through the engine. Made and read on one event loop."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    speculation: Speculation | None
    priority: int
    answers: bool
    fields: Container[str]  # names that an error may speak of
    deadline: float | None  # on time.monotonic's clock
    arrived: float  # on time.perf_counter's clock
    requests: list[list[Request]] = field(default_factory=list)  # for each prompt its samples, once admitted

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[Progress | ApiError] = asyncio.Queue()
        self.admitted: asyncio.Future[None] = self.loop.create_future()

    @property
    def samples(self) -> int:
        return len(self.prompts) * self.params.n

    async def progress(self) -> AsyncIterator[Progress]:
        """All events until every sample has ended. Raises ApiError for a failure, or when the time is over."""
        left = self.samples
        timer = None
        if self.deadline is not None:
            # A timer, as asyncio.wait_for of Python 3.11 can swallow a cancellation.
            late = ApiError(504, "the request took longer than the server allows", code="timeout")
            timer = self.loop.call_later(max(0.0, self.deadline - time.monotonic()), self.events.put_nowait, late)
        try:
            while left:
                event = await self.events.get()
                if isinstance(event, ApiError):
                    raise event
                left -= event.finished
                yield event
        finally:
            if timer is not None:
                timer.cancel()

    def _admit(self) -> None:
        if not self.admitted.done():
            self.admitted.set_result(None)

    def _fail(self, error: ApiError) -> None:
        if not self.admitted.done():
            self.admitted.set_exception(error)
            self.admitted.exception()  # a handler that has gone does not ask for it
        self.events.put_nowait(error)


@dataclass
class _Sample:
    generation: Generation
    index: int
    logprobs_sent: int = 0


class EngineThread:
    """Loads a model and runs its engine. All public methods may be called from any thread."""

    def __init__(self, load: Callable[[], LLM], metrics: Metrics, max_queue: int) -> None:
        """`max_queue`: how many samples may wait while as many run as the engine takes at a time."""
        self.llm: LLM | None = None
        self.failure: BaseException | None = None  # why the model could not be loaded
        self.loaded = threading.Event()  # or failed to
        self.draining = False
        self._load = load
        self._metrics = metrics
        self._max_queue = max_queue
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._samples: dict[int, _Sample] = {}  # by request id
        self._open: dict[Generation, int] = {}  # samples that have not ended
        self._lock = threading.Lock()  # of _open
        # A daemon, as nothing can end a thread that hangs in a load or a step.
        self._thread = threading.Thread(target=self._run, name="pilotfish-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def ready(self) -> bool:
        return self.llm is not None and not self.draining

    @property
    def open_samples(self) -> int:
        with self._lock:
            return sum(self._open.values())

    def submit(self, generation: Generation) -> None:
        """Queue it. Raises ApiError where the server is not ready or has too much to do."""
        if self.llm is None or self.draining:
            why = "is shutting down" if self.draining else "is still loading the model"
            raise ApiError(503, f"the server {why}", code="not_ready", headers={"Retry-After": "1"})
        capacity = self.llm.max_num_seqs + self._max_queue
        if generation.samples > capacity:
            raise ApiError(400, f"the request is for {generation.samples} samples; the server takes {capacity} at most")
        with self._lock:
            if sum(self._open.values()) + generation.samples > capacity:
                raise ApiError(
                    429,
                    f"{self._max_queue} requests are waiting already; try again later",
                    code="queue_full",
                    headers={"Retry-After": "1"},
                )
            self._open[generation] = generation.samples
        self._commands.put(partial(self._add, generation))

    def cancel(self, generation: Generation) -> None:
        """Drop what has not ended of it; its blocks are free after the step that runs."""
        with self._lock:
            running = generation in self._open
        if running:
            self._commands.put(partial(self._cancel, generation))

    async def drain(self, seconds: float) -> None:
        """Take no more, give those that run so many seconds to end, then end them with an error."""
        self.draining = True
        deadline = time.monotonic() + seconds
        while self.open_samples and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self.open_samples:
            logger.warning("%d requests did not end within the drain timeout", self.open_samples)
            self._commands.put(partial(self._fail_all, ApiError(503, "the server shuts down", code="shutdown")))

    def stop(self, seconds: float) -> bool:
        """End the thread after its current step; whether it did within so many seconds."""
        self._commands.put(None)
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            llm = self._load()
            self._engine = llm.engine()
            self._metrics.stats(self._engine.stats())
            self.llm = llm
        except BaseException as error:  # whoever started the thread tells of it
            self.failure = error
            return
        finally:
            self.loaded.set()
        while True:
            try:
                if not self._turn():
                    return
            except Exception:
                logger.exception("the engine's loop failed; every open request ends with it")
                self._fail_all(ApiError(500, _FAULT))
                self._engine = llm.engine()  # nobody knows what state the old one is in

    def _turn(self) -> bool:
        """All commands, then a step; whether to go on."""
        waits = not self._engine.busy
        while True:
            try:
                command = self._commands.get(block=waits)
            except queue.Empty:
                break
            if command is None:
                self._fail_all(ApiError(503, "the server shuts down", code="shutdown"))
                return False
            command()
            waits = False
        if self._engine.busy:
            updates = self._engine.step()
            self._deliver(updates)
            self._metrics.step(self._engine.last_step)
        self._metrics.stats(self._engine.stats())
        return True

    def _add(self, generation: Generation) -> None:
        requests: list[list[Request]] = []
        try:
            for prompt in generation.prompts:
                requests.append(
                    self._engine.add(
                        prompt,
                        generation.params,
                        speculation=generation.speculation,
                        priority=generation.priority,
                        answers=generation.answers,
                    )
                )
        except Exception as error:
            for request in (request for samples in requests for request in samples):
                self._engine.cancel(request)
            if isinstance(error, InputError):
                self._fail(generation, refused(error, generation.fields))
            else:
                logger.exception("a request could not be added")
                self._fail(generation, ApiError(500, _FAULT))
            return
        flat = [request for samples in requests for request in samples]
        self._samples |= {request.id: _Sample(generation, index) for index, request in enumerate(flat)}
        generation.requests = requests
        self._post(generation.loop, generation._admit)

    def _cancel(self, generation: Generation) -> None:
        with self._lock:
            running = generation in self._open
        if running:  # it may have ended since
            self._metrics.finished("abort", generation)
            self._drop(generation)

    def _drop(self, generation: Generation) -> None:
        for request in (request for samples in generation.requests for request in samples):
            if self._samples.pop(request.id, None) is not None:
                self._engine.cancel(request)
        with self._lock:
            self._open.pop(generation, None)

    def _fail(self, generation: Generation, error: ApiError) -> None:
        with self._lock:
            self._open.pop(generation, None)
        self._metrics.finished("error", generation)
        self._post(generation.loop, partial(generation._fail, error))

    def _fail_all(self, error: ApiError) -> None:
        with self._lock:
            generations = list(self._open)
        for generation in generations:
            try:
                self._drop(generation)
            except Exception:  # an engine that has failed may fail at this, too
                logger.exception("a request could not be dropped")
            self._fail(generation, error)
        self._samples.clear()

    def _deliver(self, updates: Sequence[Update]) -> None:
        """Tell the generations what a step brought, with one call into each event loop."""
        events: dict[asyncio.AbstractEventLoop, list[tuple[Generation, Progress]]] = {}
        failed: dict[Generation, ApiError] = {}
        for update in updates:
            request = update.request
            sample = self._samples.get(request.id)
            if sample is None or not (update.tokens or update.text or update.finished):
                continue
            generation = sample.generation
            self._metrics.tokens(request, len(update.tokens), generation.arrived)
            if update.finished:
                self._end(sample, request)
            if request.finish_reason == "error":
                message = _FAULT if request.fault else str(request.error)
                failed[generation] = ApiError(500 if request.fault else 400, message)
                continue
            new = tuple(request.logprobs[sample.logprobs_sent :])
            sample.logprobs_sent += len(new)
            progress = Progress(sample.index, request, update.text, update.tokens, new, update.finished)
            events.setdefault(generation.loop, []).append((generation, progress))
        for loop, batch in events.items():
            self._post(loop, partial(_put, batch))
        for generation, error in failed.items():
            self._drop(generation)
            self._fail(generation, error)

    def _end(self, sample: _Sample, request: Request) -> None:
        generation = sample.generation
        del self._samples[request.id]
        with self._lock:
            if generation in self._open:
                self._open[generation] -= 1
                if not self._open[generation]:
                    del self._open[generation]
        if request.finish_reason != "error":
            self._metrics.finished(str(request.finish_reason), generation)

    def _post(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed; its requests were cancelled or nobody waits for them
            logger.debug("an event loop has closed before its requests had ended")


def _put(batch: Sequence[tuple[Generation, Progress]]) -> None:
    for generation, progress in batch:
        generation.events.put_nowait(progress)
