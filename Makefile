# Everything runs in .venv, which is made on first use and again when pyproject.toml or constraints.txt change.
# Another interpreter: make PYTHON=python3.12 venv

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help venv test lint format demo demo-network clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

venv: $(INSTALLED)  ## set up .venv with Checkmate (editable) and everything for development

test: $(INSTALLED)  ## run the whole test suite; ARGS='-k name -x' goes to pytest
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(INSTALLED)  ## ruff (lint and format) and mypy --strict
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict src

format: $(INSTALLED)  ## let ruff format and fix what it can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

demo: $(INSTALLED)  ## train, kill all workers, resume, compare; ARGS='--seed 7' goes to the demo
	$(BIN)/checkmate demo $(ARGS)

demo-network: $(INSTALLED)  ## the same in network namespaces, as root: the switch feeds the shadow; bytes per link
	$(BIN)/checkmate demo --network --steps 30 $(ARGS)

clean:  ## remove .venv and everything that tools have left behind
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis htmlcov .coverage .coverage.*
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# torch goes first and by its exact version: any other spelling may bring another, much larger build of it.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || \
	  { echo "$(PYTHON) is not there; on Debian or Ubuntu: sudo apt install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Checkmate needs Python 3.10 or newer, this is $$($(PYTHON) -V); say make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments; on Debian or Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt '$(TORCH)'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,plot]'
	@touch $@
