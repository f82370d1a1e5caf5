# `make train` and `make test`: each makes .venv, installs what it needs, and runs. A second call is quick.
#
#   make quick                           linter, types, and the tests that need no torch: most mistakes in a minute
#   make test                            the same, then all tests but those that take minutes each
#   make test-all                        those as well
#   make changed                         the tests that what you edited can break, after one `make record`
#   make test WORKERS=4                  on more cores
#   make test ARGS="-k chat"             further words for pytest
#   make test-null-gpu                   whole runs on a GPU whose kernels do nothing: no GPU is needed
#   make train TORCH=torch==2.12.0       another torch
#   make train PYTHON=python3.12         another Python
#   make train ARGS="training.steps=20"  further words for `titan train`

PYTHON ?= python3
TORCH ?= $(shell grep '^torch==' constraints.txt)
ARGS ?=
WORKERS ?= $(shell test $$(nproc 2>/dev/null || echo 1) -gt 1 && echo 2 || echo 1)
BIN := .venv/bin
export NULL_GPU_ENV ?= .venv-null-gpu
export PYTHON

# One worker runs a file from its beginning to its end: what its tests share is made once.
# One that a test kills ends the run: after a restart, xdist 3.8 waits for ever for files that are done.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0
TORCH_FREE := tests/recipe tests/registry tests/cli tests/test_architecture.py
TORCH_NEEDED := tests/recipe/test_schedules_of_torch.py tests/registry/test_apart.py tests/registry/test_docs.py \
	tests/cli/test_plan.py tests/cli/test_plan_check.py

# Where it is set, as in many containers, each process of a test compiles titan anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train quick test test-all record changed choice test-programs test-null-gpu test-versions lint docs wheels release-check clean

train: .venv/.installed
	$(BIN)/titan train llama3_debug $(ARGS)

quick: lint
	$(PYTEST) -m "not slow and not nightly" $(TORCH_FREE) $(addprefix --ignore=,$(TORCH_NEEDED)) $(ARGS)

# The tests that need no torch are the first here too.
test: lint
	$(PYTEST) -m "not slow and not nightly and not real and not gpu" $(ARGS)

test-all: lint
	$(PYTEST) -m "not real and not gpu" $(ARGS)

# What each test runs, in .tests/, by which `make changed` knows what an edit can break.
record: .venv/.installed-dev
	$(BIN)/python -m tests.choice record --workers $(WORKERS) -m "not slow and not nightly and not real and not gpu" $(ARGS)

changed: .venv/.installed-dev
	$(BIN)/python -m tests.choice changed --workers $(WORKERS) -q $(ARGS)

# What `make test` leaves out, chosen anew from a measurement of all tests: two hours on 2 cores. See tests/choice.
choice: .venv/.installed-dev
	$(BIN)/python -m tests.choice record --workers $(WORKERS) --timeout 1200 -m "not real and not gpu"
	$(BIN)/python -m tests.choice choose

# Those that need programs which not every machine has: tests/programs.py. Where one is missing they are skipped.
test-programs: .venv/.installed-dev
	$(PYTEST) -m "needs and not real and not gpu" $(ARGS)

# Steps, saves and memory on a GPU whose kernels do nothing, in an environment of its own: tests/null_gpu.
test-null-gpu:
	tests/null_gpu/environment.sh
	$(NULL_GPU_ENV)/bin/python -m pytest tests/null_gpu --tb native $(ARGS)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What a version may change, on each torch and each Python: tests/versions.sh says what.
test-versions:
	tests/versions.sh

# What docs/generate.py writes, every page against the code, and the site in build/site.
docs: .venv/.installed-dev
	$(BIN)/python docs/generate.py
	$(BIN)/python -m pytest tests/docs $(ARGS)
	$(BIN)/python docs/site.py

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

# torch first, and alone: whatever else is installed then takes the torch that is there. With it what builds titan
# and its plugins, once for all: pip would make an environment of its own for each. Python compiles what it imports;
# to compile all that is installed takes longer than to install it.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c .venv/constraints.txt
.venv/.installed: .venv/constraints.txt pyproject.toml plugins/requirements.txt titancli/version.py
	$(PIP_INSTALL) "$(TORCH)" numpy hatchling editables
	$(PIP_INSTALL) --no-build-isolation -e . -r plugins/requirements.txt
	touch $@

.venv/.installed-dev: .venv/.installed $(wildcard plugins/*/pyproject.toml)
	$(PIP_INSTALL) --no-build-isolation -e ".[dev]" \
		-e plugins/titan-eval -e plugins/titan-float8 -e "plugins/titan-flux[dev]" -e plugins/titan-ft \
		-e plugins/titan-gguf -e plugins/titan-grain -e plugins/titan-muon -e plugins/titan-optimizers -e plugins/titan-trackio -e plugins/titan-wandb
	touch $@
