"""`pilotfish plan`: sizes against tensors and published counts, the report, and one clear line for every mistake."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gguf_writer import gguf_bytes, tiny_gguf
from pilotfish import cli
from pilotfish.control.speedup import best_drafts, flat_cost
from pilotfish.errors import InputError
from pilotfish.loaders import load_config, load_model
from pilotfish.models.decoder import decoder_program
from pilotfish.plan.configurations import NAMES, configuration
from pilotfish.plan.estimates import drafters, estimate
from pilotfish.plan.machine import Machine
from pilotfish.plan.sizes import BatchSizes, model_sizes
from pilotfish.program import BLOCK_SIZE
from test_hf import tiny_config, tiny_tensors, write

A100 = ("--device", "a100")


def _run(*arguments: str | Path) -> str:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(cli.app, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def _json(*arguments: str | Path) -> Any:
    text = _run(*arguments, "--json")
    assert len(text.splitlines()) == 1
    return json.loads(text)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The one line on stderr of a command that ends with code 2."""

    def run(*arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["pilotfish", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        assert caught.value.code == 2 and out == "" and len(err.splitlines()) == 1
        assert err.startswith("pilotfish: ")
        return err.removeprefix("pilotfish: ").rstrip("\n")

    return run


# Totals of the files' own headers, as the model pages show them.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("tinyllama-1.1b", 1_100_048_384),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("mistral-7b", 7_248_023_552),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-coder-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("smollm2-1.7b", 1_711_376_384),
    ],
)
def test_public_models_have_their_parameters(name: str, parameters: int) -> None:
    assert model_sizes(name, "file", "").parameters == parameters


@pytest.mark.parametrize("name", NAMES)
def test_every_name_can_be_planned_for(name: str) -> None:
    config = configuration(name)
    assert config is not None
    config.check()
    assert config.name == name
    sizes = model_sizes(name, "fp16", "")
    assert sizes.weight_bytes == 2 * sizes.parameters
    assert 0.8 < sizes.nominal_parameters / sizes.parameters < 1.25


def test_names_as_people_write_them() -> None:
    assert configuration("meta-llama/Meta-Llama-3.1-8B-Instruct") == configuration("llama-3.1-8b")
    assert configuration("meta-llama/Llama-2-7b-chat-hf") == configuration("llama-2-7b")
    assert configuration("Qwen/Qwen2.5-Coder-7B-Instruct") is not None
    assert configuration("llama-2-8b") is None


def test_seven_billion_parameters_in_halves() -> None:
    """14 GB of weights (13.5 exactly), and 0.7 to 3.5 GB for drafts of 5 to 25 % of them."""
    found = _json("llama-2-7b", "--weights-format", "fp16", *A100)
    target, (low, high) = found["target"], found["draft_sizes"]
    assert target["weight_bytes"] == 13_476_831_232 and target["nominal_weight_bytes"] == 14_000_000_000
    assert (low["share"], high["share"]) == (0.05, 0.25)
    assert (low["nominal_parameters"], high["nominal_parameters"]) == (350_000_000, 1_750_000_000)
    assert (low["nominal_weight_bytes"], high["nominal_weight_bytes"]) == (700_000_000, 3_500_000_000)
    assert low["parameters"] == round(0.05 * target["parameters"])
    assert target["kv_bytes_per_token"] == 32 * 32 * 128 * 2 * 2
    assert found["memory"]["bytes"]["target KV"] == 2048 * 524_288
    text = " ".join(_run("llama-2-7b", *A100).split())
    for part in ("13.5 GB", "14 GB for a nominal 7 B", "0.674 to 3.37 GB", "0.35 to 1.75 B, 0.7 to 3.5 GB", "524 kB"):
        assert part in text


