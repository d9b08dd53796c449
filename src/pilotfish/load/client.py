"""Ask a server of the OpenAI interface from many clients at once, and time what comes back.

In a closed loop each client sends its next request when the last is answered; in an open loop requests arrive by a
Poisson process, whatever the server does, and are timed from when they were due, so a slow server can not hide that
others waited.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

from pilotfish.compare import PROMPTS
from pilotfish.errors import InputError, PilotfishError

if TYPE_CHECKING:
    import httpx

SILENCE_SECONDS = 300.0  # without a byte of an answer, before a request has failed
REFUSED_SECONDS = 0.1  # a client's pause after a failure, so that a refusing server is not stormed


class Prompts:
    """Prompts without end: natural sentences in random order, no two prompts with a common beginning.

    With `given` these are sent as they are, shuffled, over and over. `tokens_per_word` and `extra` (tokens of a prompt
    without words) are the tokenizer's; `calibrate` learns them from a server.
    """

    def __init__(
        self,
        seed: int,
        length: tuple[int, int] = (128, 256),
        shared: int = 0,
        text: str = "",
        given: Sequence[str] = (),
    ) -> None:
        self.length, self.shared = length, shared
        self.tokens_per_word, self.extra = 1.3, 10.0
        self._random = random.Random(seed)
        self._sentences = re.split(r"(?<=[.?!])\s+", text or " ".join(prompt for _, prompt in PROMPTS))
        self._given = self._random.sample(list(given), len(given))
        self._sent = 0
        self._prefix: str | None = None

    def words(self, count: int) -> str:
        """A text of so many words behind a number of its own."""
        words: list[str] = []
        while len(words) < count:
            words += re.findall(r"\S+\s*", self._random.choice(self._sentences) + " ")
        return f"Report {self._random.randrange(10**9)}: " + "".join(words[:count]).rstrip()

    def of(self, tokens: int) -> str:
        """A text of about so many tokens."""
        return self.words(max(1, round((tokens - self.extra) / self.tokens_per_word)))

    def next(self) -> str:
        if self._prefix is None:
            self._prefix = self.of(self.shared) + "\n\n" if self.shared else ""
        self._sent += 1
        if self._given:
            return self._prefix + self._given[(self._sent - 1) % len(self._given)]
        return self._prefix + self.of(self._random.randint(*self.length))


@dataclass(frozen=True)
class Server:
    """Where requests go and what each of them says beside its prompt."""

    url: str
    fields: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    def client(self) -> httpx.AsyncClient:
        import httpx

        return httpx.AsyncClient(
            base_url=self.url,
            headers=self.headers,
            timeout=httpx.Timeout(SILENCE_SECONDS, connect=10.0),
            # Queues belong to the server. And each request has a new connection, as a server may just be closing an
            # idle one (llama-server often is).
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,  # a proxy would be measured, too
        )


@dataclass
class Answer:
    """One request. Times are seconds of `perf_counter`; an arrival is (time, pieces of text that came together)."""

    started: float
    ended: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int = 0
    acceptance_length: float = 0.0  # 0: the server says nothing of speculation
    complete: bool = False
    failure: str | None = None  # the status, or connection, timeout, stream
    detail: str = ""
    retry_after: float = REFUSED_SECONDS

    @property
    def tokens(self) -> int:
        """Completion tokens by `usage`, or one for each piece where the server sends none."""
        return sum(pieces for _, pieces in self.arrivals) if self.completion_tokens is None else self.completion_tokens

    @property
    def first_ms(self) -> float:
        return 1e3 * (self.arrivals[0][0] - self.started)

    def gaps(self) -> list[tuple[float, float]]:
        """(milliseconds per token, tokens) of each arrival after the first.

        A piece may hold several tokens, as with speculation: which holds how many nobody says, so all count the same.
        """
        each = max(1, self.tokens) / max(1, sum(pieces for _, pieces in self.arrivals))
        return [
            (1e3 * (time - before) / (pieces * each), pieces * each)
            for (before, _), (time, pieces) in zip(self.arrivals, self.arrivals[1:], strict=False)
        ]


@dataclass(frozen=True)
class Level:
    """One load: so many clients, or a rate of requests per second; it ends by count or by time."""

    clients: int | None
    rate: float | None = None
    requests: int | None = None
    seconds: float = 0.0


async def ask(client: httpx.AsyncClient, server: Server, prompt: str, due: float | None = None) -> Answer:
    """Send one request and read its stream; never raises for what a server does."""
    import httpx

    answer = Answer(perf_counter() if due is None else due)
    try:
        async with client.stream("POST", "/v1/completions", json={**server.fields, "prompt": prompt}) as response:
            if response.status_code == 200:
                await _read(response, answer)
            else:
                answer.failure = str(response.status_code)
                answer.detail = _message(await response.aread())
                wait = response.headers.get("retry-after", "")
                answer.retry_after = min(float(wait), 10.0) if wait.isdigit() else REFUSED_SECONDS
    except httpx.ConnectError as error:
        answer.failure, answer.detail = "connection", str(error)
    except httpx.TimeoutException as error:
        answer.failure, answer.detail = "timeout", type(error).__name__
    except httpx.HTTPError as error:
        answer.failure, answer.detail = "stream", str(error) or type(error).__name__
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        answer.failure, answer.detail = "stream", f"an event is malformed: {error}"
    answer.ended = perf_counter()
    return answer


async def _read(response: httpx.Response, answer: Answer) -> None:
    """Read server-sent events. Raises one of the errors of a malformed event."""
    rest = b""
    async for data in response.aiter_bytes():
        now = perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        pieces = 0
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            value = line[5:].strip()
            if value == b"[DONE]":
                answer.complete = True
                continue
            event = json.loads(value)
            if "error" in event:
                raise ValueError(_message(value))
            for choice in event["choices"]:
                pieces += bool(choice["text"])
                if choice.get("finish_reason") == "error":
                    raise ValueError("the finish reason is error")
            if usage := event.get("usage"):
                answer.prompt_tokens = int(usage["prompt_tokens"])
                answer.completion_tokens = int(usage["completion_tokens"])
                if speculation := usage.get("speculation"):
                    answer.acceptance_length = float(speculation["acceptance_length"])
                if details := usage.get("prompt_tokens_details"):
                    answer.cached_tokens = int(details.get("cached_tokens") or 0)
        if pieces:
            answer.arrivals.append((now, pieces))
    if not answer.complete:
        answer.failure, answer.detail = "stream", "it ended without [DONE]"


def _message(body: bytes) -> str:
    """What an error says, in one line."""
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
        found = found.get("error", found.get("detail", text))
        text = str(found.get("message", found) if isinstance(found, dict) else found)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:300]


async def measure(
    server: Server, prompts: Prompts, level: Level, seed: int = 0, ended: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Put one load on the server and sum up; `gone` says why no more connection could be made, which ends a level."""
    answers: list[Answer] = []
    gone: str | None = None
    sent = 0
    arrivals = random.Random(seed)

    def goes_on(at: float) -> bool:
        return not gone and (at - begin < level.seconds if level.requests is None else sent < level.requests)

    async def one(client: httpx.AsyncClient, due: float | None = None) -> Answer:
        nonlocal gone
        answer = await ask(client, server, prompts.next(), due)
        if answer.failure == "connection":
            gone = answer.detail or "no connection"
        answers.append(answer)
        ended()
        return answer

    async def closed(client: httpx.AsyncClient) -> None:
        nonlocal sent
        while goes_on(perf_counter()):
            sent += 1
            answer = await one(client)
            if answer.failure:
                await asyncio.sleep(answer.retry_after)

    async def opened(client: httpx.AsyncClient, rate: float) -> None:
        nonlocal sent
        due, tasks = begin, []
        while goes_on(due):
            sent += 1
            await asyncio.sleep(max(0.0, due - perf_counter()))
            tasks.append(asyncio.create_task(one(client, due)))
            due += arrivals.expovariate(rate)
        await asyncio.gather(*tasks)

    async with server.client() as client:
        cpu, begin = process_time(), perf_counter()
        if level.rate is None:
            await asyncio.gather(*(closed(client) for _ in range(level.clients or 1)))
        else:
            await opened(client, level.rate)
        seconds = max((answer.ended for answer in answers), default=perf_counter()) - begin
        cpu_share = (process_time() - cpu) / (perf_counter() - begin)
    load: dict[str, Any] = {"clients": level.clients} if level.rate is None else {"rate": level.rate}
    return {**load, **_figures(answers, seconds), "gone": gone, "client_cpu_share": round(cpu_share, 4)}


