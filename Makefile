# One command for each thing a reader wants to do; `make help` lists them.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
CONFIG := configs/quickstart.yaml
DATA := quickstart_data
PROMPT := def read_file(path):
# As it was given, which `value` keeps, and in the environment of the recipe, in whose text the shell would rewrite it.
override PROMPT := $(value PROMPT)
export PROMPT
SHELL := /bin/bash

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev data pretrain generate evaluate tensorboard test-fast test test-all lint bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 16

# Stamps, so that a repeated command installs only what changed.
$(VENV)/.installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --quiet --progress-bar off -r requirements.txt
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --editable .
	touch $@

$(VENV)/.installed-dev: requirements.txt requirements-dev.txt requirements-eval.txt $(VENV)/.installed
	$(BIN)/pip install --disable-pip-version-check --quiet --progress-bar off -r requirements-dev.txt
	touch $@

setup: $(VENV)/.installed ## Create .venv and install what training needs

setup-dev: $(VENV)/.installed-dev ## The same, and what tests and lint need

$(DATA)/tokenizer/tokenizer.json: | $(VENV)/.installed
	$(BIN)/python tools/train_tokenizer.py python-stdlib --vocab-size 4096 --out $(DATA)/tokenizer

$(DATA)/validation/dataset.json: $(DATA)/tokenizer/tokenizer.json
	$(BIN)/python tools/build_shards.py python-stdlib --tokenizer $(DATA)/tokenizer --out $(DATA) --shards 4 --validation-fraction 0.03 --workers 2

data: $(DATA)/validation/dataset.json ## Quickstart tokenizer and shards: the Python standard library's source

pretrain: setup data ## Train the quickstart model (minutes on two CPU cores); repeat to resume
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(nproc)} $(BIN)/python pretrain_fbt.py --config $(CONFIG)

generate: setup ## Continue a line of code with the quickstart model, in the three decode modes side by side
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(nproc)} $(BIN)/python tools/generate.py runs/quickstart --prompt "$$PROMPT" --max-tokens 60 --repetition-penalty 1.2 --compare

evaluate: setup ## Loss and bits per byte of the quickstart model, after each pass and in each decode mode
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(nproc)} $(BIN)/python tools/evaluate.py runs/quickstart

tensorboard: setup ## Serve the curves of the runs folder
	$(BIN)/tensorboard --logdir runs

test-fast: setup-dev ## Unit tests and one 2-rank smoke run (under 4 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "smoke or not (slow or training or distributed)"

test: setup-dev ## The tests that CI runs (about 20 minutes on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow"

test-all: setup-dev ## Everything, full matrices and soaks included (75 minutes on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: setup-dev ## Formatting, style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup-dev ## Side-by-side measurements, one table each
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python -W ignore $$script || exit 1; done

clean: ## Remove quickstart data and runs (not the environment)
	rm -rf $(DATA) runs/quickstart
