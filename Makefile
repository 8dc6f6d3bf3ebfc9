# SPDX-License-Identifier: Apache-2.0
# Everything one does with a clone of shardax. Needs python3 (3.11 or newer, with venv) and make.
#
#   make demo    train a small language model over a mesh of 8 virtual devices
#   make test    checks, and the tests of the library
#   make bench   the measurements, against their opponents
#   make docs    the pages, into docs/_build/html
#   make help    the rest
#
# Each command installs what it needs into .venv, the first time and whenever pyproject.toml has
# changed. PYTHON=python3.12 chooses another interpreter: for .venv if that is not there yet, else, if
# .venv has another version, for .venv-3.12. PYTEST_ARGS="-k name -x" goes to pytest.

PYTHON ?= python3
WORKERS ?= auto
PYTEST_ARGS ?=
ROOM ?=
BRANCH ?= main
BENCH_ARGS ?=

VENV := .venv
version_of = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null)
ifneq ($(origin PYTHON),file)
ifeq ($(origin VENV),file)
THERE := $(call version_of,$(VENV)/bin/python)
NAMED := $(call version_of,"$(PYTHON)")
ifneq ($(filter-out $(NAMED),$(THERE)),)
$(if $(NAMED),,$(error '$(PYTHON)' does not run. Name another one: make PYTHON=/path/to/python3 ...))
VENV := .venv-$(NAMED)
$(info .venv has Python $(THERE); Python $(NAMED) gets $(VENV))
endif
endif
endif
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest $(PYTEST_ARGS)
# The tests of the library; and what runs programs or is about texts, which CI runs too.
LIBRARY := --ignore tests/programs tests src/shardax
PROGRAMS := tests/programs README.md docs
PARALLEL := -n $(WORKERS) --maxprocesses 8 --dist worksteal

# Stamps: empty files that say which extras were installed, and when.
STAMPS := $(VENV)/.installed
PYTHON_STAMP := $(STAMPS)-python
RUN := $(STAMPS)-plan,view
TEST := $(STAMPS)-test
BENCH := $(STAMPS)-bench
MUTANTS := $(STAMPS)-mutants

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two installs at once into one environment would break it.
.NOTPARALLEL:
.PHONY: help demo test bench docs test-room test-changed test-programs test-all test-pages test-leaks test-times \
	coverage mutants notebooks house lint types types-pyright format api install clean

help:
	@echo "make demo           train a small language model over a mesh of 8 virtual devices"
	@echo "make test           format, lint, types, and every test of the library"
	@echo "make bench          the measurements (BENCH_ARGS=--quick: only show that they run)"
	@echo "make docs           the pages, into docs/_build/html"
	@echo "make test-room      the tests of one room, as ROOM=core; docs/rooms says what each is"
	@echo "make test-changed   the tests near what was changed since the branch main (BRANCH=...)"
	@echo "make test-programs  benchmarks, examples, notebooks, the code of the pages, their build"
	@echo "make test-all       test and test-programs"
	@echo "make test-pages     the code of README.md and docs/"
	@echo "make test-leaks     the code of README.md and docs/ under jax_check_tracer_leaks"
	@echo "make test-times     make test, and what it costs: CPU-seconds by room, the dearest tests"
	@echo "make coverage       test-all, with the lines and branches that it runs, by package"
	@echo "make mutants        how many of 150 seeded defects the tests notice; after make coverage"
	@echo "make notebooks      execute docs/notebooks and store the outputs"
	@echo "make house          how many files are on the way of a call"
	@echo "make lint           format and lint, without changing anything"
	@echo "make types          ty; make types-pyright: basedpyright, as CI does"
	@echo "make format         format, and mend what the linter can mend"
	@echo "make api            write down the public names anew (after changing them on purpose)"
	@echo "make install        everything into .venv, for working on shardax"
	@echo "make clean          remove caches and builds; .venv and runs/ stay"

# --- What a user runs ---

demo: $(RUN)
	$(BIN)/shardax train --preset demo --mesh data=2,model=4 --devices 8

