"""The workloads of the benchmarks, the comparison in turns, whose figures are checked by hand, and `bench suite`."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pilotfish import LLM, InputError, PilotfishError, SamplingParams
from pilotfish.bench import Sample, read_prompts
from pilotfish.bench.neighbours import Neighbours
from pilotfish.bench.report import show
from pilotfish.bench.turns import (
    CONTROL,
    Run,
    Turns,
    contestants,
    parse_settings,
    summarise,
    summarise_by_class,
    take_turns,
)
from pilotfish.cli import app

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TOKENS = tuple(range(40))


def _line(kind: str, prompt: str) -> str:
    return json.dumps({"class": kind, "prompt": prompt}, ensure_ascii=False) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b.jsonl").write_text("".join(_line("b", f"b{number}") for number in range(7)))
    (tmp_path / "a.jsonl").write_text(_line("a", "one\u2028line") + "\n" + _line("c", "c0"))
    (tmp_path / "notes.txt").write_text("not a workload")
    return tmp_path


def test_a_workload_is_a_file_or_a_folder(folder: Path) -> None:
    assert read_prompts(folder / "a.jsonl") == [Sample("a", "one\u2028line"), Sample("c", "c0")]
    assert read_prompts(folder) == [*read_prompts(folder / "a.jsonl"), *read_prompts(folder / "b.jsonl")]
    assert [sample.prompt for sample in read_prompts(folder, "b, c")] == ["c0", *(f"b{number}" for number in range(7))]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, ["b0"]), (2, ["b0", "b3"]), (3, ["b0", "b2", "b4"]), (9, [f"b{number}" for number in range(7)])],
)
def test_a_part_of_each_class_is_spread_over_it(folder: Path, count: int, expected: list[str]) -> None:
    found = read_prompts(folder, per_class=count)
    assert [sample.prompt for sample in found if sample.kind == "b"] == expected
    assert {sample.kind for sample in found} == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_line("a", "x") + "{\n", "a.jsonl, line 2 is not JSON"),
        ('{"class": "a"}', "line 1 must be"),
        ('["a", "b"]', "line 1 must be"),
        ('{"class": "a", "prompt": 3}', "line 1 must be"),
        ("\n", "holds no prompts"),
    ],
)
def test_a_workload_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    for path in (file, tmp_path):
        with pytest.raises(InputError, match=message):
            read_prompts(path)


def test_what_is_not_there(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(InputError, match="no class 'd'; it has a, c, b"):
        read_prompts(folder, "a,d")
    with pytest.raises(InputError, match=r"no \.jsonl files"):
        read_prompts(tmp_path_factory.mktemp("empty"))
    with pytest.raises(InputError, match="can not read"):
        read_prompts(folder / "z.jsonl")


def test_the_prompts_we_ship() -> None:
    samples = read_prompts(BENCHMARKS / "prompts")
    by_kind: dict[str, list[str]] = {}
    for sample in samples:
        by_kind.setdefault(sample.kind, []).append(sample.prompt)
    assert set(by_kind) == {"code", "edit", "chat", "summary", "translation", "extraction", "maths"}
    for kind, prompts in by_kind.items():
        assert {sample.kind for sample in read_prompts(BENCHMARKS / "prompts" / f"{kind}.jsonl")} == {kind}
        assert len(set(prompts)) == len(prompts) >= (6 if kind == "maths" else 10)
    for kind in ("edit", "summary", "extraction"):
        assert sum(400 < len(prompt) < 2000 for prompt in by_kind[kind]) >= 8


def test_settings() -> None:
    assert list(parse_settings(None)) == ["off"]
    found = parse_settings(["ngram:k=4", "off", "suffix", "ngram:k=4"], control=True)
    assert list(found) == ["off", CONTROL, "ngram:k=4", "suffix"]
    assert found[CONTROL] == found["off"]
    with pytest.raises(InputError):
        parse_settings(["nothing"])


class _Machine:
    """Answers prompts at known speeds, in tokens per ms, which drift from run to run."""

    def __init__(self, drift: Callable[[int], float] = lambda run: 1.0) -> None:
        self.log: list[tuple[str, str]] = []
        self._drift = drift

    def contestant(self, name: str, speed: float, tokens: tuple[int, ...] = TOKENS) -> Callable[[Sample], Run]:
        def answer(sample: Sample) -> Run:
            rate = speed * self._drift(len(self.log))
            self.log.append((name, sample.prompt))
            answered = tokens[: int(sample.prompt)] if sample.prompt.isdigit() else tokens
            return Run(answered, len(answered) // 2, 1e3 * rate, 10 + len(answered) / rate)

        return answer


class _Count:
    def __init__(self) -> None:
        self.runs = 0
        self.kinds: list[str] = []

    def __call__(self, count: int, kind: str) -> None:
        self.runs += count
        self.kinds.append(kind)


def test_the_order_alternates_and_every_run_is_told() -> None:
    machine, count = _Machine(), _Count()
    rivals = {name: machine.contestant(name, 1.0) for name in ("off", "x", "y")}
    take_turns([Sample("a", "p"), Sample("b", "q")], rivals, 3, count)
    back, forth = ["y", "x", "off"], ["off", "x", "y"]
    assert [name for name, _ in machine.log] == [*back, *forth, *back, *forth, *back, *forth]
    assert [prompt for _, prompt in machine.log] == ["p"] * 9 + ["q"] * 9
    assert count.runs == 18 and count.kinds == ["a"] * 9 + ["b"] * 9


@given(
    st.lists(st.floats(0.1, 10), min_size=5, max_size=5),
    st.lists(st.floats(0.2, 8), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_drift_between_turns_is_no_gain(drift: list[float], ratios: list[float], repeat: int) -> None:
    """The machine is another one in each turn; the ratio is that of the speeds all the same."""
    rivals_count = 1 + len(ratios)
    machine = _Machine(lambda run: drift[run // rivals_count % len(drift)])
    rivals = {"off": machine.contestant("off", 0.5)}
    rivals |= {f"x{i}": machine.contestant(f"x{i}", 0.5 * ratio) for i, ratio in enumerate(ratios)}
    turns = take_turns([Sample("a", "p"), Sample("a", "q")], rivals, repeat, _Count())
    for i, ratio in enumerate(ratios):
        for result in turns.groups()[f"x{i}"]["a"]:
            assert result.over_off == pytest.approx(ratio)
            assert (result.over_off - 1) * (result.request_over_off - 1) >= -1e-9
    assert all(result.over_off == 1 for result in turns.groups()["off"]["a"])


def test_one_noisy_run_of_three_is_nothing() -> None:
    machine = _Machine(lambda run: 0.1 if run == 2 else 1.0)
    rivals = {"off": machine.contestant("off", 1.0), "x": machine.contestant("x", 2.0)}
    turns = take_turns([Sample("a", "p")], rivals, 3, _Count())
    off, x = turns.results
    assert (off.tokens_per_second, x.tokens_per_second, x.over_off) == (1000, 2000, 2)
    assert x.request_over_off == pytest.approx((10 + 40) / (10 + 20))


def test_rows_of_a_report() -> None:
    machine = _Machine()
    speeds = {"p": 1.5, "q": 3.0, "a  long\nprompt": 0.5}

    def x(sample: Sample) -> Run:
        tokens = TOKENS if sample.prompt != "q" else (*TOKENS[:-1], 99)
        return machine.contestant("x", speeds[sample.prompt], tokens)(sample)

    samples = [Sample("a", prompt) for prompt in speeds]
    turns = take_turns(samples, {"off": machine.contestant("off", 1.0), "x": x}, 1, _Count())
    row = summarise_by_class(turns)["x"]["a"]
    assert (row["tokens_per_second"], row["over_off"], row["worst_over_off"]) == (1500, 1.5, 0.5)
    assert row["worst_prompt"] == "a long prompt" and row["prompts"] == 3
    assert row["acceptance_length"] == 2
    assert row["equal"] is False and summarise(turns.groups()["off"]["a"])["equal"] is True


def test_short_answers_are_not_counted() -> None:
    machine, count = _Machine(), _Count()
    rivals = {name: machine.contestant(name, 1.0) for name in ("off", "x")}
    turns = take_turns([Sample("a", "16"), Sample("a", "15"), Sample("b", "3")], rivals, 4, count)
    assert [sample.prompt for sample in turns.short] == ["15", "3"]
    assert {result.sample.prompt for result in turns.results} == {"16"}
    assert count.runs == 3 * 2 * 4 and len(machine.log) == 2 * 4 + 2 + 2
    with pytest.raises(PilotfishError, match="less than 16 tokens"):
        take_turns([Sample("b", "3")], rivals, 1, _Count())
    assert take_turns([Sample("b", "3")], rivals, 1, _Count(), fewest_tokens=2).results


def test_a_report_in_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    machine = _Machine()
    rivals = {"off": machine.contestant("off", 1.0), "x|y": machine.contestant("x", 2.5, TOKENS[1:])}
    report = summarise_by_class(take_turns([Sample("a", "p")], rivals, 1, _Count()))
    show("Title", report, markdown=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "**Title**" and lines[3].startswith("| --- | --- | --:")
    assert lines[4] == "| off | a | 1000.0 | 1.00 | 1.00 | 1.00 | 2.00 | yes |"
    assert lines[5].startswith("| x\\|y | a | 2500.0 | 2.50 | 2.50 |") and lines[5].endswith("| NO |")
    show("Title", report)
    table = capsys.readouterr().out
    assert "acceptance" in table and "2500.0" in table


def test_suite(smollm2_path: Path, folder: Path) -> None:
    (folder / "b.jsonl").write_text(
        _line("edit", "Repeat: one two three four one two three four one two three four one two three four")
        + _line("edit", "Repeat this sentence: The cat sat on the mat and the dog sat on the cat.")
    )
    arguments = ["bench", "suite", str(smollm2_path), "--prompts", str(folder), "--max-tokens", "16", "--repeat", "2"]
    arguments += ["--speculation", "ngram", "--control", "--ignore-eos", "--classes", "a,edit"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert list(report["temperatures"]) == ["0", "0.8"]
    for part in report["temperatures"].values():
        assert list(part["settings"]) == list(part["all"]) == ["off", CONTROL, "ngram"]
        assert part["short"] == {}
        for text, kinds in part["settings"].items():
            assert list(kinds) == ["a", "edit"] and kinds["edit"]["prompts"] == 2
            assert all(row["equal"] for row in kinds.values())
            assert all(row["worst_over_off"] <= row["over_off"] for row in kinds.values())
            if text != "ngram":
                assert all(row["acceptance_length"] == 1 for row in kinds.values())
        assert part["all"]["ngram"]["prompts"] == 3
    assert report["temperatures"]["0"]["settings"]["ngram"]["edit"]["acceptance_length"] > 1
    entries = report["results"]
    assert len(entries) == 2 * 3 * 3 and all(entry["tokens"] == 16 for entry in entries)
    worst = report["worst"]["ngram"]
    ratios = [entry["over_off"] for entry in entries if entry["speculation"] == "ngram"]
    assert worst["prompt"]["over_off"] == min(ratios) <= worst["class"]["over_off"]
    assert (report["max_tokens"], report["repeat"], report["ignore_eos"]) == (16, 2, True)
    assert report["other_cores"] is None or report["other_cores"] >= 0
    spoken = CliRunner().invoke(app, [*arguments, "--temperature", "0", "--per-class", "1", "--repeat", "1"])
    assert spoken.exit_code == 0
    assert "temperature 0" in spoken.stdout and "ngram: worst class" in spoken.stdout
    assert "T=0, edit: run" in spoken.stderr and "min left" in spoken.stderr


def test_decode_tells_the_worst_prompt_and_may_end_early(smollm2_path: Path, folder: Path) -> None:
    arguments = ["bench", "decode", str(smollm2_path), "--prompts", str(folder), "--per-class", "1", "--json"]
    done = CliRunner().invoke(app, [*arguments, "--until-eos", "--max-tokens", "20", "--speculation", "ngram"])
    assert done.exit_code == 0, done.output
    settings = json.loads(done.stdout)["settings"]
    for row in settings["ngram"].values():
        assert row["worst_over_off"] == row["over_off"] and row["equal"]


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="nobody counts processor time here")
def test_work_of_others_shows_and_our_own_does_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        try:
            time.sleep(0.2)
            mine, others = Neighbours([spinning.pid]), Neighbours()
            until = time.monotonic() + 0.8
            while time.monotonic() < until:  # our own work, which counts for neither
                pass
            time.sleep(0.2)
            counted_as_ours, counted_as_others = mine.cores(), others.cores()
        finally:
            spinning.kill()
    assert counted_as_ours is not None and counted_as_others is not None
    assert counted_as_others > counted_as_ours + 0.02  # it had a share of a processor, however busy the machine is


def test_processor_time_that_nobody_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", missing)
    assert Neighbours().cores() is None


def test_runs_of_a_prompt_learn_nothing_from_each_other(smollm2: LLM) -> None:
    """A drafter that remembers outputs would find the whole answer when a prompt is repeated."""
    sample = Sample("chat", "What should I see in Lisbon in two days?")
    settings = parse_settings(["suffix:k=8"])
    rivals = contestants(smollm2, settings, SamplingParams(max_tokens=32, ignore_eos=True))
    steps = [rivals["suffix:k=8"](sample).target_steps for _ in range(3)]
    assert steps[0] == steps[1] == steps[2] > 8


def _peer() -> ModuleType:
    """benchmarks/peers/llama_decode.py, which is a program and no module of the package."""
    sys.path.insert(0, str(BENCHMARKS / "peers"))
    try:
        spec = importlib.util.spec_from_file_location("llama_decode", BENCHMARKS / "peers" / "llama_decode.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS / "peers"))
    return module


class _Process:
    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


def test_an_answer_of_the_peer() -> None:
    asked: list[dict[str, Any]] = []
    timings = {"prompt_ms": 20.0, "predicted_n": 5, "predicted_ms": 8.0, "draft_n": 6, "draft_n_accepted": 2}

    def reply(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200, json={"tokens": [1, 2, 3, 4, 5], "timings": timings})

    process = _Process()
    client = httpx.Client(transport=httpx.MockTransport(reply))
    server = _peer().Server("llama.cpp draft-3", "http://peer", process, client)
    run = server.answer([7, 8], 5)
    assert (run.tokens, run.target_steps) == ((1, 2, 3, 4, 5), 3)
    assert run.tokens_per_second == 500 and run.request_ms == 28  # four tokens came after the first
    assert asked[0]["prompt"] == [7, 8] and asked[0]["n_predict"] == 5 and asked[0]["cache_prompt"] is False
    assert process.signals == [signal.SIGCONT, signal.SIGSTOP]
    timings["predicted_n"] = 4
    with pytest.raises(PilotfishError, match="gave 4 tokens instead of 5"):
        server.answer([7, 8], 5)
    assert process.signals[-1] == signal.SIGSTOP


def test_the_best_mode_of_the_peer_is_that_of_each_prompt() -> None:
    peer, machine = _peer(), _Machine()
    speeds = {"p": (4.0, 2.0, 1.0), "q": (4.0, 1.0, 8.0)}  # of pilotfish with x, and of two modes of the peer

    def rival(index: int) -> Callable[[Sample], Run]:
        return lambda sample: machine.contestant(str(index), speeds[sample.prompt][index])(sample)

    rivals = {"off": machine.contestant("off", 1.0), "x": rival(0)}
    rivals |= {f"{peer.PEER}plain": rival(1), f"{peer.PEER}draft": rival(2)}
    turns: Turns = take_turns([Sample("a", "p"), Sample("a", "q")], rivals, 1, _Count())
    assert peer.over_best(turns)["x"] == {kind: {"median": 1.25, "worst": 0.5} for kind in ("a", "all")}
    assert peer.best_mode(summarise_by_class(turns), "a") == f"{peer.PEER}draft"
