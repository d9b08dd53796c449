"""The OpenAPI document is true: generated requests, right and wrong ones, get answers of the kind it describes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from pilotfish import LLM
from pilotfish.server.app import create_app
from pilotfish.server.service import Service, Settings

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


@pytest.fixture(scope="module")
def app(smollm2: LLM) -> Iterator[FastAPI]:
    service = Service(lambda: smollm2, Settings(served_model_name="m"))
    service.start()
    assert service.thread.loaded.wait(60)
    yield create_app(service)
    assert service.thread.stop(10)


OPERATIONS = [
    *(("POST", f"/v1/{name}") for name in ("completions", "chat/completions", "tokenize", "detokenize")),
    *(("GET", f"/v1/{name}") for name in ("models", "models/{model}")),
    *(("GET", f"/{name}") for name in ("health", "ready", "version", "metrics")),
]


@pytest.fixture(scope="module")
def document(app: FastAPI) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def test_all_operations_are_checked(document: Any) -> None:
    found = [operation.ok() for operation in document.get_all_operations()]
    assert {(operation.method.upper(), operation.path) for operation in found} == set(OPERATIONS)


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        (method, path, mode)
        for method, path in OPERATIONS
        for mode in GenerationMode
        if method == "POST" or mode is GenerationMode.POSITIVE  # nothing can be wrong about a GET
    ],
)
def test_the_document_is_true(document: Any, method: str, path: str, mode: GenerationMode) -> None:
    operation = document[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=40 if method == "POST" else 3,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and "messages" in case.body:
            case.body.setdefault("max_tokens", 2)  # or it goes on until the context is full
        statuses.add(case.call_and_validate(checks=CHECKS).status_code)

    statuses: set[int] = set()
    check()
    if mode is GenerationMode.POSITIVE:
        assert 200 in statuses or path == "/v1/models/{model}"