def _figures(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """What the answers of one level say; None where nothing was measured."""
    done = [answer for answer in answers if answer.failure is None]
    failed = Counter(answer.failure for answer in answers if answer.failure)
    by_usage = all(answer.completion_tokens is not None for answer in done)
    output = sum(answer.tokens for answer in done)
    prompt = sum(answer.prompt_tokens or 0 for answer in done) if by_usage else None
    speculative = [answer for answer in done if answer.acceptance_length]
    passes = sum(answer.tokens / answer.acceptance_length for answer in speculative)
    return {
        "requests": len(answers),
        "done": len(done),
        "rejected": failed.pop("429", 0),
        "failed": dict(failed),
        "first_failure": next((f"{answer.failure}: {answer.detail}" for answer in answers if answer.failure), None),
        "seconds": round(seconds, 3),
        "prompt_tokens": prompt,
        "cached_tokens": sum(answer.cached_tokens for answer in done) if by_usage else None,
        "completion_tokens": output,
        "tokens_counted_by": "usage" if by_usage else "chunks",
        "output_tokens_per_second": round(output / seconds, 2),
        "total_tokens_per_second": None if prompt is None else round((prompt + output) / seconds, 2),
        "ttft_ms": _percentiles([(answer.first_ms, 1.0) for answer in done if answer.arrivals], (50, 90, 99)),
        "itl_ms": _percentiles([gap for answer in done for gap in answer.gaps()], (50, 99)),
        "e2e_ms": _percentiles([(1e3 * (answer.ended - answer.started), 1.0) for answer in done], (50, 99)),
        "acceptance_length": round(sum(answer.tokens for answer in speculative) / passes, 3) if passes else None,
    }


def _percentiles(samples: Sequence[tuple[float, float]], percents: Sequence[int]) -> dict[str, float | None]:
    """The smallest value below or at which lies that share of the weight."""
    found: dict[str, float | None] = dict.fromkeys(f"p{percent}" for percent in percents)
    total, below = sum(weight for _, weight in samples), 0.0
    for value, weight in sorted(samples):
        below += weight
        for percent in percents:
            if found[f"p{percent}"] is None and below >= total * percent / 100 - 1e-9 * total:
                found[f"p{percent}"] = round(value, 3)
    return found


async def calibrate(server: Server, prompts: Prompts) -> None:
    """Warm the server up, find out whether it takes these requests, and learn how many tokens a word has.

    Raises InputError when it refuses them, PilotfishError when it fails or is not there.
    """
    counted = []
    sizes = (1, max(16, prompts.length[1] // 2))
    async with server.client() as client:
        for words in sizes:
            answer = await ask(client, server, prompts.words(words))
            if answer.failure == "connection":
                raise PilotfishError(f"can not reach the server at {server.url}: {answer.detail}")
            if answer.failure:
                kind = InputError if answer.failure.startswith("4") and answer.failure != "429" else PilotfishError
                raise kind(f"the server at {server.url} refuses the first request: {answer.failure}: {answer.detail}")
            counted.append(answer.prompt_tokens or 0)
    if counted[1] > counted[0] > 0:
        prompts.tokens_per_word = (counted[1] - counted[0]) / (sizes[1] - sizes[0])
        prompts.extra = max(0.0, counted[0] - prompts.tokens_per_word)
