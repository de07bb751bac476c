# `make demo` and `make test` need Python 3.11+ and nothing else; everything goes into $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: demo demo-distill test lint bench test-matrix clean

$(INSTALLED): setup.py pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else f"Python 3.11 or newer is needed, this is {sys.version}")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: $(INSTALLED)
	$(BIN)/python -m scripts.demo

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

bench: $(INSTALLED)
	$(BIN)/python -m benchmark.run

clean:
	rm -rf $(VENV) demo_out
