# Everything lives in .venv, which is made at the first call and reused for as long as pyproject.toml and
# constraints.txt stay as they are.

PYTHON ?= python3
CONFIG ?= examples/addition.toml
ROW ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help setup run test bench clean
.DEFAULT_GOAL := help

help:
	@echo "make run              train $(CONFIG) into a fresh folder under runs/ (CONFIG=... for another)"
	@echo "make test             formatting, lint, types, imports and tests"
	@echo "make bench            the benchmarks, into benchmarks/results/ (ROW=name for one row of them)"
	@echo "make setup            only install into $(VENV) (PYTHON=... for another Python than $(PYTHON))"
	@echo "make clean            remove $(VENV) and caches; runs/ stays"

setup: $(INSTALLED)

run: $(INSTALLED)
	@$(BIN)/headrace train $(CONFIG)

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest

bench: $(INSTALLED)
	@$(BIN)/python -m benchmarks.suite $(ROW)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# The stamp is written last, and removed before an update: whatever an interrupted installation has left is
# thrown away by the next call.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" > /dev/null || \
	  { echo "error: no '$(PYTHON)' here; install Python 3.11 or newer, or name one with PYTHON=..." >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $$("$(PYTHON)" -V) is too old; install Python 3.11 or newer, or name one with PYTHON=..." >&2; exit 2; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2> /dev/null || \
	  { echo "error: '$(PYTHON)' cannot make virtual environments; install its venv module (on Debian and Ubuntu the package python3-venv)" >&2; exit 2; }
	@if [ ! -e $@ ] || ! $(BIN)/python -c 'import pip'; then rm -rf $(VENV); "$(PYTHON)" -m venv $(VENV); fi
	@rm -f $@
	@echo "installing into $(VENV); the first time takes some minutes"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@
