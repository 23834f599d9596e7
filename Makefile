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
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

.PHONY: demo
demo: $(READY)  ## prefill and decode in two processes, KV over NIXL, on a real model
	@$(RUN) examples/04_prefill_decode.py $(ARGS)

.PHONY: test
test: $(READY)  ## the whole test suite
	@$(RUN) -m pytest $(ARGS)

.PHONY: soak
soak: $(READY)  ## the property tests again, with many more examples each
	@$(RUN) -m pytest --hypothesis-profile=soak --timeout=7200 -m "not model and not nixl" $(ARGS)

# make chaos SEED=7 REQUESTS=200; a soak: make chaos MINUTES=20
SEED ?=
REQUESTS ?= 1000

.PHONY: chaos
chaos: MINUTES = 0
chaos: $(READY)  ## PD over NIXL under an adversary: SEED=, REQUESTS=, MINUTES= for a soak
	@$(RUN) tests/chaos/run_chaos.py $(if $(SEED),--seed $(SEED)) --requests $(REQUESTS) \
	  --minutes $(MINUTES) $(ARGS)

# make equivalence PEER_PYTHON=/path/to/python MINUTES=10
PEER_PYTHON ?=
MINUTES ?= 2

.PHONY: equivalence
equivalence: $(READY)  ## fresh random traces, decided by vLLM beside pdcore: PEER_PYTHON=, MINUTES=
	@$(RUN) tests/equivalence/explore.py --peer-python "$(PEER_PYTHON)" --minutes $(MINUTES) $(ARGS)

# make bench PEER_PYTHON=/path/to/vllm/bin/python NANO_VLLM=/path/to/source
.PHONY: bench
bench: $(READY)  ## the control plane's benchmarks, beside peers that are given: PEER_PYTHON=
	@PEER_PYTHON="$(PEER_PYTHON)" $(RUN) benchmarks/bench_all.py $(ARGS)

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
