"""What `verify` says when something is wrong: the command has to find it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from pilotfish import engine, verify
from pilotfish.cli import app
from pilotfish.compare import PROMPTS
from pilotfish.errors import PilotfishError
from pilotfish.node_rows import NodeRows
from pilotfish.tree import DraftTree, Verdict


def _verify(model: Path, prompts: Path, *arguments: str) -> tuple[dict[str, Any], Exception | None]:
    command = ["verify", str(model), "--prompts", str(prompts), "--max-tokens", "40", "--temperature", "0", *arguments]
    done = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=True)
    error = done.exception if isinstance(done.exception, Exception) else None
    return json.loads(done.stdout), error


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    kind, prompt = PROMPTS[5]
    file.write_text(json.dumps({"class": kind, "prompt": prompt}))
    return file


def _accepts_one_too_many(tree: DraftTree, rows: verify.TargetRows, chance: verify.Chance) -> Verdict:
    verdict = verify.match(tree, rows, chance)
    children = np.flatnonzero(tree.parents == (verdict.path[-1] if verdict.path else -1))
    if not len(children):
        return verdict
    wrong = int(children[0])
    tokens = (*verdict.tokens[:-1], int(tree.tokens[wrong]), rows.token(wrong))
    return Verdict((*verdict.path, wrong), tokens, False)


def test_a_wrong_rule_is_found(smollm2_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "RULES", {"match": _accepts_one_too_many})
    report, error = _verify(smollm2_path, prompts, "--speculation", "ngram:k=3")
    assert isinstance(error, PilotfishError) and "differ with speculation on" in str(error)
    first = report["differences"][0]
    assert first["what"] == "token" and first["off"]["before"] == first["on"]["before"]
    assert first["off"]["token"] != first["on"]["token"] and len(first["off"]["likeliest"]) == 5
    assert first["off"]["token"] in first["off"]["likeliest"]


def test_other_logits_behind_the_same_tokens_are_found(
    smollm2_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit of a logit, in rows of drafts only, changes no token but is a difference."""
    logits: Callable[[NodeRows, int], np.ndarray] = NodeRows.logits

    def shaken(self: NodeRows, node: int) -> np.ndarray:
        row = logits(self, node)
        return row if node < 0 else np.nextafter(row, np.float32(np.inf))

    monkeypatch.setattr(NodeRows, "logits", shaken)
    report, error = _verify(smollm2_path, prompts, "--speculation", "ngram:k=3")
    assert isinstance(error, PilotfishError)
    first = report["differences"][0]
    assert first["what"] == "logits" and first["off"]["token"][0] == first["on"]["token"][0]


def test_a_difference_is_told_in_words(smollm2_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "RULES", {"match": _accepts_one_too_many})
    command = ["verify", str(smollm2_path), "--prompts", str(prompts), "--max-tokens", "40", "--temperature", "0"]
    done = CliRunner().invoke(app, [*command, "--speculation", "ngram:k=3"])
    assert isinstance(done.exception, PilotfishError)
    assert "first difference: the token at position" in done.stdout
    assert "off: after" in done.stdout and "on: after" in done.stdout
