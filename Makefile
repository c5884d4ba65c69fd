# `make demo` and `make test` do all their own set-up in .venv; both run on a CPU.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint install install-dev clean

demo: install
	$(BIN)/relax-sdk train --plugin qwen_image

test: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/house tests/unit -n 2 --dist loadfile
	$(BIN)/python -m pytest tests/integration tests/gpu

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

PROJECTS := pyproject.toml plugins/pickscore/pyproject.toml plugins/qwen_image/pyproject.toml

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(PROJECTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e . -e plugins/pickscore -e plugins/qwen_image
	touch $@

# Tests drive the real SGLang, on a CPU: its packages are pinned, SGLang itself comes without its CUDA dependencies.
SGLANG := requirements/sglang-cpu.txt

$(VENV)/.installed-dev: $(PROJECTS) $(SGLANG) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -r $(SGLANG)
	$(BIN)/python -m pip install --quiet --no-deps sglang==0.5.23
	$(BIN)/python -m pip install --quiet -c $(SGLANG) -e ".[dev]" -e plugins/pickscore -e plugins/qwen_image
	touch $@ $(VENV)/.installed

clean:
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache
