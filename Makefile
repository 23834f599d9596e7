# `make` alone prints what there is. Everything runs in .venv, which is made on first use.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
# Passed on to the program that a target runs: make demo ARGS=--kill-prefill
ARGS ?=

.PHONY: help
help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

.PHONY: demo
demo: $(READY)  ## prefill and decode in two processes, KV over NIXL, on a real model
	@$(RUN) examples/04_prefill_decode.py $(ARGS)

.PHONY: test
test: $(READY)  ## the whole test suite
	@$(RUN) -m pytest $(ARGS)

.PHONY: soak
soak: $(READY)  ## the property tests again, with many more examples each
	@$(RUN) -m pytest --hypothesis-profile=soak --timeout=7200 -m "not model and not nixl" $(ARGS)

.PHONY: check
check: lint types docs  ## what CI runs after the tests

.PHONY: lint
lint: $(READY)  ## ruff: likely bugs, and formatting
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

.PHONY: types
types: $(READY)  ## mypy, strict
	@$(RUN) -m mypy

.PHONY: docs
docs: $(READY)  ## links in the pages, and the examples they print
	@$(RUN) scripts/render_docs.py --check
	@$(RUN) scripts/check_docs.py

.PHONY: install
install: $(READY)  ## only make the environment
	@echo "$(VENV) is ready"

.PHONY: clean
clean:  ## remove caches and outputs; keeps the environment
	@rm -rf out dist build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# One stamp file, so that a second run installs nothing.
$(READY): pyproject.toml constraints.txt scripts/install
	@scripts/install $(VENV)
	@touch $@
