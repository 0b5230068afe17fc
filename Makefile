# Every target sets up what it needs first. Start with `make demo`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
BUILD_KERNELS := $(BIN)/python engine/src/moonpool_engine/engine/native/build.py
SOURCES := $(wildcard engine/src/moonpool_engine/engine/native/*.cpp engine/src/moonpool_engine/engine/native/*.h)

.PHONY: setup-demo setup setup-dev demo test lint types check long docs docs-version changelog lock wheel release swarm soak bench bench-guard house notebook peer-tests clean

# What `install.py` sets up: what serves, with plans and measurements, with tests and checks.
setup-demo: $(VENV)/.installed-demo

setup: $(VENV)/.installed

setup-dev: $(VENV)/.installed-dev

PROJECTS := pyproject.toml setup.py engine/pyproject.toml engine/setup.py lab/pyproject.toml install.py
SERVES := requirements.lock requirements-cuda.lock $(PROJECTS) $(SOURCES)
NEEDS_PYTHON = test -n "$(PYTHON)" || { echo "moonpool needs Python 3.11 or newer on the PATH"; exit 1; }

$(VENV)/.installed-demo: $(SERVES)
	@$(NEEDS_PYTHON)
	@$(PYTHON) install.py
	@touch $@

$(VENV)/.installed: $(SERVES) requirements-lab.lock
	@$(NEEDS_PYTHON)
	@$(PYTHON) install.py lab
	@touch $@ $(VENV)/.installed-demo

$(VENV)/.installed-dev: $(SERVES) requirements-lab.lock requirements-dev.lock
	@$(NEEDS_PYTHON)
	@$(PYTHON) install.py lab dev
	@touch $@ $(VENV)/.installed $(VENV)/.installed-demo

demo: setup-demo
	$(BIN)/moonpool demo

# Processes that run tests side by side.
WORKERS ?= 2

# Without kernels for this CPU, tests of the engine take ten times as long, and many fail.
test: setup-dev
	@$(BUILD_KERNELS)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not long"

# Tests that take long: sweeps, second kinds of a fault, the wheel. CI runs them too.
long: setup-dev
	@$(BUILD_KERNELS)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m long

lint: setup-dev
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .

types: setup-dev
	$(BIN)/mypy

check: lint types test

# PEER_PYTHON, OPENVINO_PYTHON and LLAMA_PYTHON name Pythons of installations to compare with.
bench: setup
	$(BIN)/moonpool bench engine $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON)) \
	  $(if $(OPENVINO_PYTHON),--openvino-python $(OPENVINO_PYTHON)) \
	  $(if $(LLAMA_PYTHON),--llama-python $(LLAMA_PYTHON))
	$(BIN)/moonpool bench cached
	$(BIN)/moonpool bench head

# The documentation site in build/site: its own environment, links checked. Open index.html.
docs: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct 2>/dev/null)
docs: setup $(VENV)-docs/.installed
	$(BIN)/python -m website build/site-source
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict

# This version of the site beside the others in DOCS; its pages have a switch between them.
DOCS ?= build/versions
docs-version: export DOCS_VERSIONS = mike
docs-version: docs
	$(BIN)/python -m website.versions build/site $(DOCS)

$(VENV)-docs/.installed: requirements-docs.lock
	test -x $(VENV)-docs/bin/python || $(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/pip --disable-pip-version-check install -q --require-hashes \
	  -r requirements-docs.lock
	@touch $@

# The locks again, from pyproject.toml; the versions stay unless UPGRADE is set.
lock: setup-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python lock.py $(if $(UPGRADE),--upgrade)

# An sdist and a wheel of each package. That of the engine is a manylinux wheel with the kernels for all
# instruction sets (MOONPOOL_RELEASE). They
# use the OpenMP library that torch brings: a second one in the same process would have threads of its
# own.
DIST ?= dist
wheel: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct 2>/dev/null)
wheel: setup-dev
	rm -rf $(DIST)
	MOONPOOL_RELEASE=1 $(BIN)/python -m build --no-isolation --outdir $(DIST) .
	$(BIN)/python -m build --no-isolation --outdir $(DIST) lab
	MOONPOOL_RELEASE=1 $(BIN)/python -m build --no-isolation --outdir $(DIST)/unrepaired engine
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 \
	  --wheel-dir $(DIST) $(DIST)/unrepaired/*.whl
	mv $(DIST)/unrepaired/*.tar.gz $(DIST)
	rm -r $(DIST)/unrepaired

# The lines of changes/ into CHANGELOG.md; with VERSION=0.2.0 its section [Unreleased] becomes that.
changelog: setup
	$(BIN)/python changelog.py $(VERSION)

# Wheels, sdists, chart, site, image, lists of parts and checksums in dist/. The version is that of the
# tag. buildah makes the image, no daemon. IMAGE_BASE=debian takes Debian's packages, where registries are out of
# reach (mmdebstrap), none leaves the image out. Without buildah a candidate has no image; a tag needs one.
IMAGE_BASE ?= docker.io/library/python:3.11-slim
release: wheel docs
	$(BIN)/python release.py $(DIST) $(IMAGE_BASE)

swarm: setup-dev
	$(BIN)/python -m tests.sim.swarm --seeds 5000

soak: setup-dev
	$(BIN)/python -m tests.soak --operations 200000

# The CPU time of the simulator and of the default decision beside another commit's: by default the
# last release's, or that of the commit before. COMMIT names another.
bench-guard: setup
	$(BIN)/python -m benchmarks.guard $(COMMIT)

# The outputs of the documentation's notebook again.
notebook: setup
	$(BIN)/python -m website.notebook

# Lines of each package, imports across their borders, circles of imports.
house: setup
	$(BIN)/python -m benchmarks.house

# The server tests of vLLM and llama.cpp against live servers: fetched, not of this repository.
# FILES are parts of file names; OPTIONS such as --with-skipped go to the command.
peer-tests: setup
	$(BIN)/python -m benchmarks.peer_tests $(OPTIONS) $(FILES)

clean:
	rm -rf $(VENV) $(VENV)-docs build src/*.egg-info engine/src/moonpool_engine/engine/native/*.so
