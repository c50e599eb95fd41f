# One target for each thing one does here; `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stepkeeper-setup
NEWEST := .venv-newest
NEWEST_STAMP := $(NEWEST)/.stepkeeper-setup
NAME ?= dev
# A worker that dies ends its run with a failure; with --dist loadfile it would have no end.
WORKERS ?= -n 2 --dist worksteal
RESULTS := out/tests
CONTAINER ?= docker
IMAGES := operator trainer
TAG ?= $(shell $(MAKE) --silent --no-print-directory version)
# What touches torch. The tests of the operator, the cluster and the tools don't. Nor does what kills, stops, fences or delays
# processes, or damages and withholds what they read: no torch has a part in that, and it takes minutes.
NEWEST_LEFT_OUT := $(addprefix tests/integration/test_manager_,damage.py killed_anywhere.py no_access.py process.py \
	reports.py tier.py told.py told_anywhere.py upkeep.py waits.py)
NEWEST_TESTS := $(addprefix tests/unit/,planners runtime runtime_process) tests/contract \
	$(addprefix tests/unit/cli/test_cli_,formats.py roots.py streaming.py) \
	$(addprefix tests/integration/test_,accelerator.py dcp_storage.py formats_ranks.py storage_stock_dcp.py torch_releases.py) \
	$(filter-out $(NEWEST_LEFT_OUT),$(wildcard tests/integration/test_manager_*.py)) $(wildcard tests/integration/test_planners_*.py) \
	tests/integration/integrations
# Extras of both environments, and those that only that one has.
EXTRAS := cli fsspec gcs prometheus torch
TRAINERS := accelerate lightning torchtitan transformers
# That environment has no operator.
NEWEST_NOT := "tests/unit/runtime/test_light_imports.py::test_importing_loads_nothing_heavy[operator]"
NEWEST_SMOKES := "tests/unit/runtime/test_light_imports.py::test_importing_loads_nothing_heavy[library]" tests/integration/test_manager_cpu.py \
	$(foreach trainer,$(TRAINERS),"tests/integration/integrations/test_resumes_exactly.py::test_a_stopped_training_is_an_undisturbed_one[with_$(trainer)-plain]")
SOURCES := operator runtime planners tests examples benchmarks

# Tests, demo and benchmarks start hundreds of processes: without bytecode each would compile the packages again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

