# make demo: two processes train a language model on real text. make test: all tests. Each sets itself up.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PARALLEL := -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-fast lint bench clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(READY) ## the virtual environment .venv, with the versions of constraints.txt

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Muster needs Python 3.11 or later; this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a minute or two, torch is large"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY) ## train: two processes, DDP, a byte-level GPT on real text, two to three minutes
	$(BIN)/python -m train node --standalone --nproc-per-node 2 -- run --config ddp

test: $(READY) ## every test, each fault and launcher once
	$(BIN)/python -m pytest $(PARALLEL)

test-fast: $(READY) ## unit and two-process tests, under two minutes
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow'

lint: $(READY) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy train tests

bench: $(READY) ## measure, print figures
	$(BIN)/python -m tests.bench

clean: ## remove what was made, but no runs
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
