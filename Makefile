# The two commands that matter: `make demo` and `make test`. Both make .venv on first use and leave it alone afterwards.
# Knobs: PYTHON=python3.12  TORCH=2.12.0  SYSTEM_TORCH=1|0  JOBS=3  ARGS="-k grpo" (pytest)
#        OMP_NUM_THREADS=2 (threads of each test process)
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo release test test-long test-scale test-resolution pytest lint format docs notebooks ui reference lock clean env env-test env-docs env-scale env-vllm
export PYTHON TORCH SYSTEM_TORCH

OMP_NUM_THREADS ?= 1
test test-long test-scale pytest: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
# hundreds of processes would compile everything again
test test-long test-scale pytest: export PYTHONDONTWRITEBYTECODE :=

PY := .venv/bin/python
# more processes than cores: many tests wait for a process that they started, or for its end
JOBS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); n=$$(( n + (n + 1) / 2 )); echo $$(( n > 8 ? 8 : n )))
ARGS ?=

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /  make \1\t/p' Makefile | expand -t 20

demo: env ## train a small model on the CPU and show what it learned
	@$(PY) -m reinforge demo

test: lint pytest ## ruff, mypy, then every test that is not long

test-long: env-scale ## the long tests only: before a release
	@echo "== pytest, long tests ($(JOBS) processes)"
	@HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
		$(PY) -m pytest -q -n $(JOBS) --dist worksteal -m long --ignore tests/scale $(ARGS)
	@HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
		$(PY) -m pytest -q -p no:hypothesispytest -n 2 --dist loadfile --no-loadscope-reorder -m long tests/scale --timeout 600 $(ARGS)

# A file to a process, in the order of their names: xdist would begin with those that have most tests, and end with the longest.
test-scale: env-scale ## several processes: FSDP2, DeepSpeed, Megatron, Ray, vLLM, Slurm (2 GB more to install)
	@echo "== pytest, tests/scale"
	@HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
		$(PY) -m pytest -q -p no:hypothesispytest -n 2 --dist loadfile --no-loadscope-reorder tests/scale --timeout 600 $(ARGS)

pytest: env-test
	@echo "== pytest ($(JOBS) processes)"
	@HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
		$(PY) -m pytest -q -n $(JOBS) --dist worksteal --ignore tests/scale $(ARGS)

test-resolution: env-test ## tests with the lowest versions of our dependencies, then with the newest (installs both)
	@tools/resolution.sh lowest $(ARGS)
	@tools/resolution.sh newest $(ARGS)

lint: env-test ## ruff and mypy only
	@echo "== ruff check";  $(PY) -m ruff check --output-format concise .
	@echo "== ruff format"; $(PY) -m ruff format --check --output-format concise . || { echo 'run: make format'; exit 1; }
	@echo "== mypy";        $(PY) -m mypy

format: env-test ## let ruff rewrite the files
	@$(PY) -m ruff check --fix-only -q . ; $(PY) -m ruff format .

reference: env ## write docs/reference/ from the schema and the rules, and the tables of docs/algorithms/, docs/data.md, docs/models.md, docs/hardware.md and docs/gallery.md
	@$(PY) tools/gen_reference.py
	@$(PY) tools/gen_algorithms.py
	@$(PY) tools/gen_formats.py
	@$(PY) tools/gen_models.py
	@$(PY) tools/gen_migrate.py
	@$(PY) tools/gen_hardware.py
	@$(PY) tools/gen_gallery.py
	@$(PY) tools/parity_table.py

notebooks: env-test ## run notebooks/*.py and write what they show into notebooks/*.ipynb
	@HF_HUB_OFFLINE=1 $(PY) tools/notebooks.py

# Node is needed here only: what it builds is committed and comes with the wheel.
ui: ## build the web app and the report's script from ui/src (needs node and npm)
	@cd ui && npm ci --omit-lockfile-registry-resolved --no-audit --no-fund && npm run -s check && npm run -s build

docs: env-docs reference ## build the site into site/
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict -q && echo "built site/index.html"

# TAG=v0.2.0: version, changelog, tag and commit must be those of a release
release: env-test ## build the archive and the wheel into dist/, and run the demo from the wheel in a new environment
	@$(PY) tools/release.py $(if $(TAG),--tag $(TAG)) $(ARGS)

# The extras that live in one environment. gem, verifiers, openenv, vllm and sglang pin other versions of the same things.
TOGETHER = tensorboard wandb mlflow trackio sweep gguf qlora serve ui structured tasks math lm-eval ray deepspeed megatron mcp textarena gymnasium docs test
lock: env-test ## pin everything in constraints.txt anew (newer versions: delete their lines first)
	@$(PY) -m pip install -q uv 2>/dev/null
	@$(PY) -m uv pip compile pyproject.toml $(TOGETHER:%=--extra %) --universal --python-version 3.11 --no-header --no-annotate -q -o constraints.txt
	@sed -i '/^nvidia-\|^cuda-/d' constraints.txt

clean: ## remove what the other targets made, .venv included
	@rm -rf .venv site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

env:
	@tools/env.sh runtime

env-test:
	@tools/env.sh test

env-scale:
	@tools/env.sh scale

env-vllm:
	@tools/env.sh vllm

env-docs:
	@tools/env.sh docs
