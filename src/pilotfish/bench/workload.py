"""What a benchmark runs, and on what."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pilotfish.calibrate import cpu_name
from pilotfish.errors import InputError
from pilotfish.files import read_text
from pilotfish.llm import LLM


@dataclass(frozen=True)
class Sample:
    """One prompt of a workload."""

    kind: str
    prompt: str

    @property
    def beginning(self) -> str:
        """What a report calls it."""
        return " ".join(self.prompt.split())[:80]


def read_prompts(path: Path, classes: str | None = None, per_class: int | None = None) -> list[Sample]:
    """Read a workload: a file of JSON lines, or a folder of such files whose names end in .jsonl.

    `classes` are the classes wanted, with commas between; of each class at most `per_class` prompts are taken, evenly
    spread over it. Raises InputError with the line, or the class, that is wrong.
    """
    samples = _read_folder(path) if path.is_dir() else _read_file(path)
    if classes is not None:
        there = list(dict.fromkeys(sample.kind for sample in samples))
        wanted = [kind.strip() for kind in classes.split(",")]
        for kind in wanted:
            if kind not in there:
                raise InputError(f"--classes: {path} has no class {kind!r}; it has {', '.join(there)}")
        samples = [sample for sample in samples if sample.kind in wanted]
    if per_class is not None:
        by_kind: dict[str, list[Sample]] = {}
        for sample in samples:
            by_kind.setdefault(sample.kind, []).append(sample)
        samples = [sample for found in by_kind.values() for sample in _spread(found, per_class)]
    return samples


def _read_folder(folder: Path) -> list[Sample]:
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise InputError(f"the folder {folder} has no .jsonl files")
    return [sample for file in files for sample in _read_file(file)]


def _read_file(path: Path) -> list[Sample]:
    # Not splitlines: a JSON string may hold U+2028, which is a line end to that.
    lines = read_text(str(path), "prompts").split("\n")
    samples = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(item, dict) or not all(isinstance(item.get(key), str) for key in ("class", "prompt")):
            raise InputError(f'{path}, line {number} must be {{"class": TEXT, "prompt": TEXT}}')
        samples.append(Sample(item["class"], item["prompt"]))
    if not samples:
        raise InputError(f"{path} holds no prompts")
    return samples


def _spread(samples: list[Sample], count: int) -> list[Sample]:
    count = min(count, len(samples))
    return [samples[index * len(samples) // count] for index in range(count)]


def machine(llm: LLM) -> str:
    """What ran, in words."""
    return f"{cpu_name()}, {llm.backend_description}"
