"""What a server must bear: nonsense, floods, clients that vanish or stall, an engine that fails, and its own end."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from pilotfish import LLM, SamplingParams
from pilotfish.errors import InputError
from pilotfish.request import Request
from pilotfish.server.app import create_app
from pilotfish.server.edge import JsonLines
from pilotfish.server.engine_thread import Generation, Progress
from pilotfish.server.service import Service
from serving import served, wait_until

LONG = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 1500, "ignore_eos": True, "speculation": "off"}
SHORT = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 4}
JSON = {"Content-Type": "application/json"}


@contextmanager
def _client(load: Any, **settings: Any) -> Iterator[tuple[httpx.Client, Service]]:
    with served(load, **settings) as (url, service), httpx.Client(base_url=url, timeout=30) as http:
        yield http, service


@pytest.fixture(scope="module")
def running(smollm2: LLM) -> Iterator[tuple[httpx.Client, Service]]:
    with _client(lambda: smollm2, max_body=20_000) as pair:
        yield pair


@pytest.fixture(scope="module")
def http(running: tuple[httpx.Client, Service]) -> httpx.Client:
    return running[0]


@pytest.fixture(scope="module")
def spare(smollm2_path: Path) -> LLM:
    """For servers beside `running`: two engines must not share one KV cache."""
    return LLM(smollm2_path, context=2048)


def _works(http: httpx.Client) -> bool:
    done = http.post("/v1/completions", json=SHORT)
    return done.status_code == 200 and bool(done.json()["choices"][0]["text"])


def _error(done: httpx.Response, status: int, kind: str = "invalid_request_error") -> dict[str, Any]:
    assert done.status_code == status, done.text
    error: dict[str, Any] = done.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == kind and error["message"]
    assert "Traceback" not in error["message"]
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'"text"',
        b"null",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "temperature": "1"}',
        b'{"prompt": "a", "max_tokens": 1.5}',
        b'{"prompt": "a", "max_tokens": true}',
        b'{"prompt": "a", "max_tokens": 1' + b"0" * 4000 + b"}",
        b'{"prompt": "a", "max_tokens": 99999999999999999999}',
        b'{"prompt": "a", "seed": 1' + b"0" * 40 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "stop": ["\\udfff"]}',
        b'{"prompt": "a", "model": "\\ud800"}',
        b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}",
        b'{"prompt": "a", "structured_outputs": {"json": ' + b'{"a":' * 150 + b"1" + b"}" * 150 + b"}}",
        b'{"prompt": "a", "structured_outputs": {"json": {"enum": [1e999]}}}',
        b'{"prompt": "a", "structured_outputs": {"regex": "(", "choice": ["a"]}}',
        b'{"prompt": "a", "structured_outputs": {}}',
        b'{"prompt": []}',
        b'{"prompt": [[]]}',
        b'{"prompt": [1, "a"]}',
        b'{"prompt": [-1]}',
        b'{"prompt": [99999999]}',
        b'{"prompt": ""}',
        b'{"prompt": "a", "logit_bias": {"1.5": 1}}',
        b'{"prompt": "a", "logit_bias": {"\xc2\xb2": 1}}',
        b'{"prompt": "a", "allowed_token_ids": []}',
        b'{"prompt": "a", "n": 129}',
        b'{"prompt": "a", "max_tokens": 0}',
        b'{"prompt": "a", "max_tokens": 3000}',
        b'{"prompt": "a", "stream_options": {"include_usage": true}}',
        b'{"prompt": "a", "speculation": {"method": "ngram", "unknown": 1}}',
        b'{"prompt": "a", "speculation": "draft:nowhere"}',
        b'{"prompt": "a", "acceptance": "any"}',
    ],
    ids=lambda body: body.decode(errors="replace")[:60],
)
def test_nonsense_is_refused(http: httpx.Client, body: bytes) -> None:
    _error(http.post("/v1/completions", content=body, headers=JSON), 400)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"suffix": "x"}, "suffix"),
        ("completions", {"best_of": 3}, "best_of"),
        ("completions", {"messages": []}, "messages"),
        ("completions", {"guided_json": {}}, "guided_json"),
        ("completions", {"temperature": -1}, "temperature"),
        ("completions", {"min_tokens": 500}, "min_tokens"),
        ("completions", {"banned_token_ids": [49152]}, "banned_token_ids"),
        ("completions", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("chat/completions", {"audio": {"voice": "alloy"}}, "audio"),
        ("chat/completions", {"modalities": ["text", "audio"]}, "modalities.1"),
        ("chat/completions", {"store": True}, "store"),
        ("chat/completions", {"service_tier": "flex"}, "service_tier"),
        ("chat/completions", {"functions": [{"name": "f"}]}, "functions"),
        ("chat/completions", {"reasoning_effort": "high"}, "reasoning_effort"),
        ("chat/completions", {"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"tool_choice": "auto"}, "tool_choice"),
        ("chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("chat/completions", {"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens"),
        ("chat/completions", {"echo": True}, "echo"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "1", "tool_call_id": "a"}]}, "tools"),
        ("tokenize", {"messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("detokenize", {"tokens": [49152]}, "tokens"),
    ],
)
def test_what_can_not_be_done_is_refused_by_name(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    least: dict[str, Any] = {
        "completions": {"prompt": "a"},
        "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "tokenize": {"prompt": "a"},
        "detokenize": {},
    }[path]
    assert _error(http.post(f"/v1/{path}", json={**least, **fields}), 400)["param"] == param


def test_what_asks_for_nothing_is_taken(http: httpx.Client) -> None:
    nothing = {
        **{"store": False, "user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "modalities": ["text"]},
        **{"parallel_tool_calls": True, "tools": [], "tool_choice": "none", "n": None, "stop": None, "audio": None},
        **{"response_format": {"type": "text"}, "logit_bias": {}, "seed": None, "verbosity": "medium"},
    }
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0}
    plain = http.post("/v1/chat/completions", json=body).json()
    given = http.post("/v1/chat/completions", json={**body, **nothing})
    assert given.status_code == 200, given.text
    assert given.json()["choices"][0]["message"] == plain["choices"][0]["message"]


def test_paths_methods_and_types(http: httpx.Client) -> None:
    _error(http.get("/nowhere"), 404, "not_found_error")
    assert _error(http.get("/v1/completions"), 405)
    assert http.get("/v1/completions").headers["allow"] == "POST"
    _error(http.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}), 415)


def test_large_bodies(http: httpx.Client) -> None:
    large = json.dumps({**SHORT, "user": "x" * 30_000}).encode()
    _error(http.post("/v1/completions", content=large, headers=JSON), 413)
    pieces = (large[at : at + 1000] for at in range(0, len(large), 1000))  # without a Content-Length
    _error(http.post("/v1/completions", content=pieces, headers=JSON), 413)
    assert _works(http)


def test_request_ids_and_log(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pilotfish.server")
    assert (
        http.post("/v1/completions", json=SHORT, headers={"X-Request-Id": "a-1.b"}).headers["x-request-id"] == "a-1.b"
    )
    wait_until(lambda: bool(caplog.records))
    line = json.loads(JsonLines().format(caplog.records[-1]))
    assert {"time", "level", "request_id", "path", "status", "prompt_tokens", "completion_tokens", "ms"} <= set(line)
    assert (line["request_id"], line["path"], line["status"]) == ("a-1.b", "/v1/completions", 200)
    assert line["completion_tokens"] == 4
    made = http.get("/health", headers={"X-Request-Id": 'x"\t{}'}).headers["x-request-id"]
    assert len(made) == 32 and made.isalnum()


def test_keys(spare: LLM) -> None:
    with _client(lambda: spare, api_keys=("first", "second")) as (http, _):
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert http.get(path).status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer third"},
            {"Authorization": "first"},
            {"Authorization": "Basic first"},
        ):
            error = _error(http.get("/v1/models", headers=headers), 401, "authentication_error")
            assert error["code"] == "invalid_api_key"
            _error(http.post("/v1/completions", json=SHORT, headers=headers), 401, "authentication_error")
        for key in ("first", "second"):
            assert http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_a_full_queue(spare: LLM) -> None:
    with _client(lambda: spare, max_queue=2) as (http, service):
        most = spare.max_num_seqs + 2
        _error(http.post("/v1/completions", json={**LONG, "n": most + 1}), 400)
        with http.stream("POST", "/v1/completions", json={**LONG, "n": most, "stream": True}) as held:
            lines = held.iter_lines()  # kept: the connection goes with it
            assert '"choices"' in next(lines)
            refused = http.post("/v1/completions", json=SHORT)
            assert _error(refused, 429, "rate_limit_error")["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) >= 1
        wait_until(lambda: service.thread.open_samples == 0)
        assert _works(http)


def test_time_limits(spare: LLM) -> None:
    with _client(lambda: spare, request_timeout=0.3, body_timeout=0.2) as (http, service):
        assert _error(http.post("/v1/completions", json=LONG), 504, "server_error")["code"] == "timeout"
        lines = http.post("/v1/completions", json={**LONG, "stream": True}).text.split("\n\n")
        assert len(lines) > 4 and lines[-2] == "data: [DONE]"
        assert json.loads(lines[-3].removeprefix("data: "))["error"]["code"] == "timeout"
        wait_until(lambda: service.thread.open_samples == 0)
        with socket.create_connection((http.base_url.host, http.base_url.port or 0)) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")
        assert _works(http)


def test_a_client_that_leaves(running: tuple[httpx.Client, Service]) -> None:
    http, service = running
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=LONG, timeout=0.2)
    wait_until(lambda: service.thread.open_samples == 0, 5)
    with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
        lines = stream.iter_lines()  # kept: the connection goes with it
        next(lines)
        assert service.thread.open_samples == 1
    wait_until(lambda: service.thread.open_samples == 0, 5)
    assert _works(http)


def test_leaving_as_a_token_comes() -> None:
    """The two at the same turn of the event loop: the handler ends all the same."""

    async def scene() -> None:
        deadline = time.monotonic() + 30
        generation = Generation([[1]], SamplingParams(), None, 0, False, (), deadline, 0.0)

        async def read() -> None:
            async for _ in generation.progress():
                pass

        reading = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        generation.events.put_nowait(Progress(0, Request(0, [1], generation.params, 0), "a", (1,), (), False))
        reading.cancel()
        done, _ = await asyncio.wait([reading], timeout=5)
        assert done and reading.cancelled()

    asyncio.run(scene())


def test_a_reader_that_stops_holds_nobody(running: tuple[httpx.Client, Service]) -> None:
    http, service = running
    body = json.dumps({**LONG, "max_tokens": 150, "stream": True, "logprobs": 20}).encode()
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((http.base_url.host, http.base_url.port or 0))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        reader.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: service.thread.open_samples == 1)
        assert _works(http)
        wait_until(lambda: service.thread.open_samples == 0)  # all tokens are there, and nobody has read them
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            piece = reader.recv(65536)
            assert piece, "the answer must be whole"
            got += piece
        assert got.count(b'"finish_reason":"length"') == 1 and b"data: [DONE]" in got


def test_a_step_that_fails_hits_its_requests_alone(
    running: tuple[httpx.Client, Service], smollm2: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    http, service = running
    forward = smollm2.target.executable.forward
    failing = threading.Event()

    def sometimes(*arguments: Any) -> Any:
        if failing.is_set():
            failing.clear()
            raise RuntimeError("secret of the engine")
        return forward(*arguments)

    monkeypatch.setattr(smollm2.target.executable, "forward", sometimes)
    with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        failing.set()
        rest = [line for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["type"] == "server_error"
    assert rest[-1] == "data: [DONE]"
    failing.set()
    error = _error(http.post("/v1/completions", json=SHORT), 500, "server_error")
    assert "secret" not in error["message"]
    assert _works(http)
    assert service.thread.open_samples == 0


@pytest.mark.parametrize("part", ["step", "add"])
def test_a_crash_of_the_engine(
    running: tuple[httpx.Client, Service], smollm2: LLM, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    http, service = running
    whole = getattr(service.thread._engine, part)

    def crash(*arguments: Any, **more: Any) -> Any:
        monkeypatch.undo()
        raise MemoryError("no more")

    monkeypatch.setattr(service.thread._engine, part, crash)
    assert getattr(service.thread._engine, part) is not whole
    _error(http.post("/v1/completions", json=SHORT), 500, "server_error")
    assert _works(http) and service.thread.open_samples == 0


def test_a_request_that_can_not_go_on_is_its_senders_fault(http: httpx.Client) -> None:
    body = {**SHORT, "allowed_token_ids": [5], "structured_outputs": {"regex": "[0-9]+"}}
    _error(http.post("/v1/completions", json=body), 400)


def test_a_handler_that_fails(running: tuple[httpx.Client, Service], monkeypatch: pytest.MonkeyPatch) -> None:
    http, service = running
    monkeypatch.setattr(service.metrics, "registry", None)
    assert "registry" not in _error(http.get("/metrics"), 500, "server_error")["message"]


def test_while_the_model_is_loading(spare: LLM) -> None:
    go = threading.Event()

    def load() -> LLM:
        assert go.wait(20)
        return spare

    service = Service(load)
    service.start()
    with TestClient(create_app(service)) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/ready").status_code == 503
        for path, body in (("/v1/completions", SHORT), ("/v1/tokenize", {"prompt": "a"})):
            assert http.post(path, json=body).status_code == 503
        assert http.get("/v1/models").status_code == 503
        go.set()
        wait_until(lambda: service.thread.ready)
        assert http.get("/ready").status_code == 200
        assert http.post("/v1/completions", json=SHORT).status_code == 200
    assert service.thread.stop(10)


def test_a_model_that_does_not_load() -> None:
    def load() -> LLM:
        raise InputError("no such model")

    service = Service(load)
    service.start()
    assert service.thread.loaded.wait(5)
    assert isinstance(service.thread.failure, InputError) and not service.thread.ready


@contextmanager
def _process(model: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    code = "from pilotfish.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", str(model), "--port", "0", "--context", "2048", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def test_sigterm_lets_requests_end(smollm2_path: Path) -> None:
    with _process(smollm2_path, "--kv-cache-memory", "200MiB") as (process, url):
        assert url.startswith("http://127.0.0.1:")
        with (
            httpx.Client(base_url=url, timeout=30) as http,
            http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 100, "stream": True}) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(url + "/ready").status_code == 503, 5)
            assert httpx.post(url + "/v1/completions", json=SHORT).status_code == 503
            rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert rest[-1]["choices"][0]["finish_reason"] == "length"
        assert process.wait(10) == 0
        assert process.stderr is not None
        logged = [json.loads(line) for line in process.stderr.read().splitlines() if line.startswith("{")]
        statuses = [line["status"] for line in logged if line.get("path") == "/v1/completions"]
        assert sorted(statuses) == [200, 503]


def test_the_drain_has_an_end(smollm2_path: Path) -> None:
    with _process(smollm2_path, "--drain-timeout", "0.2") as (process, url):
        with httpx.Client(base_url=url, timeout=30) as http:
            with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "shutdown"
        assert process.wait(10) == 0


def _refused(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from pilotfish.cli import main; main()", "serve", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_port_that_is_taken(smollm2_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = _refused(smollm2_path, "--port", str(port))
    assert done.returncode == 2 and f"port {port}: Address already in use" in done.stderr, done.stderr


def test_without_the_extra(smollm2_path: Path) -> None:
    code = "import sys; sys.modules['fastapi'] = None; from pilotfish.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", str(smollm2_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "pip install 'pilotfish[server]'" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-body", "many"), "the size 'many'"),
        (("--api-key", "\u00e9"), "--api-key"),
        (("--speculation", "nothing"), "no drafter 'nothing'"),
        (("--request-timeout", "inf"), "finite"),
        (("--context", "99999"), "99999"),
    ],
)
def test_mistakes(smollm2_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = _refused(smollm2_path, "--port", "0", *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr
