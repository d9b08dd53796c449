"""`bench load` against a server of our own whose delays, refusals and faults are known."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pilotfish.errors import InputError, PilotfishError
from pilotfish.load import load
from pilotfish.load.client import Answer, Level, Prompts, Server, _figures, _percentiles, ask, calibrate, measure
from pilotfish.load.process import free_port, running

pytest.importorskip("httpx")
app = typer.Typer()
app.command()(load)


@dataclass
class Fake:
    """What the server does, and what it saw. An answer has `pieces` pieces of `tokens_per_piece` tokens."""

    pieces: int = 4
    tokens_per_piece: int = 1
    first_delay: float = 0.0
    delay: float = 0.0
    usage: bool = True
    acceptance_length: float | None = None
    statuses: list[int] = field(default_factory=list)  # of the next requests; then 200
    fault: str | None = None
    faults_from: int = 0  # requests before are answered well
    key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    together: int = 0
    most_together: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""
    closing: ThreadingHTTPServer | None = None

    def prompts(self) -> list[str]:
        return [body["prompt"] for body in self.bodies]


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        fake: Fake = self.server.fake  # type: ignore[attr-defined]
        if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
            self._json(401, {"error": {"message": "wrong key"}})
        else:
            self._json(200, {"data": [{"id": "first"}, {"id": "second"}]})

    def do_POST(self) -> None:
        fake: Fake = self.server.fake  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with fake.lock:
            fake.bodies.append(body)
            number = len(fake.bodies)
            status = fake.statuses.pop(0) if fake.statuses else 200
            fake.together += 1
            fake.most_together = max(fake.most_together, fake.together)
        try:
            if status != 200:
                self._json(status, {"error": {"message": f"refused\nwith {status}"}})
            else:
                self._stream(fake, body, fake.fault if number > fake.faults_from else None)
        finally:
            with fake.lock:
                fake.together -= 1

    def _stream(self, fake: Fake, body: dict[str, Any], fault: str | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        time.sleep(fake.first_delay)
        for number in range(fake.pieces):
            if number:
                time.sleep(fake.delay)
            if fault == "cut" and number == 2:
                return
            if fault == "garbage" and number == 2:
                self.wfile.write(b"data: {not json}\n\n")
            if fault == "shape" and number == 2:
                self.wfile.write(b'data: {"choices": [{"index": 0}]}\n\n')
            if fault == "error" and number == 2:
                self.wfile.write(b'data: {"error": {"message": "the engine died"}}\n\n')
            self._event({"choices": [{"text": " word", "finish_reason": None}]})
        if fault == "vanish":
            fake.closing = self.server  # type: ignore[assignment]
            self.server.socket.close()
        usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": fake.pieces * fake.tokens_per_piece}
        speculation = {"speculation": {"acceptance_length": fake.acceptance_length}} if fake.acceptance_length else {}
        self._event({"choices": [{"text": "", "finish_reason": "length"}]})
        if fake.usage:
            self._event({"choices": [], "usage": {**usage, **speculation}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Listener(ThreadingHTTPServer):
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that went away


@pytest.fixture
def fake() -> Iterator[Fake]:
    listener = _Listener(("127.0.0.1", 0), _Handler)
    listener.daemon_threads = True
    state = Fake(url=f"http://127.0.0.1:{listener.server_address[1]}")
    listener.fake = state  # type: ignore[attr-defined]
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield state
    if state.closing is None:
        listener.shutdown()
        listener.server_close()


def _run(*arguments: str | Path) -> Any:
    """The JSON that the command prints."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert len(done.stdout.splitlines()) == 1
    return json.loads(done.stdout)


def _measure(fake: Fake, level: Level, prompts: Prompts | None = None) -> dict[str, Any]:
    return asyncio.run(measure(Server(fake.url, {"model": "first"}), prompts or Prompts(0), level))