def test_weights_formats() -> None:
    parameters = model_sizes("llama-2-7b", "fp16", "").parameters
    size = {form: model_sizes("llama-2-7b", form, "").weight_bytes for form in ("bf16", "fp8", "int8", "int4")}
    assert size["bf16"] == 2 * parameters
    assert size["fp8"] == pytest.approx(parameters, rel=1e-3)
    assert size["int8"] == pytest.approx(parameters * 34 / 32, rel=1e-3)
    assert size["int4"] == pytest.approx(parameters * 20 / 32, rel=1e-3)
    sizes = model_sizes("llama-2-7b", "fp16", "")
    assert sizes.weight_bytes - sizes.pass_bytes == 2 * 32000 * 4096  # rows of the embedding are looked up
    tied = model_sizes("smollm2-135m", "fp16", "")
    assert tied.weight_bytes == tied.pass_bytes


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_is_planned_with_its_own_bytes(tmp_path: Path, architecture: str) -> None:
    metadata, tensors = tiny_gguf(architecture, "Q8_0")
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes(metadata, tensors))
    loaded = load_model(path)
    found = load_config(path)
    assert found.config == loaded.config and found.note == loaded.note
    assert found.stored == ("Q8_0", "F32")
    assert found.weight_bytes == sum(tensor.nbytes for tensor in loaded.tensors.values())
    sizes = model_sizes(str(path), "file", "")
    assert sizes.weight_bytes == found.weight_bytes and sizes.format == "Q8_0"
    assert sizes.parameters == sum(_elements(tensor.shape) for tensor in loaded.tensors.values())
    assert sizes.operations_per_row == 2 * sum(
        _elements(tensor.shape)
        for name, tensor in loaded.tensors.items()
        if len(tensor.shape) == 2 and (name != "embed" or loaded.config.tied_embeddings)
    )
    assert sizes.kv_bytes_per_token * BLOCK_SIZE == decoder_program(loaded.config, 16).kv.bytes_per_block
    assert model_sizes(str(path), "int8", "").weight_bytes == found.weight_bytes  # Q8_0 is what int8 means


def _elements(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


def test_the_real_file(smollm2_path: Path) -> None:
    found, loaded = load_config(smollm2_path), load_model(smollm2_path)
    assert found.config == loaded.config
    assert found.weight_bytes == sum(tensor.nbytes for tensor in loaded.tensors.values())
    assert _json("demo", *A100)["target"]["weight_bytes"] == found.weight_bytes
    assert configuration("smollm2-135m").vocab_size == loaded.config.vocab_size  # type: ignore[union-attr]


def test_demo_is_planned_without_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path))
    found = _json("demo", *A100)
    assert found["target"]["parameters"] == 134_515_008
    assert "not downloaded" in found["notes"][0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"])
def test_a_configuration_needs_no_weights(tmp_path: Path, architecture: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_config(architecture, torch_dtype="bfloat16")))
    alone = load_config(tmp_path)
    assert alone == load_config(file) and alone.stored == ("BF16",) and alone.weight_bytes is None
    assert _json(tmp_path, *A100) == _json(file, *A100)
    if architecture == "LlamaForCausalLM":
        write(tmp_path, tiny_config(architecture), tiny_tensors())
        assert load_config(tmp_path).config == load_model(tmp_path).config
    other = tmp_path / "small.json"
    other.write_text(json.dumps(tiny_config(architecture, dtype="float32")))
    sizes = model_sizes(str(other), "file", "")
    assert sizes.name == "small" and sizes.format == "fp32" and sizes.weight_bytes == 4 * sizes.parameters


