"""The command line as a person uses it: what it prints, and one clear line with exit code 2 for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pilotfish.cli import app
from pilotfish.compare import PROMPTS


def _run(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from pilotfish.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)


def _json(*arguments: str | Path, stdin: str = "") -> Any:
    done = _run(*arguments, "--json", stdin=stdin)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    return json.loads(done.stdout)


def test_generate_json(smollm2_path: Path) -> None:
    prompt = "one two three four one two three four one two three four one two"
    arguments = ("generate", smollm2_path, "--prompt", prompt, "--max-tokens", "24")
    plain = _json(*arguments)
    drafted = _json(*arguments, "--speculation", "ngram:k=4,n=3", "--threads", "1")
    config = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'
    from_config = _json(*arguments, "--speculative-config", config)
    assert plain["tokens"] == drafted["tokens"] == from_config["tokens"]
    assert plain["text"] == drafted["text"]
    assert plain["usage"]["completion_tokens"] == len(plain["tokens"]) == 24
    assert set(plain) == {"text", "tokens", "finish_reason", "seed", "usage", "timings", "speculation"}
    assert set(plain["timings"]) == {
        "load_ms",
        "prefill_ms",
        "decode_ms",
        "draft_ms",
        "verify_ms",
        "overhead_ms",
        "tokens_per_second",
    }
    assert plain["speculation"]["drafted"] == 0 and plain["speculation"]["target_steps"] == 24
    counts = drafted["speculation"]
    assert counts["accepted"] == 24 - counts["target_steps"] > 0
    assert counts["by_drafter"]["ngram"]["drafted"] == counts["drafted"]


def test_generate_explains_what_was_drafted(smollm2_path: Path) -> None:
    prompt = "one two three four one two three four one two three four one two"
    arguments = ("generate", smollm2_path, "--prompt", prompt, "--max-tokens", "24", "--explain")
    done = _run(*arguments, "--speculation", "auto")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    steps = next(line for line in lines if " steps: " in line)
    parts = [part.split() for part in steps.partition(" steps: ")[2].split(", ")]
    assert int(steps.split()[0]) == sum(int(count) for count, _ in parts) < 24
    assert {name for _, names in parts for name in names.split("+")} <= {"suffix", "ngram", "plain"}
    accepted = [line.partition(": ")[2].split() for line in lines if line.endswith("drafts accepted")]
    assert accepted and all(0 <= int(words[0]) <= int(words[2]) for words in accepted)
    assert sum(int(words[0]) for words in accepted) == 24 - int(steps.split()[0])
    assert any(line.startswith("drafting took ") for line in lines)
    assert any(line.startswith("the steps took ") and "without drafts" in line for line in lines)
    assert done.stdout == _run(*arguments[:-1]).stdout, "stdout is the text alone"
    told = _json(*arguments, "--speculation", "auto")["speculation"]
    assert sum(told["report"]["steps"].values()) == told["target_steps"]
    assert set(told["report"]) == {"steps", "draft_ms", "verify_ms", "step_ms", "plain_ms"}
    off = _run(*arguments)
    assert "speculation was off" in off.stderr.splitlines()


def test_generate_streams_text_and_sums_up_on_stderr(smollm2_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Say hello in French.")
    by_file = _run("generate", smollm2_path, "--prompt-file", file, "--chat", "--max-tokens", "8")
    by_stdin = _run(
        "generate", smollm2_path, "--prompt-file", "-", "--chat", "--max-tokens", "8", stdin=file.read_text()
    )
    assert by_file.returncode == by_stdin.returncode == 0
    assert by_file.stdout == by_stdin.stdout != ""
    assert "8 tokens" in by_file.stderr and "tokens/s" in by_file.stderr


def test_sampling_is_repeatable(smollm2_path: Path) -> None:
    arguments = ("generate", smollm2_path, "--prompt", "Once upon", "--max-tokens", "8", "--temperature", "1.0")
    first = _json(*arguments)
    assert _json(*arguments, "--seed", str(first["seed"]))["tokens"] == first["tokens"]


def test_every_flag_of_sampling_reaches_the_tokens(smollm2_path: Path, tmp_path: Path) -> None:
    """Each flag alone changes an answer; that it changes it rightly is tested where it is done."""

    def _json(*arguments: str | Path) -> Any:  # without a process for each
        done = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
        return json.loads(done.stdout)

    base = ("generate", smollm2_path, "--prompt", "The ship left the harbour and the", "--max-tokens", "12")
    plain = _json(*base)
    first, second = plain["tokens"][:2]
    second_piece = _json(*base, "--logprobs", "0")["logprobs"][1]["text"]
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.gbnf"
    schema.write_text('{"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}')
    grammar.write_text('root ::= "yes" | "no"')
    for flags in (
        ("--logit-bias", f"{first}=-50"),
        ("--banned-token-ids", str(first)),
        ("--allowed-token-ids", "5,6,7"),
        ("--bad-word", second_piece),
        ("--repetition-penalty", "1.8"),
        ("--frequency-penalty", "2"),
        ("--presence-penalty", "2"),
        ("--stop-token-ids", str(second)),
        ("--stop", second_piece),
        ("--json-object",),
        ("--json-schema", schema),
        ("--regex", "[0-9]+"),
        ("--choice", "left", "--choice", "right"),
        ("--grammar", grammar),
    ):
        assert _json(*base, *flags)["tokens"] != plain["tokens"], flags
    sampled = (*base, "--temperature", "1.3", "--seed", "5")
    free = _json(*sampled)["tokens"]
    for flags in (
        ("--top-k", "2"),
        ("--top-p", "0.2"),
        ("--min-p", "0.6"),
        ("--typical-p", "0.1"),
        ("--temperature", "0.2"),
        ("--seed", "6"),
    ):
        assert _json(*sampled, *flags)["tokens"] != free, flags
    stopped = (*base, "--stop-token-ids", str(first))
    assert len(_json(*stopped)["tokens"]) == 1 and len(_json(*stopped, "--min-tokens", "4")["tokens"]) >= 4
    ratio = _json(*sampled, "--speculation", "ngram:k=4", "--acceptance", "ratio")
    assert len(ratio["tokens"]) == 12


def test_structured_output(smollm2_path: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}}, '
        '"required": ["name", "age"], "additionalProperties": false}'
    )
    base = (
        "generate",
        smollm2_path,
        "--chat",
        "--prompt",
        "Mara is 34. Give her name and age.",
        "--json-schema",
        schema,
    )
    plain, forced = _json(*base), _json(*base, "--speculation", "grammar")
    assert plain["tokens"] == forced["tokens"] and plain["finish_reason"] == "stop"
    assert set(json.loads(plain["text"])) == {"name", "age"}
    counts = forced["speculation"]["by_drafter"]["grammar"]
    assert counts["accepted"] == counts["drafted"] > 3
    nothing = _run(*base, "--allowed-token-ids", "5")
    assert nothing.returncode == 1 and "no token is left" in nothing.stderr and "Traceback" not in nothing.stderr


def test_samples_and_log_probabilities(smollm2_path: Path) -> None:
    base = ("generate", smollm2_path, "--prompt", "Once upon a time", "--max-tokens", "6", "--temperature", "1")
    several = _json(*base, "--seed", "8", "--n", "3", "--echo", "--logprobs", "2", "--prompt-logprobs", "1")["samples"]
    assert len({sample["text"] for sample in several}) == 3
    for index, sample in enumerate(several):
        assert sample["tokens"] == _json(*base, "--seed", str(8 + index))["tokens"] and sample["seed"] == 8 + index
        assert sample["text"].startswith("Once upon a time")
        assert [entry["token"] for entry in sample["logprobs"]] == sample["tokens"]
        assert all(
            len(entry["top"]) == 2 and entry["logprob"] <= entry["top"][0]["logprob"] < 0
            for entry in sample["logprobs"]
        )
        assert [entry["text"] for entry in sample["prompt_logprobs"]] == [" upon", " a", " time"]
    spoken = _run(*base, "--seed", "8", "--n", "2")
    assert spoken.returncode == 0 and "sample 2 of 2, seed 9" in spoken.stderr


def test_verify_finds_nothing(smollm2_path: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"class": kind, "prompt": prompt}) for kind, prompt in PROMPTS[5:7]))
    arguments = ("verify", smollm2_path, "--prompts", prompts, "--max-tokens", "40", "--speculation", "ngram:k=5")
    report = _json(*arguments, "--temperature", "0")
    assert report["differences"] == []
    assert [run["setting"] for run in report["runs"]] == ["T=0", "T=0 adjusted"]
    assert all(run["answers"] == 4 and run["tokens"] > 20 for run in report["runs"])
    assert report["runs"][0]["acceptance_by_position"][0] > 0
    spoken = _run(*arguments, "--temperature", "0.7")
    assert spoken.returncode == 0 and "every bit of the logits" in spoken.stdout


def test_bench_json(smollm2_path: Path, tmp_path: Path) -> None:
    curve = _json("bench", "curve", smollm2_path, "--rows", "1,3", "--repeat", "1")
    assert curve["rows"] == [1, 3] and len(curve["median_ms"]) == 2 and curve["ratio"][0] == 1
    assert curve["gb_per_s"] > 0 and curve["limit_gb_per_s"] > 0 and curve["limit_gmac_per_s"] > 0
    assert curve["context"] == 128 and "prefill" not in curve and "profile" not in curve
    workload = tmp_path / "prompts.jsonl"
    workload.write_text('{"class": "count", "prompt": "Count from 1 to 20."}\n')
    arguments = ("bench", "decode", smollm2_path, "--prompts", workload, "--max-tokens", "12")
    settings = _json(*arguments, "--speculation", "ngram")["settings"]
    assert set(settings) == {"off", "ngram"}
    row = settings["ngram"]["count"]
    assert row["equal"] is True and row["acceptance_length"] >= 1 and row["over_off"] > 0


def test_bench_curve_shows_where_the_time_goes(smollm2_path: Path) -> None:
    options = ("--rows", "2", "--repeat", "1", "--context", "300", "--prefill", "40", "--profile")
    curve = _json("bench", "curve", smollm2_path, *options)
    assert curve["context"] == 300
    assert curve["prefill"]["tokens"] == 40 and curve["prefill"]["tokens_per_second"] > 0
    assert set(curve["profile"]) == {"2", "prefill"}
    stages = {stage["kind"]: stage for stage in curve["profile"]["2"]}
    assert {"head", "attention", "normed to qkv + rope, KV", "normed to gate_up + gate"} <= set(stages)
    # 30 layers of 3 x 1536 x 576; 3 heads of keys and values of 64 halves for 302 positions; 9 heads of queries.
    assert stages["normed to gate_up + gate"]["macs"] == 2 * 30 * 2 * 1536 * 576
    assert stages["attention"]["bytes"] == 30 * 302 * 3 * 64 * 2 * 2
    assert stages["attention"]["macs"] == 30 * (301 + 302) * 9 * 64 * 2
    assert stages["head"]["macs"] == 2 * 49152 * 576
    assert all(stage["ms"] > 0 and stage["barriers"] >= stage["stages"] for stage in stages.values())
    shown = _run("bench", "curve", smollm2_path, *options)
    assert shown.returncode == 0 and "barriers" in shown.stdout and "prefill: " in shown.stdout


def test_help_names_the_commands() -> None:
    done = _run("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("generate", "verify", "bench"))
    assert "--speculation" in _run("generate", "--help").stdout


MODEL = object()  # stands for the real model's path
PROMPTS_FOLDER = str(Path(__file__).parents[1] / "benchmarks" / "prompts")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "nowhere.gguf", "--prompt", "x"), "nowhere.gguf"),
        (("generate", MODEL), "--prompt TEXT or --prompt-file FILE"),
        (("generate", MODEL, "--prompt", "x", "--prompt-file", "y"), "one of the two"),
        (("generate", MODEL, "--prompt-file", "nowhere.txt"), "nowhere.txt"),
        (("generate", MODEL, "--prompt", ""), "the prompt is empty"),
        (("generate", MODEL, "--prompt", "x", "--speculation", "ngrams"), "no drafter 'ngrams'"),
        (("generate", MODEL, "--prompt", "x", "--speculation", "ngram:k=0"), "must lie in 1..64"),
        (("generate", MODEL, "--prompt", "x", "--speculative-config", "{}"), "with a method"),
        (("generate", MODEL, "--prompt", "x", "--temperature", "-1"), "temperature is -1"),
        (("generate", MODEL, "--prompt", "x", "--top-p", "0"), "top_p is 0"),
        (("generate", MODEL, "--prompt", "x", "--max-tokens", "0"), "max_tokens is 0"),
        (("generate", MODEL, "--prompt", "x", "--threads", "0"), "threads"),
        (("generate", MODEL, "--prompt", "x", "--threads", "100000"), "cores"),
        (("generate", MODEL, "--prompt", "x", "--context", "0"), "context"),
        (("generate", MODEL, "--prompt", "x", "--context", "999999"), "context"),
        (("generate", MODEL, "--prompt", "x y z " * 40, "--context", "16"), "the context of 16"),
        (("generate", MODEL, "--prompt", "x", "--weights", "int3"), "int3"),
        (("generate", MODEL, "--prompt", "x", "--system", "y"), "--system needs --chat"),
        (("generate", MODEL, "--prompt", "x", "--frobnicate"), "--frobnicate"),
        (("generate",), "MODEL"),
        (("frobnicate",), "frobnicate"),
        (("generate", MODEL, "--prompt", "x", "--logit-bias", "a=1"), "is not ID=X"),
        (("generate", MODEL, "--prompt", "x", "--banned-token-ids", "1;2"), "commas between"),
        (("generate", MODEL, "--prompt", "x", "--stop-token-ids", "49152"), "ids 0..49151"),
        (("generate", MODEL, "--prompt", "x", "--bad-word", " "), "only space"),
        (("generate", MODEL, "--prompt", "x", "--logprobs", "1"), "need --json"),
        (("generate", MODEL, "--prompt", "x", "--acceptance", "lossy"), "one of match, ratio"),
        (("generate", MODEL, "--prompt", "x", "--json-object", "--regex", "a"), "exactly one of"),
        (("generate", MODEL, "--prompt", "x", "--json-schema", "nowhere.json"), "nowhere.json"),
        (("generate", MODEL, "--prompt", "x", "--regex", "(a"), "regex does not compile"),
        (("generate", MODEL, "--prompt", "x", "--n", "0"), "n is 0"),
        (("verify", MODEL, "--speculation", "nothing"), "no drafter 'nothing'"),
        (("verify", MODEL, "--temperature", "-1"), "temperature is -1"),
        (("verify", MODEL, "--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
        (("bench", "curve", MODEL, "--rows", "1,x"), "--rows"),
        (("bench", "curve", MODEL, "--rows", "0"), "--rows"),
        (("bench", "curve", MODEL, "--context", "8192"), "8192"),
        (("bench", "curve", MODEL, "--prefill", "8193"), "8193"),
        (("bench", "decode", MODEL, "--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
        (("bench", "suite", MODEL, "--prompts", "nowhere"), "nowhere"),
        (("bench", "suite", MODEL, "--speculation", "nothing"), "no drafter 'nothing'"),
        (("bench", "suite", MODEL, "--json", "--markdown"), "exclude each other"),
        (("bench", "suite", MODEL, "--prompts", PROMPTS_FOLDER, "--classes", "code,poems"), "no class 'poems'"),
        (("bench", "suite", MODEL, "--prompts", PROMPTS_FOLDER, "--temperature", "-1"), "temperature is -1"),
    ],
)
def test_mistakes(smollm2_path: Path, arguments: tuple[object, ...], message: str) -> None:
    done = _run(*(smollm2_path if argument is MODEL else str(argument) for argument in arguments))
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    if "Usage:" not in done.stderr:  # the option parser frames its own messages
        assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_truncated_model(smollm2_path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    with smollm2_path.open("rb") as file:
        broken.write_bytes(file.read(5_000_000))
    done = _run("generate", broken, "--prompt", "x")
    assert done.returncode == 2
    assert "broken.gguf" in done.stderr and len(done.stderr.splitlines()) == 1


def test_unknown_instruction_path(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTFISH_PATH", "quantum")
    done = _run("generate", smollm2_path, "--prompt", "x")
    assert done.returncode == 2
    assert "quantum" in done.stderr and "portable" in done.stderr and len(done.stderr.splitlines()) == 1