def test_levels_of_clients(fake: Fake) -> None:
    fake.first_delay, fake.delay = 0.04, 0.01
    found = _run("--url", fake.url, "--clients", "1,3", "--requests", "6", "--max-tokens", "4", "--ignore-eos")
    assert set(found) == {"url", "request", "seed", "levels"}
    assert [level["clients"] for level in found["levels"]] == [1, 3]
    for level in found["levels"]:
        assert (level["requests"], level["done"], level["rejected"], level["failed"]) == (6, 6, 0, {})
        assert level["completion_tokens"] == 24 and level["tokens_counted_by"] == "usage"
        assert level["ttft_ms"]["p50"] >= 40 and level["ttft_ms"]["p50"] <= level["ttft_ms"]["p99"]
        assert level["itl_ms"]["p99"] >= 10 and level["itl_ms"]["p50"] <= level["itl_ms"]["p99"]
        assert level["e2e_ms"]["p50"] >= level["ttft_ms"]["p50"] + 3 * 10 - 1
        assert level["output_tokens_per_second"] == pytest.approx(24 / level["seconds"], rel=0.01)
        assert level["total_tokens_per_second"] == pytest.approx(
            (24 + level["prompt_tokens"]) / level["seconds"], rel=0.01
        )
        assert level["acceptance_length"] is None
        assert level["client_cpu_share"] > 0
    # Whole answers take 70 ms: one client can not be done before 6 of them, and a third client is a third lane.
    assert found["levels"][0]["seconds"] >= 6 * 0.07
    assert fake.most_together == 3
    body = fake.bodies[-1]
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["max_tokens"], body["temperature"], body["ignore_eos"]) == ("first", 4, 0.0, True)
    assert "speculation" not in body and "seed" not in body


def test_fields_that_were_asked_for(fake: Fake) -> None:
    fake.key = "secret"
    arguments = ("--url", f"{fake.url}/v1/", "--clients", "1", "--requests", "1", "--api-key", "secret")
    _run(*arguments, "--speculation", "ngram:k=4", "--temperature", "0.5", "--seed", "7", "--model", "second")
    body = fake.bodies[-1]
    assert (body["model"], body["speculation"], body["temperature"], body["seed"]) == ("second", "ngram:k=4", 0.5, 7)
    assert "ignore_eos" not in body


def test_one_client_waits_and_a_rate_does_not(fake: Fake) -> None:
    fake.first_delay = 0.3
    found = _run("--url", fake.url, "--rate", "200", "--requests", "10", "--seed", "1")["levels"][0]
    assert found["rate"] == 200.0 and "clients" not in found
    assert found["done"] == 10
    assert fake.most_together > 1
    fake.most_together, fake.first_delay = 0, 0.01
    assert _measure(fake, Level(1, requests=4))["done"] == 4
    assert fake.most_together == 1


def test_seconds_end_a_level(fake: Fake) -> None:
    fake.first_delay = 0.02
    closed = _run("--url", fake.url, "--clients", "2", "--seconds", "0.2")["levels"][0]
    assert closed["done"] == closed["requests"] > 0
    assert closed["done"] <= 2 * (1 + 0.2 / 0.02)
    opened = _run("--url", fake.url, "--rate", "50", "--seconds", "0.2")["levels"][0]
    assert opened["done"] == opened["requests"] > 0


def test_open_loop_times_from_when_a_request_was_due() -> None:
    """Waiting for its turn to be sent is part of a request's time."""

    async def late() -> Answer:
        server = Server(f"http://127.0.0.1:{free_port()}", {})
        async with server.client() as client:
            return await ask(client, server, "x", due=time.perf_counter() - 5)

    answer = asyncio.run(late())
    assert answer.failure == "connection"
    assert answer.ended - answer.started >= 5


def test_pieces_of_several_tokens(fake: Fake) -> None:
    """With speculation a gap is shared by the tokens that come after it."""
    fake.pieces, fake.tokens_per_piece, fake.delay, fake.acceptance_length = 5, 4, 0.04, 3.5
    found = _measure(fake, Level(1, requests=3))
    assert found["completion_tokens"] == 3 * 20
    assert found["acceptance_length"] == 3.5
    gaps = (found["e2e_ms"]["p99"] - found["ttft_ms"]["p50"]) / 16
    assert 10 <= found["itl_ms"]["p50"] <= max(40.0, 2 * gaps)