.PHONY: setup
setup: $(STAMP) ## Make .venv/ with torch, torch_xla and all the rest, exactly as locked

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else f"Python 3.11 to 3.13 is needed (torch 2.9 has wheels for these), this is {v[0]}.{v[1]}: PYTHON=python3.11 make setup")'
	@echo "setup: .venv (about 7.5 GB, most of it torch; a few minutes)"
	$(PYTHON) -m venv .venv || { echo "setup: no venv module: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(NEWEST_STAMP): requirements-newest.lock pyproject.toml
	@echo "setup: $(NEWEST) (about 5.5 GB, most of it torch; a minute or two)"
	$(PYTHON) -m venv $(NEWEST)
	@# Most of these modules are never imported: the tests compile those that are.
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --quiet --no-compile --require-hashes -r requirements-newest.lock
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@touch $@

.PHONY: lock
lock: setup ## Rewrite the lock files from pyproject.toml
	$(BIN)/python -m pip install --quiet uv==0.13.8
	$(BIN)/uv pip compile pyproject.toml $(addprefix --extra ,$(EXTRAS) operator xla) --group dev --generate-hashes --no-emit-index-url --no-header --no-annotate --quiet --upgrade -o requirements.lock
	grep -oE '^[A-Za-z0-9_.-]+==[^ ]+' requirements.lock > .venv/constraints
	$(BIN)/uv pip compile pyproject.toml --extra operator --generate-hashes --no-emit-index-url --no-header --no-annotate --quiet -c .venv/constraints -o requirements-operator.lock
	$(BIN)/uv pip compile pyproject.toml $(addprefix --extra ,$(EXTRAS) $(TRAINERS)) --group test --group trainers --generate-hashes --no-emit-index-url --no-header --no-annotate --quiet --upgrade -o requirements-newest.lock

.PHONY: build
build: setup ## Build the binaries of the test cluster into the cache (once; about 10 minutes)
	$(BIN)/python -m stepcluster build

.PHONY: demo
demo: build ## Run a training job on a real cluster, preempt it, cut its power, see it resume
	$(BIN)/python -m demo

.PHONY: demo-tpu
demo-tpu: build ## Run a job on queued Cloud TPU VMs that join a real cluster, are maintained, and are replaced
	$(BIN)/python -m demo_tpu

.PHONY: test
test: setup ## Run the tests that need no root and no cluster (10 minutes on 2 cores)
	$(BIN)/python -m pytest $(WORKERS) -m gate --junitxml=$(RESULTS)/gate.xml tests/unit tests/contract tests/property tests/integration $(ARGS)

.PHONY: test-e2e
test-e2e: build ## Run the tests on real clusters and on a Cloud Storage emulator (root; about 25 minutes on 2 cores)
	$(BIN)/python tests/runs/side_by_side.py $(ARGS)

.PHONY: test-all
test-all: build $(NEWEST_STAMP) ## Run all tests: more random cases, the exhaustive ones, sabotage, the newest torch (root; about two hours on 2 cores)
	@trap 'exit 130' INT; code=0; \
	$(BIN)/python -m pytest $(WORKERS) -m "(gate or full) and not cluster" --hypothesis-profile=thorough \
		--junitxml=$(RESULTS)/full.xml $(ARGS) || code=1; \
	$(BIN)/python tests/runs/side_by_side.py -m "e2e or (full and cluster)" $(ARGS) || code=1; \
	$(MAKE) test-newest || code=1; \
	exit $$code

.PHONY: test-newest
test-newest: build $(NEWEST_STAMP) ## Run the library's tests on the newest torch, which torch_xla has no release for, in .venv-newest/
	$(NEWEST)/bin/python -m pytest $(WORKERS) -m "not long and not xla" --deselect $(NEWEST_NOT) $(NEWEST_TESTS) $(ARGS)

.PHONY: smoke-newest
smoke-newest: $(NEWEST_STAMP) ## Save and restore on the newest torch, by the library and by each trainer
	$(NEWEST)/bin/python -m pytest --junitxml=$(RESULTS)/newest.xml $(NEWEST_SMOKES) $(ARGS)

.PHONY: mutants
mutants: setup ## Change the pure cores in small ways, and count what their unit tests notice (ARGS="log"; 20 minutes on 2 cores)
	$(BIN)/python tests/runs/mutants.py $(ARGS)

.PHONY: bench
bench: build ## Run the benchmarks, and write their figures into benchmarks/results/ (root)
	$(BIN)/python -m benchmarks.planning
	$(BIN)/python -m benchmarks.planning.steady
	$(BIN)/python -m benchmarks.planning.many
	$(BIN)/python -m benchmarks.saving
	$(BIN)/python -m benchmarks.loading
	$(BIN)/python -m benchmarks.storage
	$(BIN)/python -m benchmarks.operator

.PHONY: cluster
cluster: build ## Start the test cluster and print its kubeconfig (NAME=dev)
	$(BIN)/python -m stepcluster up --name $(NAME)

.PHONY: cluster-down
cluster-down: setup ## End what `make cluster` started (NAME=dev)
	$(BIN)/python -m stepcluster down --name $(NAME)

.PHONY: generate
generate: setup ## Write the CRDs of the chart, from the types
	$(BIN)/python -m stepkeeper_operator.crds

.PHONY: fmt
fmt: setup ## Format, and mend what can be mended
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

.PHONY: lint
lint: setup ## Lint and check the format
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	@test ! -e operator/__init__.py || { echo "operator/__init__.py shadows Python's own operator module: delete it"; exit 1; }

.PHONY: types
types: setup ## Check the types, strictly, tests included
	$(BIN)/mypy operator runtime planners tests examples benchmarks

.PHONY: imports
imports: setup ## Check which package may import which
	$(BIN)/lint-imports

.PHONY: wheel
wheel: setup ## Build the wheel into dist/
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

.PHONY: version
version: ## Print the version
	@sed -n 's/^__version__ = "\(.*\)"/\1/p' runtime/stepkeeper/version.py

.PHONY: images
images: ## Build the images of operator and trainers (REGISTRY=…, TAG=the version, CONTAINER=docker)
	@test -n "$(REGISTRY)" || { echo "images: name where they belong: make images REGISTRY=…"; exit 1; }
	for image in $(IMAGES); do \
		$(CONTAINER) build --file images/$$image.Dockerfile --tag $(REGISTRY)/stepkeeper-$$image:$(TAG) .; done

.PHONY: push
push: images ## Build and push them
	for image in $(IMAGES); do $(CONTAINER) push $(REGISTRY)/stepkeeper-$$image:$(TAG); done

.PHONY: clean
clean: ## Delete what was built in the tree (the cache of the cluster's binaries stays)
	rm -rf .venv $(NEWEST) dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
