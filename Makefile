# make demo | make test: everything else is for those who work on the project (see CONTRIBUTING.md).
# make help lists the targets: what one does stands behind its ##.
#
# Each target makes its own virtual environment, .venv, unless PYTHON names an interpreter: that one is
# used as it is and nothing is installed.

VENV := .venv
ifdef PYTHON
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/ready
endif

# Two test processes on a CPU; one where a GPU is shared between them.
WORKERS ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo 0 || echo 2)

.PHONY: demo help test lint format wheel-test gpu bench clean

demo: $(READY) | compiler ## a small language model answers from a paged cache; DEMO_ARGS=--help
	$(PY) -m examples.smollm2.demo $(DEMO_ARGS)

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

test: $(READY) | compiler ## the tests; TEST_ARGS='tests/kernels -k fp8' runs some of them
	$(PY) -m pytest -n $(WORKERS) $(TEST_ARGS)

lint: $(READY) ## ruff, mypy and clang-format; changes nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tools/clang_format.py --check

format: $(READY) ## mends what ruff and clang-format can mend
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(PY) tools/clang_format.py

# Builds the wheel and runs it in an environment of its own, from outside the tree.
wheel-test: $(READY) | compiler ## builds the wheel and uses it from outside the tree
	sh tools/wheel_test.sh $(PY)

# Tests, sanitizer, demo and benchmark on a GPU machine; results as JSON under OUT. STEPS names some of them.
OUT ?= build/gpu
STEPS ?=
gpu: $(READY) ## tests, sanitizer, demo and benchmarks on a GPU; OUT=folder STEPS='tests fuzz'
	$(PY) -m tools.gpu --out $(OUT) $(STEPS)

bench: $(READY) ## performance alone, on a GPU; BENCH_ARGS=--help
	$(PY) -m benchmarks $(BENCH_ARGS)

# The documentation's site, strictly: a warning or a broken link is an error. Its tools have an environment of their own.
DOCS_VENV := build/docs-venv
ifdef PYTHON
DOCS_PY := $(PYTHON)
DOCS_READY :=
else
DOCS_PY := $(DOCS_VENV)/bin/python
DOCS_READY := $(DOCS_VENV)/ready
endif
.PHONY: docs
docs: $(DOCS_READY) ## the documentation as a site, in build/site/
	NO_MKDOCS_2_WARNING=1 $(DOCS_PY) -m mkdocs build --strict

$(DOCS_VENV)/ready: pyproject.toml tools/bootstrap.sh
	@sh tools/bootstrap.sh docs $(DOCS_VENV)

.PHONY: compiler
compiler:
	@sh tools/bootstrap.sh compiler

$(VENV)/ready: pyproject.toml tools/bootstrap.sh
	@sh tools/bootstrap.sh venv $(VENV)

clean: ## removes build/, dist/ and the caches of pytest, mypy and ruff
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