# Format, lint and types are tests too (tests/house/test_style.py), so that one summary says it all.
test: $(TEST)
	$(PYTEST) $(PARALLEL) $(LIBRARY)

bench: $(BENCH)
	@for program in dispatch program trace_time init bounded_while depth named view static_auto control_flow eager startup train_startup worker processes plan_rank generate load blockwise_loss precision parallel pipelines; do \
		$(BIN)/python benchmarks/$$program.py $(BENCH_ARGS) || exit 1; done

docs: test-pages
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# --- While working ---

test-room: $(TEST)
	@tests=$$($(BIN)/python -m tests.suite.rooms $(ROOM)) && \
		echo "$(PYTEST) $$tests" && $(PYTEST) $(PARALLEL) $$tests

# A first answer, and not the gate.
test-changed: $(TEST)
	@tests=$$($(BIN)/python -m tests.suite.changed $(BRANCH)) && \
		if [ -z "$$tests" ]; then echo "Nothing was changed since $(BRANCH)."; \
		else echo "$(PYTEST) $$tests" && $(PYTEST) $(PARALLEL) $$tests; fi

test-programs: $(TEST)
	$(PYTEST) $(PARALLEL) $(PROGRAMS)

test-all: $(TEST)
	$(PYTEST) $(PARALLEL) $(LIBRARY) $(PROGRAMS)

# How many files of the package are on the way of a call, beside the aims.
house: $(TEST)
	@$(BIN)/python -m tests.programs.figures

test-pages: $(TEST)
	$(PYTEST) README.md docs

# JAX then traces anew at every call, and looks through the heap after every trace. The page on random
# numbers shows a leak of plain JAX.
test-leaks: $(TEST)
	JAX_CHECK_TRACER_LEAKS=1 $(PYTEST) README.md docs --ignore=docs/random.md

test-times: $(TEST)
	$(PYTEST) $(PARALLEL) -p tests.suite.times --times=times.json $(LIBRARY)

coverage: $(TEST)
	$(PYTEST) $(PARALLEL) -p tests.suite.times --times=times.json \
		--cov=src/shardax --cov-branch --cov-context=test --cov-report= $(LIBRARY) $(PROGRAMS)
	$(BIN)/python -m tests.suite.coverage

mutants: $(MUTANTS)
	$(BIN)/python -m tests.suite.mutants

notebooks: $(TEST)
	$(BIN)/python -m tests.programs.docs.notebooks

lint: $(TEST)
	@$(BIN)/ruff format --check --output-format concise || { \
		echo "make format does it"; exit 1; }
	$(BIN)/ruff check --quiet

types: $(TEST)
	$(BIN)/ty check

types-pyright: $(TEST)
	$(BIN)/basedpyright --project pyproject.toml

format: $(TEST)
	$(BIN)/ruff format --quiet
	$(BIN)/ruff check --quiet --fix

api: $(TEST)
	$(BIN)/python -m tests.house.public_api

install: $(TEST) $(BENCH)

clean:
	rm -rf docs/_build docs/generated .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# --- The environment ---

$(PYTHON_STAMP):
	@command -v "$(PYTHON)" > /dev/null || { \
		echo "shardax needs Python 3.11 or newer, and there is no '$(PYTHON)' here."; \
		echo "Install it, or name another one: make PYTHON=/path/to/python3 ..."; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "shardax needs Python 3.11 or newer; '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1)."; \
		echo "Name a newer one: make PYTHON=python3.12 ..."; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2> /dev/null || { \
		echo "'$(PYTHON)' cannot make virtual environments: its module venv or ensurepip is missing."; \
		echo "On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@$(BIN)/python -c 'import pip' 2> /dev/null || "$(PYTHON)" -m venv --clear $(VENV)
	@touch $@

# Installed in place: what is edited in src/ is what runs.
$(RUN) $(TEST) $(BENCH) $(MUTANTS): $(STAMPS)-%: $(PYTHON_STAMP) pyproject.toml
	@echo "installing shardax[$*] into $(VENV)"
	@$(BIN)/python .ci/install.py -e '.[$*]'
	@touch $@
