# `make` alone prints help. Every target creates the environment first if it is missing.
#
# PYTHON on the command line (`make test PYTHON=python3`) means: this interpreter with its packages as they are,
# no environment, no network.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help env train test lint chaos long-job flat nvshmem aot bench bench-gpu bench-cluster bench-placement bench-report reproduce peer-suites same-numbers docs dist dist-files clean

ARGS ?=
REPOSITORY ?=

# A machine has a GPU where nvidia-smi lists one. The pins follow from it, unless CONSTRAINTS on the command line names
# others (constraints/oldest.txt, constraints/newest.txt), which have an environment of their own: .venv-oldest.
DEVICE := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo cuda || echo cpu)
CONSTRAINTS := constraints/$(DEVICE).txt
PINS := $(basename $(notdir $(CONSTRAINTS)))
VENV := .venv$(if $(filter-out cpu cuda,$(PINS)),-$(PINS))
STAMP := $(VENV)/.installed-$(PINS)

ifeq ($(origin PYTHON),command line)
PY := $(PYTHON)
READY :=
NVSHMEM_INSTALL :=
RUN_ENV := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"
else
PY := $(VENV)/bin/python
READY := $(STAMP)
NVSHMEM_INSTALL := --install $(CONSTRAINTS)
RUN_ENV :=
endif

# Four ranks share the cores of a small machine, and so do the processes that tests start: one thread each,
# unless the caller says otherwise.
ONE_THREAD := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}

# Four CPU ranks stand for two nodes of two: experts across the nodes, tensors split inside each.
CPU_RANKS := 4
CPU_LAYOUT := --ranks-per-node 2 --ep 2 --esp 2 --mp 2

help:
	@echo 'fusedmoe: mixture-of-experts layers that overlap communication with computation'
	@echo
	@echo '  make train    train a small GPT: 4 CPU ranks as 2 nodes of 2, or up to 4 GPUs'
	@echo '                make train ARGS="--steps 20 --run-dir runs/try"    make train ARGS=--help'
	@echo '  make test     run the tests except slow ones      make test ARGS="-k gates"    ARGS="-m slow"'
	@echo '                with oldest or newest versions      make test CONSTRAINTS=constraints/newest.txt'
	@echo '  make lint     ruff, mypy, import-linter and the rules of tests/house.py'
	@echo '  make chaos    inject random faults from a seed into jobs of 2 and 4 ranks    make chaos ARGS=--help'
	@echo '  make long-job compare the losses of a job with faults and a job without    make long-job ARGS=--help'
	@echo '  make flat     look for leaks over 2,000 steps, 200 topologies and 50 checkpoints    make flat ARGS=--help'
	@echo '  make nvshmem  install NVSHMEM and build the optional transport csrc/nvshmem (no GPU needed)'
	@echo '  make aot      compile and check all kernels for GPUs, without a GPU    make aot TRITON=3.6.0'
	@echo '                and check each tile of the grouped products in Triton'\''s interpreter'
	@echo '  make bench    run the benchmarks'
	@echo '  make bench-gpu     benchmark one GPU in nine minutes: correctness, then kernels and passes against their limits'
	@echo '                     make bench-gpu PYTHON=python3    ARGS="--step 1" (to 4: for a new GPU)    ARGS=--help'
	@echo '                     make bench-gpu ARGS=--rehearse   the same code without a GPU    TRITON=3.6.0'
	@echo '  make bench-cluster measure every schedule on two emulated nodes and compare it with its prediction (root)'
	@echo '                     make bench-cluster ARGS="--settings layer computed:job --minutes 20"    ARGS=--show    ARGS=--help'
	@echo '  make bench-placement  simulate expert placements on synthetic loads'
	@echo '  make bench-report  print the latest GPU results as tables and a picture    make bench-report ARGS=--help'
	@echo '  make reproduce  reproduce the tables of the four papers, and predict published steps (ten minutes on two cores)'
	@echo '                     make reproduce ARGS="--only fsmoe-table5"    ARGS=--help'
	@echo '  make peer-suites  run the tests of transformers, peft and others with and without fusedmoe'\''s experts'
	@echo '                     make peer-suites ARGS="peft --minutes 10"    ARGS=--help'
	@echo '  make same-numbers AGAINST=COMMIT  compare results of the working tree with those of COMMIT, bitwise'
	@echo '                     make same-numbers AGAINST=main ARGS="--only fssdp hf"    ARGS=--list    ARGS=--help'
	@echo '  make docs     build the documentation and API reference into build/docs'
	@echo '  make dist     build, check and test wheel and sdist in dist/    make dist REPOSITORY=https://...'
	@echo '  make env      create the environment .venv (other targets do it when needed)'
	@echo '  make clean    remove the environment, caches and build output, but not runs/'
	@echo
	@echo '  This machine: $(DEVICE), pins in $(CONSTRAINTS).'
	@echo '  make test PYTHON=python3 uses that interpreter and its packages; nothing is installed.'