def test_figures_of_known_answers() -> None:
    slow = Answer(0.0, 2.0, [(1.0, 1), (1.5, 1), (2.0, 2)], 10, 8, 4, acceptance_length=4.0)  # two tokens a piece
    fast = Answer(1.0, 1.5, [(1.25, 1), (1.375, 1)], 20, 2, acceptance_length=1.0)
    bad = Answer(0.0, 0.5, [(0.25, 1)], failure="stream", detail="cut")
    refused = [Answer(0.0, 0.1, failure="429", detail="full")] * 2
    found = _figures([refused[0], slow, fast, bad, refused[1]], 2.0)
    assert (found["requests"], found["done"], found["rejected"], found["failed"]) == (5, 2, 2, {"stream": 1})
    assert found["first_failure"] == "429: full"
    assert (found["prompt_tokens"], found["completion_tokens"], found["cached_tokens"]) == (30, 10, 4)
    assert (found["output_tokens_per_second"], found["total_tokens_per_second"]) == (5.0, 20.0)
    assert found["ttft_ms"] == {"p50": 250.0, "p90": 1000.0, "p99": 1000.0}
    # Gaps per token: 500 / 2 for 2 tokens, 500 / 4 for 4, and 125 for 1: 125 is the weighted median.
    assert found["itl_ms"] == {"p50": 125.0, "p99": 250.0}
    assert found["e2e_ms"] == {"p50": 500.0, "p99": 2000.0}
    assert found["acceptance_length"] == pytest.approx(10 / (8 / 4 + 2 / 1))


def test_nothing_answered_is_null_not_zero() -> None:
    found = _figures([Answer(0.0, 1.0, failure="500")], 1.0)
    assert found["ttft_ms"] == {"p50": None, "p90": None, "p99": None}
    assert found["output_tokens_per_second"] == 0
    assert found["failed"] == {"500": 1}


def test_percentiles_are_values_that_occurred() -> None:
    values = [(float(value), 1.0) for value in range(100, 0, -1)]
    assert _percentiles(values, (50, 90, 99)) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert _percentiles([(1.0, 98.0), (9.0, 2.0)], (50, 99)) == {"p50": 1.0, "p99": 9.0}


def test_without_usage_chunks_are_counted_and_it_says_so(fake: Fake) -> None:
    fake.usage = False
    arguments = ("--url", fake.url, "--clients", "1", "--requests", "2")
    found = _run(*arguments)["levels"][0]
    assert found["tokens_counted_by"] == "chunks"
    assert found["completion_tokens"] == 8
    assert found["prompt_tokens"] is found["total_tokens_per_second"] is None
    assert "the server sends no usage" in CliRunner().invoke(app, arguments).stdout


def test_429_is_counted_apart(fake: Fake) -> None:
    fake.statuses = [200, 200, 429, 500, 429]  # the first two warm up
    found = _run("--url", fake.url, "--clients", "1", "--requests", "6")["levels"][0]
    assert (found["requests"], found["done"], found["rejected"], found["failed"]) == (6, 3, 2, {"500": 1})
    assert found["first_failure"] == "429: refused with 429"


@pytest.mark.parametrize(
    ("fault", "says"),
    [("cut", "[DONE]"), ("garbage", "malformed"), ("shape", "malformed"), ("error", "the engine died")],
)
def test_malformed_streams_are_failures(fake: Fake, fault: str, says: str) -> None:
    fake.fault, fake.faults_from = fault, 1
    found = _measure(fake, Level(1, requests=3))
    assert (found["done"], found["failed"]) == (1, {"stream": 2})
    assert says in found["first_failure"]


