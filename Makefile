# Each target does its own set-up: it needs Python 3.11 or later, make and a network, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MLFLOW_PORT ?= 5000
DOCKER ?= docker
# A file's tests stay together: they share what is slow to set up. In their own order, the long files come early.
# Bytecode is kept: the tests start many processes that import the package.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help install install-dev demo test test-all test-gpu coverage bench bench-gpu lint audit format ui image image-cpu clean

help:           ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 14

$(VENV)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "error: $(PYTHON) is older than Python 3.11; give another: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/installed: $(VENV)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/installed

install: $(VENV)/installed            ## the package into .venv
install-dev: $(VENV)/installed-dev    ## the package and its tools into .venv

demo: install                         ## pretrain and probe on digits, in one table
	$(BIN)/python -m jobs.ablate experiment=digits seeds=[0,1,2] runtime=local

test: install-dev                     ## the fast tests
	$(PYTEST) -m "not slow and not gpu"

test-all: install-dev                 ## all tests that a CPU can run
	$(BIN)/python -m pytest -m "not gpu"

# Needs no more than bench-gpu, and pytest. Without .venv, PYTHON takes what a GPU machine has.
test-gpu:                             ## the tests that need a GPU
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m pytest -m gpu

coverage: install-dev                 ## the fast tests, with the statement coverage of the core
	$(PYTEST) -m "not slow and not gpu" --cov --cov-report=term-missing

bench: install-dev                    ## speed and memory beside the peers, on the CPU, in under ten minutes
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m benchmarks

# Needs neither Ray, MLflow nor Hydra. Without .venv, PYTHON takes what a GPU machine has.
bench-gpu:                            ## the same on a GPU, and the paper's runs: make bench-gpu DATA=<images> OUTPUT=<folder>
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.campaign --data $(DATA) --output $(or $(OUTPUT),runs/campaign)

lint: install-dev                     ## ruff, pyright, import-linter
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

audit: install-dev                    ## known weaknesses of the pinned dependencies; asks PyPI
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip-audit>=2.9,<3'
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip

format: install-dev                   ## mends what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

ui: install                           ## the MLflow UI on http://127.0.0.1:5000
	$(BIN)/mlflow ui --backend-store-uri sqlite:///$(CURDIR)/runs/mlflow.db --port $(MLFLOW_PORT)

image:                                ## the image ssl-sec:<version> with CUDA, by Docker
	$(DOCKER) build --build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD) --tag ssl-sec:$(VERSION) .

image-cpu:                            ## the same without CUDA, ssl-sec:<version>-cpu
	$(DOCKER) build --build-arg VARIANT=cpu --build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD) \
	    --tag ssl-sec:$(VERSION)-cpu .

clean:                                ## removes caches and .venv, keeps runs
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .coverage .import_linter_cache build dist *.egg-info