env: $(READY)

$(STAMP): pyproject.toml $(CONSTRAINTS) constraints/common.txt constraints/titan.txt constraints/megatron.txt
	@found=; for p in python3 python3.12 python3.11 python3.13 python3.14; do \
	    if $$p -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        found=$$p; break; fi; done; \
	if [ -z "$$found" ]; then \
	    echo 'fusedmoe needs Python 3.11 or newer with its venv module (on Debian: python3-venv);' >&2; \
	    echo "python3 here is: $$(python3 --version 2>&1)" >&2; exit 1; fi; \
	echo "Making $(VENV) with $$found and $(CONSTRAINTS): about a minute and 2 GB (for CUDA several minutes and 8 GB)."; \
	rm -f $(VENV)/.installed-*; \
	$$found -m venv $(VENV)
	@quiet=; [ -t 1 ] || quiet=--quiet; \
	$(VENV)/bin/python -m pip --disable-pip-version-check install $$quiet -c $(CONSTRAINTS) -e '.[dev]'
	@for other in titan megatron; do \
	    $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r constraints/$$other.txt \
	        || echo "Note: not all of constraints/$$other.txt from this index; what tests it is skipped." >&2; done
	@if [ $(PINS) = cpu ] && $(VENV)/bin/python -m pip list 2>/dev/null | grep -q '^nvidia-cublas'; then \
	    echo 'Note: pip found only a CUDA build of torch: it works here, at several GB. For the small one give pip' >&2; \
	    echo "PyTorch's index of CPU wheels (PIP_EXTRA_INDEX_URL=...) and start again: make clean train." >&2; fi
	@touch $@

# The launcher is torchrun (torch.distributed.run) itself. `exec` leaves no shell between make and it: Ctrl-C reaches
# torchrun, which passes it on to the ranks and waits until they have saved; make waits for torchrun.
train: $(READY)
	@gpus=0; \
	[ $(DEVICE) = cpu ] || gpus=$$($(PY) -c 'import torch; print(min(4, torch.cuda.device_count()))'); \
	if [ "$$gpus" -gt 0 ]; then set -- --nproc-per-node $$gpus -m fusedmoe train; \
	else set -- --nproc-per-node $(CPU_RANKS) -m fusedmoe train $(CPU_LAYOUT); fi; \
	exec env $(RUN_ENV) $(ONE_THREAD) $(PY) -m torch.distributed.run --standalone "$$@" $(ARGS)

test: $(READY)
	@exec env $(RUN_ENV) $(ONE_THREAD) $(PY) -m pytest $(ARGS)

# All three report, also when an earlier one has found something.
lint: $(READY)
	@$(if $(RUN_ENV),export $(RUN_ENV);) bad=0; \
	$(PY) -m ruff check . || bad=1; \
	$(PY) -m ruff format --check --quiet . || bad=1; \
	$(PY) -m mypy || bad=1; \
	$(PY) -m tests.house || bad=1; \
	$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' || bad=1; \
	exit $$bad

# An hour of it is a record for bench/results/chaos.json; a machine that does nothing else gives times that mean something.
chaos: $(READY)
	@exec env $(RUN_ENV) $(ONE_THREAD) $(PY) -m tests.chaos $(ARGS)