def test_vanished_server(fake: Fake) -> None:
    """What was measured is printed, the level ends early, and the exit code is 1."""
    fake.fault, fake.faults_from = "vanish", 4
    done = CliRunner().invoke(app, ["--url", fake.url, "--clients", "1,2", "--requests", "50", "--json"])
    assert isinstance(done.exception, PilotfishError) and not isinstance(done.exception, InputError)
    assert " is gone: " in str(done.exception) and "\n" not in str(done.exception)
    (level,) = json.loads(done.stdout)["levels"]
    assert level["gone"] and 3 <= level["done"] < level["requests"] < 50


def test_nothing_answered_is_an_error(fake: Fake) -> None:
    fake.statuses = [200, 200, 503, 503]
    done = CliRunner().invoke(app, ["--url", fake.url, "--clients", "1", "--requests", "2"])
    assert isinstance(done.exception, PilotfishError)
    assert str(done.exception) == "no request was answered; the first failed with 503: refused with 503"


def test_prompts_are_distinct_and_seeded(fake: Fake) -> None:
    arguments = ("--url", fake.url, "--clients", "1,2", "--requests", "8", "--prompt-tokens", "40:60")
    _run(*arguments, "--seed", "3")
    first = fake.prompts()
    assert len({prompt[:20] for prompt in first}) == len(first) == 18
    # The fake counts words as tokens, and that was learned.
    assert all(36 <= len(prompt.split()) <= 64 for prompt in first[2:])
    _run(*arguments, "--seed", "3")
    assert sorted(fake.prompts()[18:]) == sorted(first)
    _run(*arguments, "--seed", "4")
    assert not set(fake.prompts()[36:]) & set(first)


def test_shared_prefix(fake: Fake) -> None:
    _run("--url", fake.url, "--clients", "1", "--requests", "3", "--prompt-tokens", "20", "--shared-prefix", "50")
    heads = {prompt.partition("\n\nReport ")[0] for prompt in fake.prompts()[2:]}
    assert len(heads) == 1
    assert 46 <= len(heads.pop().split()) <= 54
    assert len(set(fake.prompts())) == 5


def test_prompts_of_a_file(fake: Fake, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"class": "x", "prompt": f"prompt {number}"}) + "\n" for number in range(3)))
    _run("--url", fake.url, "--clients", "1", "--requests", "6", "--prompts", file)
    assert sorted(fake.prompts()[2:]) == sorted(2 * ["prompt 0", "prompt 1", "prompt 2"])


def test_calibration_learns_the_tokens_of_a_word(fake: Fake) -> None:
    prompts = Prompts(0, (100, 100))
    asyncio.run(calibrate(Server(fake.url, {}), prompts))
    assert prompts.tokens_per_word == pytest.approx(1.0)
    assert prompts.extra == pytest.approx(2.0)  # "Report" and its number


