"""The server as OpenAI's own client meets it, on a real port with a real model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import pilotfish
from pilotfish import LLM, SamplingParams
from pilotfish.server.service import Service
from serving import served, wait_until

COUNTING = "one two three four one two three four one two three four one two"
USER = [{"role": "user", "content": "Say hello in French."}]


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[tuple[str, Service]]:
    # A model of its own: the tests ask `smollm2` for the same texts, and an engine closes the last of its model.
    with served(lambda: LLM(smollm2_path, context=2048)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: tuple[str, Service]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server[0] + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: tuple[str, Service]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[0], timeout=60) as http:
        yield http


def test_completion_is_the_engines_text(client: openai.OpenAI, smollm2: LLM, server: tuple[str, Service]) -> None:
    got = client.completions.create(model="m", prompt=COUNTING, temperature=0, max_tokens=12)
    ids = smollm2.tokenizer.encode(COUNTING, special=True)
    same = client.completions.create(model="m", prompt=ids, temperature=0, max_tokens=12)
    assert got.object == "text_completion" and got.model == "m"
    assert got.choices[0].text == same.choices[0].text != ""
    assert got.choices[0].finish_reason == "length"
    assert got.usage is not None and same.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (
        len(ids),
        12,
        len(ids) + 12,
    )
    assert same.usage.prompt_tokens_details is not None
    assert 0 < (same.usage.prompt_tokens_details.cached_tokens or 0) < len(ids)


def test_default_length_is_openais(client: openai.OpenAI) -> None:
    got = client.completions.create(model="m", prompt=COUNTING, temperature=0, extra_body={"ignore_eos": True})
    assert got.usage is not None and got.usage.completion_tokens == 16


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_changes_nothing_but_its_counts(client: openai.OpenAI, temperature: float) -> None:
    def ask(speculation: Any) -> Any:
        return client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": f"Repeat exactly: {COUNTING}"}],
            temperature=temperature,
            seed=7,
            max_tokens=32,
            extra_body={"speculation": speculation},
        )

    plain = ask("off")
    assert plain.usage.speculation["drafted"] == 0
    for speculation in ("auto", "ngram:k=4", {"method": "ngram", "num_speculative_tokens": 4}):
        drafted = ask(speculation)
        assert drafted.choices[0].message.content == plain.choices[0].message.content
        counts = drafted.usage.speculation
        if temperature == 0:
            assert counts["drafted"] >= counts["accepted"] > 0
            assert counts["acceptance_length"] > 1
            for what in ("drafted", "accepted"):
                assert sum(drafter[what] for drafter in counts["by_drafter"].values()) == counts[what]
            report = counts["report"]
            assert sum(report["steps"].values()) > report["steps"].get("plain", 0)
            assert report["step_ms"] > 0 and report["plain_ms"] > 0


def test_several_prompts_and_samples(client: openai.OpenAI) -> None:
    """Choice i is the one that its prompt and seed give alone."""
    prompts = ["Once upon a time", "The harbour was"]
    got = client.completions.create(model="m", prompt=prompts, n=2, seed=3, max_tokens=8)
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    for index, choice in enumerate(got.choices):
        seed = 3 + index % 2
        assert choice.seed == seed  # type: ignore[attr-defined]
        alone = client.completions.create(model="m", prompt=prompts[index // 2], seed=seed, max_tokens=8)
        assert alone.choices[0].text == choice.text
    assert len({choice.text for choice in got.choices}) == 4


def _completion_of(chunks: Any) -> tuple[dict[int, dict[str, Any]], Any]:
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.usage or usage
        for piece in chunk.choices:
            choice = choices.setdefault(piece.index, {"text": "", "finish_reason": None, "logprobs": {}})
            choice["text"] += piece.text
            choice["finish_reason"] = piece.finish_reason or choice["finish_reason"]
            for name, values in (piece.logprobs.model_dump() if piece.logprobs else {}).items():
                choice["logprobs"].setdefault(name, []).extend(values)
    return choices, usage


def test_streamed_completion_equals_the_whole_one(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "m",
        "prompt": ["Once upon a time", "Grüße aus"],
        "n": 2,
        "seed": 11,
        "max_tokens": 10,
        "logprobs": 2,
        "echo": True,
        "stop": ["xyz", "."],
    }
    whole = client.completions.create(**asked)
    stream = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    choices, usage = _completion_of(stream)
    assert len(choices) == 4
    for choice in whole.choices:
        streamed = choices[choice.index]
        assert streamed["text"] == choice.text
        assert streamed["finish_reason"] == choice.finish_reason
        assert choice.logprobs is not None
        assert streamed["logprobs"] == choice.logprobs.model_dump()
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_completion_logprobs_say_where_their_tokens_are(client: openai.OpenAI, smollm2: LLM) -> None:
    prompt = "Grüße, 你好"
    got = client.completions.create(model="m", prompt=prompt, temperature=0, max_tokens=6, logprobs=2, echo=True)
    text, lists = got.choices[0].text, got.choices[0].logprobs
    assert text.startswith(prompt) and lists is not None
    tokens, offsets = lists.tokens or [], lists.text_offset or []
    assert lists.token_logprobs is not None and lists.top_logprobs is not None
    assert lists.token_logprobs[0] is None and lists.top_logprobs[0] is None
    assert any(token.startswith("bytes:\\x") for token in tokens), "the prompt has a character of several tokens"
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith("bytes:"):
            assert text[offset:].startswith(token) or token == "<|im_end|>"
    for token, logprob, top in list(zip(tokens, lists.token_logprobs, lists.top_logprobs, strict=True))[1:]:
        assert top[token] == logprob <= 0.0
        assert 2 <= len(top) <= 3
    score = client.completions.create(model="m", prompt=prompt, temperature=0, max_tokens=0, logprobs=2, echo=True)
    assert score.choices[0].text == prompt
    assert score.choices[0].logprobs is not None and score.usage is not None
    count = len(smollm2.tokenizer.encode(prompt, special=True))
    assert score.choices[0].logprobs.token_logprobs == lists.token_logprobs[:count]
    assert score.usage.completion_tokens == 0


def test_chat_streams_what_it_answers(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *USER],
        "max_completion_tokens": 12,
        "temperature": 0.8,
        "seed": 5,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**asked)
    texts = {0: "", 1: ""}
    logprobs: dict[int, list[Any]] = {0: [], 1: []}
    reasons: dict[int, str] = {}
    roles: dict[int, str] = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.delta.role:
                roles[choice.index] = choice.delta.role
            if choice.logprobs and choice.logprobs.content:
                logprobs[choice.index] += choice.logprobs.content
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert roles == {0: "assistant", 1: "assistant"}
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content != ""
        assert reasons[choice.index] == choice.finish_reason
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert logprobs[choice.index] == choice.logprobs.content
        spelled = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
        assert spelled.removesuffix(b"<|im_end|>") == (choice.message.content or "").encode()
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_structured_output(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
        "required": ["city", "size"],
        "additionalProperties": False,
    }
    asked: dict[str, Any] = {"model": "m", "messages": USER, "max_tokens": 60, "seed": 1}
    got = client.chat.completions.create(
        **asked, response_format={"type": "json_schema", "json_schema": {"name": "town", "schema": schema}}
    )
    value = json.loads(got.choices[0].message.content or "")
    assert set(value) == {"city", "size"} and value["size"] in ("small", "large")
    for form, right in (
        ({"json": schema}, lambda text: json.loads(text)["size"] in ("small", "large")),
        ({"regex": "[0-9]{3}-[a-c]"}, lambda text: text[3] == "-" and text[:3].isdigit()),
        ({"choice": ["salut", "bonjour"]}, lambda text: text in ("salut", "bonjour")),
        ({"grammar": 'start: "a" "b"+ "c"'}, lambda text: set(text[1:-1]) == {"b"} and text[0] == "a"),
    ):
        got = client.chat.completions.create(**asked, extra_body={"structured_outputs": form})
        text = got.choices[0].message.content or ""
        if got.choices[0].finish_reason == "stop":
            assert right(text), (form, text)
        else:
            assert "grammar" in form  # which may go on for ever


def test_every_field_of_sampling_reaches_the_engine(http: httpx.Client, smollm2: LLM) -> None:
    """Each field alone changes an answer; that it changes it rightly is tested where it is done."""

    def ask(**fields: Any) -> tuple[str, str]:
        done = http.post("/v1/completions", json={"prompt": "The ship left the harbour and the", **base, **fields})
        assert done.status_code == 200, done.text
        choice = done.json()["choices"][0]
        return choice["text"], choice["finish_reason"]

    base: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    ids = smollm2.tokenizer.encode("The ship left the harbour and the", special=True)
    plain = smollm2.tokenizer.decode(smollm2.generate(ids, SamplingParams(max_tokens=12))[0].tokens)
    greedy = ask()
    assert greedy[0] == plain
    tokens = smollm2.tokenizer.encode(plain, special=False)
    second = smollm2.tokenizer.decode(tokens[1:2])
    for fields in (
        {"logit_bias": {str(tokens[0]): -50}},
        {"banned_token_ids": [tokens[0]]},
        {"allowed_token_ids": [5, 6, 7]},
        {"bad_words": [second]},
        {"repetition_penalty": 1.8},
        {"frequency_penalty": 2},
        {"presence_penalty": 2},
        {"stop_token_ids": [tokens[1]]},
        {"stop": second},
        {"stop": ["nowhere", second]},
        {"stop_token_ids": [tokens[1]], "min_tokens": 6, "banned_token_ids": [tokens[0]]},
        {"max_tokens": 3},
        {"temperature": 2.0, "seed": 1},
    ):
        assert ask(**fields) != greedy, fields
    hot = {"temperature": 3.0, "seed": 1}
    for fields in ({"top_k": 2}, {"top_p": 0.1}, {"min_p": 0.5}, {"typical_p": 0.1}, {"seed": 2}, {"seed": -2}):
        assert ask(**{**hot, **fields}) != ask(**hot), fields
    assert ask(**hot, acceptance="block") != ask(**hot)
    assert ask(**hot, top_k=-1) == ask(**hot, speculation="off") == ask(**hot, priority=-3) == ask(**hot)


def test_prompt_logprobs(http: httpx.Client) -> None:
    body = {"messages": USER, "prompt_logprobs": 2, "max_tokens": 1, "temperature": 0}
    done = http.post("/v1/chat/completions", json=body).json()
    entries = done["prompt_logprobs"]
    assert len(entries) == done["usage"]["prompt_tokens"] and entries[0] is None
    for entry in entries[1:]:
        ranks = [token["rank"] for token in entry.values() if token["rank"] is not None]
        assert sorted(ranks) == [1, 2] and len(entry) <= 3


def test_models_versions_and_tokens(client: openai.OpenAI, http: httpx.Client, smollm2: LLM) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").id == "m"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.completions.create(model="other", prompt="x")
    assert http.get("/version").json() == {"version": pilotfish.__version__}
    tokenized = http.post("/v1/tokenize", json={"prompt": "Grüße <|im_end|>", "return_token_strs": True}).json()
    assert tokenized["tokens"] == smollm2.tokenizer.encode("Grüße <|im_end|>", special=True)
    assert tokenized["count"] == len(tokenized["tokens"]) == len(tokenized["token_strs"])
    assert tokenized["max_model_len"] == 2048
    back = http.post("/v1/detokenize", json={"tokens": tokenized["tokens"]}).json()
    assert back == {"prompt": "Grüße <|im_end|>"}
    plain = http.post("/v1/tokenize", json={"prompt": "<|im_end|>", "add_special_tokens": False}).json()
    assert plain["count"] > 1
    chat = http.post("/v1/tokenize", json={"messages": USER}).json()
    assert chat["tokens"] == smollm2.encode_chat(USER)


def test_64_clients_at_once(server: tuple[str, Service], smollm2: LLM) -> None:
    """Each gets what it would have got alone; one in four leaves in the middle, and the others notice nothing."""
    url, service = server
    prompts = [f"Item {index}: {COUNTING}" for index in range(64)]
    texts: dict[int, str] = {}
    errors: list[Exception] = []

    def ask(index: int) -> None:
        body = {"prompt": prompts[index], "temperature": 0, "max_tokens": 6 + index % 4, "ignore_eos": True}
        try:
            with httpx.Client(base_url=url, timeout=60) as http:
                if index % 4 == 3:
                    with http.stream(
                        "POST", "/v1/completions", json={**body, "max_tokens": 1500, "stream": True}
                    ) as got:
                        next(got.iter_lines())
                    return
                done = http.post("/v1/completions", json={**body, "speculation": ("off", "auto")[index % 2]})
                texts[index] = done.json()["choices"][0]["text"]
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert len(texts) == 48
    wait_until(lambda: service.thread.open_samples == 0)
    wait_until(lambda: "pilotfish:num_requests_running 0.0\n" in httpx.get(url + "/metrics").text)
    metrics = httpx.get(url + "/metrics").text
    for gauge in ("num_requests_waiting", "kv_cache_usage_perc"):
        assert f"pilotfish:{gauge} 0.0\n" in metrics
    aborted = [line for line in metrics.splitlines() if 'success_total{finished_reason="abort"}' in line]
    assert aborted[0].endswith(" 16.0"), aborted
    with httpx.Client(base_url=url, timeout=60) as http:
        for index in (0, 1, 2, 62):
            body = {"prompt": prompts[index], "temperature": 0, "max_tokens": 6 + index % 4, "ignore_eos": True}
            alone = http.post("/v1/completions", json={**body, "speculation": "off"}).json()["choices"][0]["text"]
            assert texts[index] == alone


def test_metrics_have_vllms_names(http: httpx.Client) -> None:
    body = {"prompt": COUNTING, "temperature": 0, "max_tokens": 24, "speculation": "ngram:k=4"}

    def read() -> dict[str, float]:
        lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith("pilotfish:")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    before = read()
    usage = http.post("/v1/completions", json=body).json()["usage"]
    after = read()

    def grown(name: str) -> float:
        return after[f"pilotfish:{name}"] - before.get(f"pilotfish:{name}", 0.0)

    counts = usage["speculation"]
    assert grown("spec_decode_num_draft_tokens_total") == counts["drafted"] > 0
    assert grown("spec_decode_num_accepted_tokens_total") == counts["accepted"] > 0
    assert grown('drafter_draft_tokens_total{drafter="ngram"}') == counts["drafted"]
    assert grown('drafter_accepted_tokens_total{drafter="ngram"}') == counts["accepted"]
    positions = sum(grown(f'spec_decode_num_accepted_tokens_per_pos_total{{position="{at}"}}') for at in range(4))
    assert positions == counts["accepted"]
    assert 0 < grown("spec_decode_num_drafts_total") <= counts["drafted"]
    assert grown("prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("generation_tokens_total") == usage["completion_tokens"]
    assert grown("time_to_first_token_seconds_count") == grown("e2e_request_latency_seconds_count") == 1
    assert grown("inter_token_latency_seconds_count") >= usage["completion_tokens"] - 5
    assert grown("verify_milliseconds_count") == grown("draft_milliseconds_count") > 0
    assert grown("prefix_cache_queries_total") > 0
    assert sum(grown(f'request_success_total{{finished_reason="{name}"}}') for name in ("stop", "length")) == 1
    assert {"pilotfish:num_preemptions_total", "pilotfish:prefix_cache_hits_total"} <= set(after)
