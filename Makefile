# Each target sets itself up: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest -q -n $(shell env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || echo 2)

.PHONY: demo test test-all docs dist check lint gpu bench clean

demo: .venv/demo
	$(BIN)/ligermodels demo

# The kernels' tests run the Triton code, interpreted where there is no GPU; all others run what a user runs.
# Tests marked slow (fuzzing, kills, long sweeps) are left to test-all.
test: .venv/test
	TRITON_INTERPRET=1 $(PYTEST) -m "not slow" tests/kernels
	$(PYTEST) -m "not slow" tests --ignore tests/kernels --ignore tests/tools

# Every test but those that need a GPU, each once: also the slow ones and those inside Trainer, TRL, PEFT and other tools;
# then the site and the package.
test-all: .venv/tools docs dist
	TRITON_INTERPRET=1 $(PYTEST) --all-packages tests/kernels
	$(PYTEST) --all-packages tests --ignore tests/kernels

# The site of docs/, in site/. A link to nothing fails it.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# sdist and wheel, in dist/: their contents and metadata are checked, and the wheel runs its demo elsewhere. The list of
# files of an earlier build, in *.egg-info, would add to the contents.
dist: .venv/dist
	rm -rf dist build *.egg-info
	$(BIN)/python -m build --quiet --no-isolation --outdir dist .
	$(BIN)/python -m tests.package dist

check: lint test

lint: .venv/lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# On a machine with a GPU whose python3 holds torch and the group `test`: the same tests on the real kernels, in processes
# that share its GPUs, 15 for each, the slowest tests first. The record is part of the commit that it judges; it is also
# written when a time limit ends the run, and says what was not reached. ONLY=kernels/attention runs those tests whose
# path and name have both words, and ONLY="norm or rope" those that have one; neither writes a record.
GPU_PROCESSES ?= 15
gpu:
	$(PYTHON) -m pytest -q -n $(GPU_PROCESSES) --dist worksteal -m gpu \
		$(if $(ONLY),-k "$(subst /, and ,$(ONLY))",--record benchmarks/results/gpu.json) tests

# On a machine with GPUs whose python3 holds torch and the group `bench`: all records again (RECORDS="step-* decode":
# some), then README's table, docs/results.md and the cards. docs/benchmarks.md says how to read them.
bench:
	$(PYTHON) -m benchmarks.run $(RECORDS)
	$(PYTHON) -m benchmarks.cards

.venv/bin/python:
	$(PYTHON) -m venv .venv

# Groups of dependencies are read by pip since 25.1, and Python 3.11 comes with an older one.
.venv/pip: .venv/bin/python
	$(PIP) --upgrade 'pip>=25.1'
	touch $@

.venv/demo: .venv/pip pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) -e .
	touch $@

.venv/test: .venv/demo
	$(PIP) -e '.[gguf,vision]' --group test
	touch $@

.venv/tools: .venv/test
	$(PIP) --group tools
	touch $@

.venv/docs: .venv/demo
	$(PIP) --group docs
	touch $@

.venv/dist: .venv/demo
	$(PIP) --group dist
	touch $@

.venv/lint: .venv/test
	$(PIP) --group lint
	touch $@

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
