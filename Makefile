# `make demo` and `make test` need Linux and Python 3.11+, and nothing else; everything goes into $(VENV), in the versions
# of constraints.txt. `make CONSTRAINTS= demo` lets pip choose them, for a GPU's torch.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
# A stamp for each CONSTRAINTS: with others than last time the environment is made anew.
INSTALLED := $(VENV)/.installed$(subst /,_,$(patsubst %,-%,$(filter-out constraints.txt,$(or $(CONSTRAINTS),latest))))
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo demo-distill test test-all fuzz lint bench test-matrix test-frameworks clean

$(INSTALLED): setup.py pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else f"Python 3.11 or newer is needed, this is {sys.version}")'
	$(PYTHON) -c 'import sys; sys.exit(None if sys.platform == "linux" else "Linux is needed: Triton has no wheels for $(shell uname -s)")'
	@echo "Installing torch, Triton, megatron-core and tools into $(VENV): 2 GB with a CPU build of torch; the CUDA libraries of PyPI's add several GB."
	$(PYTHON) -m venv $(if $(filter-out $(INSTALLED),$(wildcard $(VENV)/.installed*)),--clear) $(VENV)
	$(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable ".[dev]"
	touch $@

define HELP
make demo             train Megatron GPTs on two ranks, flag off and on: three minutes on two cores
make demo-distill     distil a GPT into a smaller one with linear_jsd
make test             lint, types, and every test that a CPU can run
make test-all         the slow tests too, before a release
make lint             ruff and mypy
make fuzz             random calls against fp64: a quarter of an hour on two cores
make test-matrix      tests with other versions of megatron-core, torch and Triton: gigabytes
make test-frameworks  other projects' code with the plugins and lines of docs/integrations.md
make bench            time and memory of heads on this machine
make clean            remove $(VENV) and demo_out

demo and test need Linux, Python 3.11 and make. The first run installs into $(VENV): 2 GB with a CPU build of torch,
several GB more with the CUDA libraries of PyPI's build.
endef
export HELP

help:
	@echo "$$HELP"

demo: $(INSTALLED)
	$(BIN)/python -m scripts.demo

demo-distill: $(INSTALLED)
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 -m scripts.train_distill --tp 2 --sequence-parallel \
		--device $$($(BIN)/python -c 'import torch; print("cuda" if torch.cuda.device_count() > 1 else "cpu")')

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two processes, a test at a time: Triton's interpreter is Python, one thread of it. On a machine with GPUs, run `pytest`
# alone.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist load --maxschedchunk 1

test: lint
	$(PYTEST) -m "not slow"

# Before a release: also the cases whose like the others hold already.
test-all: lint
	$(PYTEST)

# A search for wrong numbers, a quarter of an hour on two cores.
FUZZ_RANKS ?= 3
fuzz: $(INSTALLED)
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(FUZZ_RANKS) torchrun_tests/run_fuzz.py --device cpu

# megatron-core beside the pinned one, unpacked for PYTHONPATH: pip refuses 0.17 and newer on Python 3.11, which runs them.
MEGATRON_VERSIONS := 0.14.0 0.19.2
MEGATRON := $(VENV)/megatron
MATRIX_TESTS := tests/megatron_integration
MATRIX_PROGRAM := -m torch.distributed.run --standalone --nproc-per-node 4 torchrun_tests/run_megatron.py --device cpu --combinations all

$(MEGATRON)/%/megatron: $(INSTALLED)
	$(BIN)/python -m pip download --quiet --no-deps --python-version 3.12 --only-binary=:all: \
		--dest $(MEGATRON)/wheels megatron-core==$*
	$(BIN)/python -m zipfile -e $(MEGATRON)/wheels/megatron_core-$*-*.whl $(@D)

# The newest torch and Triton, and those of GPU machines: the operations' tests and the compiled calls', without Megatron.
# Each environment is some gigabytes.
TORCH_AND_TRITON := 2.15.0-3.9.0 2.11.0-3.6.0
TORCH := $(VENV)/torch
TORCH_TESTS := $(addprefix tests/test_,$(addsuffix .py,autograd cases compiled compiled_ahead cross_entropy \
	cuda_graphs every_operation jsd logits_cache precision skipped_rows support_logprobs token_loss topk))

$(TORCH)/%/.installed:
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet torch==$(firstword $(subst -, ,$*)) triton==$(lastword $(subst -, ,$*)) \
		"numpy<2.4" hypothesis pytest pytest-xdist
	touch $@

test-matrix: $(INSTALLED) $(MEGATRON_VERSIONS:%=$(MEGATRON)/%/megatron) $(TORCH_AND_TRITON:%=$(TORCH)/%/.installed)
	set -e; for path in "" $(MEGATRON_VERSIONS:%=$(MEGATRON)/%); do \
		PYTHONPATH=$$path $(BIN)/python -c 'import megatron.core; print("megatron-core", megatron.core.__version__)'; \
		PYTHONPATH=$$path $(BIN)/python -m pytest $(MATRIX_TESTS); \
		PYTHONPATH=$$path $(BIN)/python $(MATRIX_PROGRAM); \
	done; \
	for versions in $(TORCH_AND_TRITON); do \
		echo "torch-triton $$versions"; \
		$(TORCH)/$$versions/bin/python -m pytest --numprocesses 2 --dist load --maxschedchunk 1 $(TORCH_TESTS); \
	done

# Other projects' own code with what docs/integrations.md shows: of released wheels, and of checkouts whose paths are given,
# as in `make test-frameworks SLIME=../slime`. What is skipped says what it needs.
FRAMEWORKS := $(VENV)/frameworks
FRAMEWORK_WHEELS := $(addprefix verl-,0.8.0 0.9.0 0.9.1) $(addprefix megatron_bridge-,0.3.1 0.4.2 0.5.1 0.6.0 0.6.2) \
	areal-1.0.4 ms_swift-4.6.0 mcore_bridge-1.6.5 skyrl-0.4.0

$(FRAMEWORKS)/%: $(INSTALLED)
	$(BIN)/python -m pip download --quiet --no-deps --python-version 3.12 --only-binary=:all: \
		--dest $(FRAMEWORKS)/wheels $(subst -,==,$*)
	$(BIN)/python -m zipfile -e $(FRAMEWORKS)/wheels/$*-*.whl $@

# What verl's worker imports and computes with; the rest has stand-ins.
VERL_NEEDS := antlr4-python3-runtime==4.9.3 cloudpickle codetiming filelock fsspec huggingface_hub importlib_metadata \
	omegaconf==2.3.0 orjson packaging pyvers pyyaml regex requests safetensors tensordict tokenizers tqdm transformers zipp

$(FRAMEWORKS)/of_verl: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --target $@ $(VERL_NEEDS)

test-frameworks: $(INSTALLED) $(MEGATRON_VERSIONS:%=$(MEGATRON)/%/megatron) $(FRAMEWORK_WHEELS:%=$(FRAMEWORKS)/%) $(FRAMEWORKS)/of_verl
	FRAMEWORKS=$(FRAMEWORKS) MEGATRON=$(MEGATRON) $(BIN)/python -m pytest -rs tests/frameworks

bench: $(INSTALLED)
	$(BIN)/python -m benchmark.run head

clean:
	rm -rf $(VENV) demo_out