def test_plot(fake: Fake, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "load.png"
    _run("--url", fake.url, "--clients", "1,2", "--requests", "2", "--plot", file)
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG") and data.endswith(b"IEND\xaeB`\x82")


def test_plot_needs_matplotlib(fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package, more in (("matplotlib", ["--plot", str(tmp_path / "a.png")]), ("httpx", [])):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            done = CliRunner().invoke(app, ["--url", fake.url, *more])
        assert str(done.exception) == f"bench load needs {package}: pip install 'pilotfish[bench]'"
    assert not fake.bodies


def test_table(fake: Fake) -> None:
    fake.statuses = [200, 200, 429]
    done = CliRunner().invoke(app, ["--url", fake.url, "--clients", "1,2", "--requests", "3"], catch_exceptions=False)
    for text in (
        "1 client",
        "2 clients",
        "rejected (429)",
        "inter-token latency p99",
        "1 client: the first failure was 429",
    ):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "either a MODEL to serve or the --url"),
        (["MODEL", "--url", "http://127.0.0.1:1"], "either a MODEL to serve or the --url"),
        (["--url", "127.0.0.1:8000"], "must be an address"),
        (["--url", "http://[::"], "must be an address"),
        (["--url", "http://127.0.0.1:1", "--clients", "1,x"], "--clients '1,x' must be numbers"),
        (["--url", "http://127.0.0.1:1", "--clients", "0"], "--clients '0' must be numbers"),
        (["--url", "http://127.0.0.1:1", "--rate", "nan"], "--rate 'nan' must be numbers"),
        (["--url", "http://127.0.0.1:1", "--rate", "1", "--clients", "1"], "exclude each other"),
        (["--url", "http://127.0.0.1:1", "--requests", "1", "--seconds", "1"], "exclude each other"),
        (["--url", "http://127.0.0.1:1", "--seconds", "inf"], "must be finite"),
        (["--url", "http://127.0.0.1:1", "--prompt-tokens", "9:3"], "--prompt-tokens '9:3' must be"),
        (["--url", "http://127.0.0.1:1", "--prompts", "x", "--prompt-tokens", "9"], "exclude each other"),
        (["--url", "http://127.0.0.1:1", "--prompts", "/nowhere"], "can not read the prompts file /nowhere"),
        (["--url", "http://127.0.0.1:1", "--serve-flags", "--threads 1"], "is for a MODEL to serve"),
        (["--url", "http://127.0.0.1:1", "--plot", "/nowhere/x.png"], "must be a .png file in a folder"),
        (["--url", "http://127.0.0.1:1", "--api-key", "ä"], "printable ASCII"),
        (["MODEL", "--serve-flags", "--port 1"], "host and port are chosen here"),
        (["MODEL", "--serve-flags", "'"], "No closing quotation"),
    ],
)
def test_bad_input(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, InputError)
    assert says in str(done.exception) and "\n" not in str(done.exception)


def test_refusals_before_the_load(fake: Fake) -> None:
    fake.key = "secret"
    done = CliRunner().invoke(app, ["--url", fake.url, "--api-key", "wrong"])
    assert isinstance(done.exception, InputError) and "refuses the key with 401" in str(done.exception)
    fake.statuses = [400]
    done = CliRunner().invoke(app, ["--url", fake.url, "--api-key", "secret", "--speculation", "nonsense"])
    assert isinstance(done.exception, InputError) and "400: refused with 400" in str(done.exception)
    fake.statuses = [500]
    done = CliRunner().invoke(app, ["--url", fake.url, "--api-key", "secret"])
    assert isinstance(done.exception, PilotfishError) and not isinstance(done.exception, InputError)


def test_nobody_there() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for more in ([], ["--model", "x"]):
        done = CliRunner().invoke(app, ["--url", url, *more])
        assert isinstance(done.exception, PilotfishError) and not isinstance(done.exception, InputError)
        assert str(done.exception).startswith(f"can not reach the server at {url}: ")


def test_a_server_of_our_own_process() -> None:
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    with running(command, f"http://127.0.0.1:{port}/") as process:
        assert process.poll() is None
    assert process.poll() is not None


@pytest.mark.parametrize(("code", "kind"), [(2, InputError), (3, PilotfishError)])
def test_a_server_that_does_not_start(code: int, kind: type[Exception]) -> None:
    command = [sys.executable, "-c", f"print('pilotfish: no such model'); print('│ │'); raise SystemExit({code})"]
    with pytest.raises(PilotfishError) as caught, running(command, f"http://127.0.0.1:{free_port()}/"):
        pass
    assert type(caught.value) is kind
    assert str(caught.value) == f"the server ended with exit code {code}: no such model"


def test_bench_load_serves_a_model(smollm2_path: Path) -> None:
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    flags = ("--serve-flags", "--speculation off --threads 1 --max-num-seqs 2 --context 256")
    more = ("--clients", "2", "--requests", "4", "--prompt-tokens", "24", "--max-tokens", "8", "--ignore-eos")
    found = _run(smollm2_path, *flags, *more)["levels"][0]
    assert (found["done"], found["completion_tokens"], found["failed"]) == (4, 32, {})
    assert found["acceptance_length"] == 1.0
    assert found["output_tokens_per_second"] > 0
