# `make train` and `make test`: each makes .venv, installs what it needs, and runs. A second call is quick.
#
#   make train TORCH=torch==2.12.0       another torch
#   make train PYTHON=python3.12         another Python
#   make train ARGS="training.steps=20"  further words for `titan train`

PYTHON ?= python3
TORCH ?= $(shell grep '^torch==' constraints.txt)
ARGS ?=
BIN := .venv/bin

.PHONY: train test lint clean

train: .venv/.installed
	$(BIN)/titan train llama3_debug $(ARGS)

test: .venv/.installed-dev lint
	$(BIN)/python -m pytest -m "not slow and not real and not gpu" $(ARGS)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv

.venv/constraints.txt: constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	grep -v '^torch==' constraints.txt > $@

# torch first, and alone: whatever else is installed then takes the torch that is there.
.venv/.installed: .venv/constraints.txt pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .venv/constraints.txt "$(TORCH)" numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .venv/constraints.txt -e .
	touch $@

.venv/.installed-dev: .venv/.installed $(wildcard plugins/*/pyproject.toml)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .venv/constraints.txt -e ".[dev]" \
		-e plugins/titan-float8 -e "plugins/titan-flux[dev]" -e plugins/titan-muon
	touch $@
