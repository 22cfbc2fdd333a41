# The documented commands. Each creates what it needs; nothing has to be installed by hand but Python 3.11 or 3.12.
#   PYTHON=python3.12              take this interpreter instead of the first that works
#   PIP_ARGS="--index-url ..."     further arguments for pip, e.g. an index that carries PyTorch's CPU build
#   PYTEST_ARGS="-k kernels -x"    further arguments for pytest
#   ENGINE=vllm                    the engine of `make demo`, instead of SGLang
#   DEMO_ARGS="--pair toy"         further arguments for the demo
#   TEST_JOBS=1                    test files that `make test` and `make check` run at a time
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
# Bytecode is kept, whatever the environment says. pip compiles nothing here (.ci/venv), and a process that compiles what it
# imports takes twice as long to have imported an engine: each server's processes, and each job of the tests.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?=
PIP_ARGS ?=
PYTEST_ARGS ?=
TEST_JOBS ?= 2
DEMO_ARGS ?=
SOAK_REQUESTS ?= 10000
ENGINE ?= sglang

VENV := .venv/sglang
PY := $(VENV)/bin/python
VLLM_VENV := .venv/vllm
VLLM_PY := $(VLLM_VENV)/bin/python
# The stamp names the directory: a moved or copied checkout must not import the code of the one it came from.
HERE := $(firstword $(shell pwd -P | cksum))
STAMP := $(VENV)/.installed-$(HERE)
VLLM_STAMP := $(VLLM_VENV)/.installed-$(HERE)

.PHONY: help demo demo-sglang demo-vllm test check lint soak report venv-sglang venv-vllm clean

help:
	@echo "make demo    serve a real model on stock SGLang on this CPU, with and without C2T; table and picture in build/demo"
	@echo "             make demo ENGINE=vllm: the same on vLLM, in build/demo-vllm"
	@echo "make test    everything: lint, types, all tests, servers included"
	@echo "make check   the quick loop: lint, types, core tests"
	@echo "make soak    10,000 requests, every fifth hostile, others aborted and retracted, while the disk fills: nothing lost"
	@echo "make report  rewrite docs/results*.md, and the generated tables of other pages from benchmarks/results"
	@echo "make clean   remove build output and caches (environments stay: rm -r .venv removes them)"

demo: demo-$(ENGINE)

demo-sglang: venv-sglang
	@$(PY) -m benchmarks.serving.demo $(DEMO_ARGS)

demo-vllm: venv-vllm
	@$(VLLM_PY) -m benchmarks.serving.demo --engine vllm $(DEMO_ARGS)

# Each engine's tests run in its own environment; the other's skip themselves or are left out. Status 5: none selected.
VLLM_TESTS := tests/engines/vllm tests/benchmarks/serving/test_real_servers.py tests/benchmarks/pairs/test_smollm2_engines.py
# Files in the order of tests/conftest.py: xdist would put those of a single test last, some of which are the longest.
BY_FILE := -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder
# What is installed for vLLM has one of two cores for itself while the other reads the code.
test:
	@$(MAKE) -j2 lint venv-vllm
	@OMP_NUM_THREADS=1 $(VLLM_PY) -m pytest $(BY_FILE) $(VLLM_TESTS) $(PYTEST_ARGS) || [ $$? = 5 ]
	@OMP_NUM_THREADS=1 $(PY) -m pytest $(BY_FILE) --ignore=tests/engines/vllm $(PYTEST_ARGS)

check: venv-sglang lint
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q $(BY_FILE) -m "not server and not slow" $(PYTEST_ARGS)

lint: venv-sglang
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

soak: venv-sglang
	@OMP_NUM_THREADS=1 SOAK_REQUESTS=$(SOAK_REQUESTS) $(PY) -m pytest -q -rP tests/engines/sglang/test_soak.py $(PYTEST_ARGS)

report: venv-sglang
	@$(PY) -m benchmarks.report
	@$(PY) -m benchmarks.report.training_tables
	@$(PY) -m benchmarks.report.fleet_tables
	@$(PY) -m benchmarks.report.learning_table
	@$(PY) -m benchmarks.report.head_table

venv-sglang: $(STAMP)

$(STAMP): pyproject.toml .constraints/sglang.txt .constraints/dev.txt .ci/venv
	@PYTHON="$(PYTHON)" PIP_ARGS="$(PIP_ARGS)" bash .ci/venv $(VENV) .constraints/sglang.txt .constraints/dev.txt
	@touch $@

venv-vllm: $(VLLM_STAMP)

$(VLLM_STAMP): pyproject.toml .constraints/vllm.txt .constraints/dev.txt .ci/venv
	@PYTHON="$(PYTHON)" PIP_ARGS="$(PIP_ARGS)" bash .ci/venv $(VLLM_VENV) .constraints/vllm.txt .constraints/dev.txt
	@touch $@

clean:
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache *.egg-info kernels/*.egg-info
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
