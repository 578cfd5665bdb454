# One .venv for everything. Every target that needs it sets it up first when it is missing or its pins have changed.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:
.PHONY: help setup demo test test-full test-layouts test-image lint format lock lock-image check-image-pins clean

LOCK := requirements/cpu.txt
BIN := .venv/bin
# What was installed, by content: a fresh clone has arbitrary file times.
STAMP := .venv/installed
WANTED = $$(cat $(LOCK) pyproject.toml | sha256sum | cut -d' ' -f1)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile
TEST := $(BIN)/python -m pytest
IMAGE_MEGATRON := $(CURDIR)/.venv/image-megatron
QUICKSTART := runs/quickstart

help: ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 25

setup: ## Make or update .venv (Python 3.11 or 3.12) with the pinned packages of the CPU build.
	@if [[ $$(cat $(STAMP) 2>/dev/null) == "$(WANTED)" ]]; then exit 0; fi
	if [[ ! -x $(BIN)/python ]]; then
	  python=
	  for name in python3.11 python3.12 python3; do
	    if "$$name" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
	      python=$$name; break
	    fi
	  done
	  if [[ -z $$python ]]; then
	    echo "setup: needs Python 3.11 or 3.12 with venv on PATH, found neither" >&2; exit 1
	  fi
	  echo "setup: .venv with $$("$$python" --version)" >&2
	  "$$python" -m venv .venv
	fi
	rm -f $(STAMP)
	echo "setup: torch" >&2
	$(PIP) "$$(grep '^torch==' $(LOCK))"
	echo "setup: $$(grep -c == $(LOCK)) pinned packages" >&2
	$(PIP) --no-deps -r $(LOCK)
	$(PIP) --no-deps --no-build-isolation -e .
	# beside a CPU torch these do not import and take transformers with them
	$(BIN)/python -m pip --quiet uninstall -y torchvision torchaudio torchcodec 2>/dev/null
	# pip would compile on one core; some packages carry templates that are no valid Python
	$(BIN)/python -m compileall -q -j 0 .venv/lib > /dev/null 2>&1 || true
	echo "$(WANTED)" > $(STAMP)

demo: setup ## Train the quickstart agent; the last line is a JSON summary.
	@$(BIN)/python -m examples.quickstart.prepare
	$(BIN)/megatron-tree train examples/quickstart/config.yaml run.dir=$(QUICKSTART)-$$(date +%Y%m%d-%H%M%S)

test: setup ## Run the tests, but for the long ones.
	@$(TEST) -m "not full"

test-full: setup ## Run every test; takes long.
	@$(TEST)

test-layouts: setup ## Prove that gradients do not depend on the layout, over all layouts; prints the table.
	@$(TEST) tests/dist/test_layout_invariance.py

test-image: setup ## Run the tests of ranks on the Megatron-Core of the GPU image, on a CPU.
	@$(PIP) --target=$(IMAGE_MEGATRON) --upgrade --no-deps --ignore-requires-python --only-binary=:all: \
	  --python-version=3.12 --platform=manylinux_2_28_x86_64 "$$(grep '^megatron-core==' requirements/gpu.txt)"
	PYTHONPATH=$(IMAGE_MEGATRON) $(TEST) -m "not full" tests/dist

lint: setup ## Check style, formatting, import walls and types; scripts, image and manifests too.
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile
	$(BIN)/shellcheck .ci/run examples/launch/*.sh examples/launch/*/*.sh examples/launch/*/*.sbatch
	$(BIN)/yamllint --strict .yamllint examples

format: setup ## Fix what ruff can fix.
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: ## Write requirements/cpu.txt from .venv, after a pin in pyproject.toml was changed and installed.
	@$(BIN)/python tools/lock.py

check-image-pins: setup ## Check that the GPU image's wheels exist for Python 3.12 and fit each other; takes minutes.
	@$(BIN)/python -m tools.image_pins

lock-image: setup ## Resolve the GPU image's wheels anew into requirements/gpu.txt; takes minutes.
	@$(BIN)/python -m tools.image_pins --write

clean: ## Remove .venv, caches and what prepare made; runs/ stays.
	@rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache *.egg-info examples/*/generated
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