def test_a_draft_model_and_its_memory() -> None:
    found = _json("llama-3.1-8b", "--draft", "llama-3.2-1b", *A100, "--batch", "4", "--context", "1000", "--k", "5")
    assert found["draft"]["weight_bytes"] == 2 * 1_235_814_400
    sizes = found["memory"]["bytes"]
    blocks = 4 * -(-1000 // BLOCK_SIZE) * BLOCK_SIZE
    assert sizes["target KV"] == blocks * 32 * 8 * 128 * 4 and sizes["draft KV"] == blocks * 16 * 8 * 64 * 4
    assert sizes["logits to verify"] == 4 * 4 * 6 * 128256
    assert sizes["logits of the draft"] == 4 * 4 * 128256
    assert sizes["rows of draft trees"] == 4 * 5 * (32 * 8 * 128 * 4 + 16 * 8 * 64 * 4)
    assert found["memory"]["total_bytes"] == sum(sizes.values())
    assert [each["drafter"] for each in found["estimates"]] == ["llama-3.2-1b"]
    assert not any("assumed" in note for note in found["notes"])
    other = _json("llama-2-7b", "--draft", "qwen3-0.6b", "--draft-weights-format", "int4", *A100)
    assert other["draft"]["weights_format"] == "int4" and other["target"]["weights_format"] == "fp16"
    assert any("tokenizer" in note for note in other["notes"])


def test_what_fits_does_and_one_more_does_not() -> None:
    batch = BatchSizes(model_sizes("llama-2-7b", "fp16", ""), model_sizes("tinyllama-1.1b", "int8", ""), 3000, 4)
    for memory in (16 * 10**9, 24 * 10**9, 80 * 10**9, 10**13):
        most = batch.most_requests(memory)
        assert batch.plan(most + 1, memory).total_bytes > memory
        if most:
            plan = batch.plan(most, memory)
            assert plan.fits and plan.num_blocks * BLOCK_SIZE >= most * 3000
            rest = plan.total_bytes - plan.kv_bytes
            block = batch.kv_bytes_per_token * BLOCK_SIZE
            assert rest + plan.num_blocks * block <= memory < rest + (plan.num_blocks + 1) * block
    assert batch.most_requests(10**9) == 0 and batch.plan(1, 10**9).num_blocks == 0
    told = _json("llama-2-7b", *A100, "--memory", "14GB")["memory"]
    assert told["available_bytes"] == 14 * 10**9 and not told["fits"] and told["requests"] == 0
    assert "does NOT fit" in _run("llama-2-7b", *A100, "--memory", "14GB")


def test_the_report_holds_what_the_formulas_say() -> None:
    found = _json("llama-2-7b", *A100, "--acceptance", "0.7,0.9", "--max-k", "20", "--batch", "3", "--memory", "24GB")
    assert set(found) == {
        *("target", "draft", "draft_sizes", "machine", "batch", "context"),
        *("k", "plain_ms", "memory", "estimates", "notes"),
    }
    assert found["machine"] == {
        "name": "a100",
        "bandwidth_gb_per_s": 2039,
        "peak_tflop_per_s": 312,
        "measured": False,
    }
    assert [(each["drafter"], each["acceptance"]) for each in found["estimates"]] == [
        (drafter, rate) for rate in (0.7, 0.9) for drafter in ("no weights", "5 % of the target", "25 % of the target")
    ]
    read = found["target"]["bytes_read_by_a_pass"] + 3 * 2048 * found["target"]["kv_bytes_per_token"]
    assert found["plain_ms"] == pytest.approx(read / 2039e6)
    for each in found["estimates"]:
        cost, rate = each["cost_ratio"], each["acceptance"]
        assert [row["k"] for row in each["by_k"]] == list(range(1, 21))
        assert [row["batch"] for row in each["by_batch"]] == [1, 2, 3, 4, 8, 16, 32, 64, 128, 256]
        for row in each["by_k"]:
            assert row["tokens_per_pass"] == pytest.approx((1 - rate ** (row["k"] + 1)) / (1 - rate), abs=1e-5)
            assert row["rule_of_thumb"] == pytest.approx(1 / (1 - rate + rate / (row["k"] + 1)), abs=1e-5)
            assert row["speedup_flat"] == pytest.approx(row["tokens_per_pass"] / (1 + cost * row["k"]), abs=1e-4)
            assert row["speedup"] == pytest.approx(
                row["tokens_per_pass"] / (row["pass_ratio"] + cost * row["k"]), abs=1e-4
            )
        here = next(row for row in each["by_batch"] if row["batch"] == 3)
        assert (here["best_k"], here["speedup"]) == (each["best_k"], each["best_speedup"])
        assert each["best_speedup"] == max(row["speedup"] for row in each["by_k"])
    five, quarter = found["estimates"][1:3]
    assert five["cost_ratio"] == pytest.approx(0.05) and quarter["cost_ratio"] == pytest.approx(0.25)
    # Far below the ridge a pass of many rows is as long, and the best length is that of the paper's formula.
    assert five["best_k"] == best_drafts(0.7, lambda k: flat_cost(k, 0.05), 20)[0] == 6
    assert quarter["break_even_acceptance"] == pytest.approx(0.25, abs=1e-4)


def test_where_speculation_stops_paying() -> None:
    """With little context all waits for arithmetic in the end, and one row more costs as much as the first."""
    target = model_sizes("llama-3.1-8b", "fp16", "")
    machine = Machine("h100", 3350, 989, None)
    small = drafters(target, model_sizes("llama-3.2-1b", "fp16", ""))[0]
    asked: dict[str, Any] = {"acceptance": 0.7, "context": 64, "most_drafts": 16}
    found = estimate(target, small, machine, batch=1, batches=[1, 64, 512], **asked)
    assert found.best.drafts > 0 and found.batches[0] == found.best and found.batches[-1].drafts == 0
    last = found.pays_until
    assert last is not None and 32 < last < 296
    edge = estimate(target, small, machine, batch=last, batches=[last, last + 1, 4 * last], **asked)
    assert [point.drafts > 0 for point in edge.batches] == [True, False, False]
    # Long contexts are read once for all rows of a request: then it pays at every batch.
    far = estimate(target, small, machine, batch=1, batches=[1, 4096], **(asked | {"context": 32768}))
    assert far.pays_until is None and far.batches[-1].drafts > 0
    same = drafters(target, target)[0]
    useless = estimate(target, same, machine, batch=1, batches=[1], **asked)
    assert useless.best.drafts == 0 and useless.pays_until == 0
    text = _run("llama-3.1-8b", "--draft", "llama-3.2-1b", "--device", "h100", "--context", "64")
    assert f"best k is 0 from a batch of {last + 1}" in text


def test_the_table() -> None:
    text = _run("llama-3.1-8b", *A100, "--memory", "24GB", "--acceptance", "0.6,0.8")
    for part in (
        "tokens of KV that fit",
        "requests of 2,048 tokens",
        "rule of thumb",
        "breaks even at",
        "drafter 25 % of the target (c = 0.250), acceptance 0.8, batch 1",
        "best k (speed-up) by batch size, acceptance 0.6",
        "roofline of a100: 2,039 GB/s, 312 TFLOP/s",
        "pays from an acceptance of 5.0 %",
    ):
        assert part in text


def test_this_machine_is_measured_by_default() -> None:
    found = _json("smollm2-135m")["machine"]
    assert found["measured"] and found["bandwidth_gb_per_s"] > 0 and found["peak_tflop_per_s"] > 0


def test_figures_of_a_device() -> None:
    given = _json("smollm2-135m", "--bandwidth", "50", "--peak", "0.5")
    assert given["machine"]["name"] == "as given" and "available_bytes" not in given["memory"]
    changed = _json("smollm2-135m", "--device", "H100", "--bandwidth", "3000")["machine"]
    assert (changed["bandwidth_gb_per_s"], changed["peak_tflop_per_s"]) == (3000, 989)


@pytest.mark.parametrize("more", [(), ("--draft", "tinyllama-1.1b", "--acceptance", "0.5,0.9", "--context", "64")])
def test_the_picture(tmp_path: Path, more: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    _run("llama-2-7b", *A100, *more, "--plot", file)
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 20_000


def test_a_picture_needs_matplotlib(refused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    line = refused("llama-2-7b", *A100, "--plot", tmp_path / "plan.png")
    assert line == "plan --plot needs matplotlib: pip install 'pilotfish[bench]'"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama-2-7",), "'llama-2-7' is no model: .* is llama-2-7b or .* meant"),
        (("\0nonsense",), "is no model: .* known are llama-2-13b, "),
        (("nowhere/tiny.gguf",), "nowhere/tiny.gguf does not exist; give a .gguf file"),
        (("nowhere/config.json",), "does not exist; give a .gguf file"),
        ((__file__,), "is not a .gguf file, a Hugging Face directory or a config.json"),
        (("llama-2-7b", "--draft", "gpt-5"), "'gpt-5' is no model"),
        (("llama-2-7b", "--draft-weights-format", "int4"), "is for a --draft MODEL"),
        (("llama-2-7b", "--weights-format", "q9"), "'q9' must be one of fp16, bf16, fp8, int8, int4 or file"),
        (("llama-2-7b", "--acceptance", "1.5"), "must be numbers from 0 to 1 with commas"),
        (("llama-2-7b", "--acceptance", "nan"), "must be numbers from 0 to 1 with commas"),
        (("llama-2-7b", "--acceptance", ""), "must be numbers from 0 to 1 with commas"),
        (("llama-2-7b", "--acceptance", "high"), "must be numbers from 0 to 1 with commas"),
        (("llama-2-7b", "--batch", "0"), "--batch is 0; it must lie in 1 to"),
        (("llama-2-7b", "--context", "4097"), "--context is 4097; llama-2-7b has 1 to 4096 tokens"),
        (("llama-2-7b", "--k", "-1"), "--k is -1; it must lie in 0 to 64"),
        (("llama-2-7b", "--max-k", "65"), "--max-k is 65; it must lie in 1 to 64"),
        (("llama-2-7b", "--memory", "lots"), "the size 'lots' must be a number of bytes"),
        (("llama-2-7b", "--device", "abacus"), "'abacus' is not known; known are a10, a100"),
        (("llama-2-7b", "--bandwidth", "100"), "give both, or --device NAME"),
        (("llama-2-7b", "--bandwidth", "-1", "--peak", "1"), "--bandwidth -1 must be a positive number"),
        (("llama-2-7b", "--bandwidth", "100", "--peak", "inf"), "--peak inf must be a positive number"),
        (("llama-2-7b", "--plot", "plan.pdf"), "must be a .png file in a folder that exists"),
        (("llama-2-7b", "--plot", "nowhere/plan.png"), "must be a .png file in a folder that exists"),
    ],
)
def test_mistakes(refused: Any, arguments: tuple[str, ...], message: str) -> None:
    line = refused(*arguments)
    with pytest.raises(InputError, match=message):
        raise InputError(line)


def test_damaged_configurations(refused: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    assert refused(tmp_path) == f"{tmp_path}: config.json: can not be read: No such file or directory"
    file.write_text("{")
    assert refused(file).startswith(f"{tmp_path}: config.json: is not valid JSON")
    file.write_text(json.dumps(tiny_config("GPT2LMHeadModel")))
    assert "architecture GPT2LMHeadModel is not supported" in refused(file)
    file.write_text(json.dumps(tiny_config(hidden_size=None)))
    assert "hidden_size is missing" in refused(file)
    file.write_text(json.dumps(tiny_config(num_hidden_layers=0)))
    assert "num_layers is 0; it must be at least 1" in refused(file)
    file.write_text(json.dumps(tiny_config(num_hidden_layers=10**9)))  # sizes are products: no layer is looked at
    assert _json(file, *A100)["target"]["parameters"] > 10**13
    (tmp_path / "cut.gguf").write_bytes(gguf_bytes(*tiny_gguf("llama"))[:500])
    assert "truncated or corrupt" in refused(tmp_path / "cut.gguf")
