# Each target installs what it needs; required are Python 3.11 or later, make and a network.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MLFLOW_PORT ?= 5000
DOCKER ?= docker
# All tests of a file run in one process, since they share slow set-up. The given order starts the long files early.
# Bytecode is written, since the tests start many processes that import the package.
# A test that takes ten minutes hangs; a thread ends it, as it may be C code that waits.
TIMEOUT := --timeout 600 --timeout-method thread
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(TIMEOUT)
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
REVISION = $(shell git describe --always --dirty --exclude='*' --abbrev=40)

.DEFAULT_GOAL := help
.PHONY: help install install-dev demo test test-all test-gpu coverage bench bench-gpu lint audit format docs ui image \
    image-cpu clean

help:           ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 14

$(VENV)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "error: $(PYTHON) is older than Python 3.11; choose another: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/installed: $(VENV)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/installed

install: $(VENV)/installed            ## install the package in .venv
install-dev: $(VENV)/installed-dev    ## install the package and its tools in .venv

demo: install                         ## pretrain and probe on digits, and print a table
	$(BIN)/python -m jobs.ablate experiment=digits seeds=[0,1,2] runtime=local

test: install-dev                     ## run the fast tests
	$(PYTEST) -m "not slow and not gpu"

test-all: install-dev                 ## run all tests that a CPU can run
	$(BIN)/python -m pytest $(TIMEOUT) -m "not gpu"

# Needs the packages of bench-gpu and pytest. Without .venv, it uses PYTHON and its packages.
test-gpu:                             ## run the tests that need a GPU
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m pytest -m gpu

coverage: install-dev                 ## run the fast tests with statement coverage
	$(PYTEST) -m "not slow and not gpu" --cov --cov-report=term-missing

bench: install-dev                    ## measure speed and memory and compare with other libraries, on the CPU in under ten minutes
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m benchmarks

# Does not need Ray, MLflow or Hydra. Without .venv, it uses PYTHON and its packages.
bench-gpu:                            ## all benchmarks on a GPU and the paper's runs: make bench-gpu DATA=<images> OUTPUT=<folder>
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.campaign --data $(DATA) --output $(or $(OUTPUT),runs/campaign)

lint: install-dev                     ## run ruff, pyright and import-linter
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

audit: install-dev                    ## look up known vulnerabilities of the pinned dependencies at PyPI
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip-audit>=2.9,<3'
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip

format: install-dev                   ## format the code and apply ruff's fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: install-dev                     ## build the documentation into site/; fails on a broken link
	$(BIN)/python -m docs.tables
	$(BIN)/zensical build --clean --strict

ui: install                           ## start the MLflow UI on http://127.0.0.1:5000
	$(BIN)/mlflow ui --backend-store-uri "sqlite:///$(CURDIR)/runs/mlflow.db" --port $(MLFLOW_PORT)

image:                                ## build the Docker image ssl-sec:<version> with CUDA
	$(DOCKER) build --build-arg VARIANT=cuda --build-arg VERSION=$(VERSION) --build-arg REVISION=$(REVISION) \
	    --tag ssl-sec:$(VERSION) .

image-cpu:                            ## build the same image without CUDA, ssl-sec:<version>-cpu
	$(DOCKER) build --build-arg VARIANT=cpu --build-arg VERSION=$(VERSION) --build-arg REVISION=$(REVISION) \
	    --tag ssl-sec:$(VERSION)-cpu .

clean:                                ## remove caches and .venv, keep runs
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .coverage .import_linter_cache .cache site build dist *.egg-info
