# `make train` and `make test`: each makes .venv, installs what it needs, and runs. A second call is quick.
#
#   make train TORCH=torch==2.12.0       another torch
#   make train PYTHON=python3.12         another Python
#   make train ARGS="training.steps=20"  further words for `titan train`

PYTHON ?= python3
TORCH ?= $(shell grep '^torch==' constraints.txt)
ARGS ?=
BIN := .venv/bin

.PHONY: train test lint docs wheels release-check clean

train: .venv/.installed
	$(BIN)/titan train llama3_debug $(ARGS)

test: .venv/.installed-dev lint
	$(BIN)/python -m pytest -m "not slow and not real and not gpu" $(ARGS)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What docs/generate.py writes, and every page against the code.
docs: .venv/.installed-dev
	$(BIN)/python docs/generate.py
	$(BIN)/python -m pytest tests/docs $(ARGS)

# Wheels and source distributions of titan and of each plugin, in dist/.
wheels: .venv/.installed-dev
	rm -rf dist
	for project in . plugins/*/; do \
		$(BIN)/python -m build --no-isolation --outdir dist "$$project" || exit 1; \
	done

# Whether TAG, the version and the changelog are of one release; its notes go to dist-notes.md.
release-check: .venv/.installed-dev
	$(BIN)/python .github/release.py "$(TAG)" > dist-notes.md

clean:
	rm -rf .venv

.venv/constraints.txt: constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	grep -v '^torch==' constraints.txt > $@

# torch first, and alone: whatever else is installed then takes the torch that is there.
.venv/.installed: .venv/constraints.txt pyproject.toml titancli/version.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .venv/constraints.txt "$(TORCH)" numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .venv/constraints.txt -e .
	touch $@

.venv/.installed-dev: .venv/.installed $(wildcard plugins/*/pyproject.toml)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .venv/constraints.txt -e ".[dev]" \
		-e plugins/titan-float8 -e "plugins/titan-flux[dev]" -e plugins/titan-muon
	touch $@
