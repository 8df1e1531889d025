# Both `make demo` and `make test` work on a fresh clone: they create $(VENV) and install what is pinned first.
# Nothing is installed again, and no network is needed, until pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS ?= .venv-peers
PEERS_STAMP := $(PEERS)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test chaos lint bench steps autotune clean

help:  ## Show this list
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "raydist needs Python 3.11 or newer, got `$(PYTHON) --version 2>&1`. Try: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,examples,images]'
	@touch $@

venv: $(STAMP)  ## Create the virtual environment and install the pinned versions

demo: $(STAMP)  ## Train on real images on two replicas of a local Ray
	$(BIN)/python examples/digits_fit.py --strategy mirrored --replicas 2

test: $(STAMP)  ## Run every test (PYTEST_ARGS="-k shuffle" for some)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

chaos: $(STAMP)  ## For long, what `make test` does a little of: kill workers, damage files, open and close strategies
	RAYDIST_CHAOS=1 $(BIN)/python -m pytest tests/chaos $(PYTEST_ARGS)

lint: $(STAMP)  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(PEERS_STAMP): benchmarks/requirements-peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/requirements-peers.txt
	@touch $@

bench: $(STAMP) $(PEERS_STAMP)  ## Measure pipelines beside tf.data, DataLoader, Ray Data, grain and SPDL (BENCH_ARGS="--smoke")
	$(BIN)/python -m benchmarks.pipelines --peer-python $(PEERS)/bin/python $(BENCH_ARGS)

steps: $(STAMP) $(PEERS_STAMP)  ## Measure training steps beside DDP, Ray Train and TensorFlow (BENCH_ARGS="--smoke")
	$(BIN)/python -m benchmarks.steps --peer-python $(PEERS)/bin/python $(BENCH_ARGS)

autotune: $(STAMP)  ## Compare light pipelines with and without AUTOTUNE (BENCH_ARGS="--smoke")
	$(BIN)/python -m benchmarks.autotune $(BENCH_ARGS)

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) $(PEERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