long-job: $(READY)
	@exec env $(RUN_ENV) $(ONE_THREAD) $(PY) -m tests.chaos.long_jobs $(ARGS)

flat: $(READY)
	@exec env $(RUN_ENV) $(ONE_THREAD) $(PY) -m tests.chaos.flatness $(ARGS)

# Into .venv, and beside the module that loads it; it says what is missing.
nvshmem: $(READY)
	@exec env $(RUN_ENV) $(PY) csrc/nvshmem/build.py $(NVSHMEM_INSTALL) $(ARGS)

# With another Triton than the environment's, which goes to a folder of its own; and with it the NumPy that the
# interpreters of Triton before 3.7 need.
ifdef TRITON
OTHER := build/triton-$(TRITON)
TRITON_ENV := PYTHONPATH="$(CURDIR)/$(OTHER):$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"
else
OTHER :=
TRITON_ENV := $(RUN_ENV)
endif

aot: $(READY) $(OTHER)
	@exec env $(TRITON_ENV) $(ONE_THREAD) $(PY) -m bench.aot $(ARGS)

build/triton-%:
	@$(PY) -m pip --disable-pip-version-check install --quiet --no-deps --target $@.part triton==$* numpy==2.3.5 && mv $@.part $@

# A benchmark sets its threads itself, and may take longer than a test.
bench: $(READY)
	@exec env $(RUN_ENV) $(PY) -m pytest --timeout 1800 -o faulthandler_timeout=2000 bench $(ARGS)

# Tests first: where the kernels are wrong nothing is timed. Results under bench/results/ as they come, and a report.
bench-gpu: $(READY) $(OTHER)
	@exec env $(TRITON_ENV) $(PY) -m bench.gpu $(ARGS)

# Two nodes of one machine, as root; elsewhere it says what is missing.
bench-cluster: $(READY)
	@exec env $(RUN_ENV) $(PY) -m bench.cluster $(ARGS)

bench-placement: $(READY)
	@exec env $(RUN_ENV) $(PY) -m bench.placement $(ARGS)

bench-report: $(READY)
	@exec env $(RUN_ENV) $(PY) -m bench.report $(ARGS)

# In simulation, but for two nodes of this machine, which need root; elsewhere that is left out with a word.
reproduce: $(READY)
	@exec env $(RUN_ENV) $(ONE_THREAD) $(PY) -m bench.reproduce $(ARGS)

# Against the installed versions; test files come from source distributions or a checkout.
peer-suites: $(READY)
	@exec env $(RUN_ENV) $(ONE_THREAD) $(PY) -m bench.peer_suites $(ARGS)

# The other version in a temporary git worktree, with the packages of this environment.
same-numbers: $(READY)
	@exec env $(RUN_ENV) $(ONE_THREAD) $(PY) -m bench.same_numbers $(AGAINST) $(ARGS)

# What a target needs beyond the environment, from the same pins.
$(VENV)/.extra-%: $(READY)
	@$(PY) -m pip --disable-pip-version-check install --quiet -c $(CONSTRAINTS) -e '.[$*]' && touch $@

# A warning is an error: a link that leads nowhere, a page that nobody links, a name that is not there.
docs: $(VENV)/.extra-docs
	@exec env $(RUN_ENV) NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict --site-dir build/docs $(ARGS)

# The repository's address: that of pyproject.toml, or REPOSITORY. While neither is set, nothing is built.
# The address first: an environment takes minutes.
dist:
	@! python3 -c "import tomllib" 2>/dev/null || python3 .ci/release.py --check $(REPOSITORY)
	@$(MAKE) --no-print-directory dist-files

dist-files: $(VENV)/.extra-dist
	@exec env $(RUN_ENV) PYTHON=$(PY) CONSTRAINTS=$(CONSTRAINTS) REPOSITORY=$(REPOSITORY) .ci/dist

clean:
	rm -rf .venv .venv-* build dist *.egg-info fusedmoe/comm/one_sided/*.so .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .benchmarks .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
