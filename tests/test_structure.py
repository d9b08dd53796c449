"""The rules of the design that a program can hold: who may import whom, sizes, names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "pilotfish"
# Level of each module or package; a module imports from lower levels, or from its own.
LEVELS = {
    "errors": 0,
    "config": 0,
    "metrics": 0,
    "params": 0,
    "quant": 0,
    "request": 0,
    "tree": 0,
    "scheduler": 1,
    "kv": 1,
    "control": 1,
    "program": 2,
    "backends": 2,
    "sampling": 2,
    "history": 2,
    "node_rows": 2,
    "verify": 2,
    "_native": 2,
    "models": 3,
    "loaders": 3,
    "drafters": 4,
    "output": 5,
    "engine": 5,
    "active": 5,
    "drafting": 5,
    "team": 5,
    "watchdog": 5,
    "llm": 6,
    "bench": 6,
    "arguments": 6,
    "calibrate": 6,
    "completion": 6,
    "profile": 6,
    "cli": 6,
    "generate": 6,
    "files": 6,
    "server": 6,
    "load": 6,
    "plan": 6,
    "compare": 6,
    "__main__": 6,
}
LEDGER, COMPUTE = 1, 2
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def _unit(module: str) -> str:
    return module.split(".")[1]


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            module = node.module or ""
            names = [f"pilotfish.{alias.name}" for alias in node.names] if module == "pilotfish" else [module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= set(names)
    return found


def test_every_module_has_a_level() -> None:
    units = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in MODULES}
    assert units <= set(LEVELS)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down(path: Path) -> None:
    unit = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    for module in _imports(path):
        assert module.split(".")[0] not in ("torch", "transformers", "gguf"), f"{path} imports {module}"
        if not module.startswith("pilotfish."):
            continue
        other = _unit(module)
        assert LEVELS[other] <= LEVELS[unit], f"{unit} imports {other} from a higher level"
        assert {LEVELS[other], LEVELS[unit]} != {LEDGER, COMPUTE}, (
            f"{unit} imports {other}: ledger and compute are apart"
        )
        if LEVELS[unit] == LEDGER:
            assert "numpy" not in _imports(path), f"{path}: the ledger holds integers only"


def test_only_the_engine_sees_ledger_and_compute() -> None:
    for path in MODULES:
        modules = {module for module in _imports(path) if module.startswith("pilotfish.")}
        if LEVELS[path.relative_to(SOURCE).parts[0].removesuffix(".py")] == 6:
            # The edges plan memory, and measure what passes cost, before there is an engine.
            modules = {module for module in modules if not module.startswith("pilotfish.control.")}
        if {LEDGER, COMPUTE} <= {LEVELS[_unit(module)] for module in modules}:
            assert path.name == "engine.py"


def test_sizes() -> None:
    for path in MODULES:
        assert len(path.read_text().splitlines()) <= 400, path
    sources = [*ROOT.glob("csrc/**/*.cc"), *ROOT.glob("csrc/**/*.h")]
    assert sources
    for path in sources:
        assert len(path.read_text().splitlines()) <= 600, path


def test_names() -> None:
    for path in MODULES:
        assert not path.stem.endswith(("utils", "common", "manager", "_v2")), path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                assert not node.name.startswith("Base"), f"{path}: {node.name}"
