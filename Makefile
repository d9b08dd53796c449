# The only commands, the same for a person and for CI. PYTHON picks the interpreter of the fresh environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: install install-dev demo test check bench clean

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

SOURCES := pyproject.toml CMakeLists.txt $(wildcard csrc/*.cc csrc/*.h) $(wildcard src/pilotfish/*.py src/pilotfish/*/*.py)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check .
	touch $@

$(VENV)/.installed-dev: $(BIN)/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '.[dev]'
	touch $(VENV)/.installed $@

demo: install
	$(BIN)/python scripts/demo.py

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror csrc/*.cc csrc/*.h csrc/bench/*.cc csrc/tests/*.cc csrc/tests/*.h

# The Debian packages g++-aarch64-linux-gnu and qemu-user turn on the tests of the aarch64 kernels.
test: check
	$(BIN)/python -m pytest

bench: install
	$(BIN)/pilotfish bench curve demo
	$(BIN)/pilotfish bench suite demo --per-class 3 --max-tokens 64 --repeat 1

clean:
	rm -rf $(VENV) build
