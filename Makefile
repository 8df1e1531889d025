# Both `make demo` and `make test` work on a fresh clone: they create $(VENV) and install what is pinned first.
# Nothing is installed again, and no network is needed, until pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS ?= .venv-peers
TEST_PROCESSES ?= 2
PEERS_STAMP := $(PEERS)/.installed
XLA ?= .venv-xla
XLA_STAMP := $(XLA)/.installed
OLDEST ?= .venv-oldest
OLDEST_PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python) python3.12)
OLDEST_STAMP := $(OLDEST)/.installed
HUB ?= .venv-hub
HUB_STAMP := $(HUB)/.installed
TRACKERS ?= .venv-trackers
TRACKERS_STAMP := $(TRACKERS)/.installed
FORESTS ?= .venv-xgboost
FORESTS_STAMP := $(FORESTS)/.installed
OLDEST_TESTS := tests/collectives/test_contract.py tests/collectives/reducer tests/mirroring tests/pickling \
	tests/parameter_servers tests/checkpoints/test_checkpoint.py tests/strategies/test_contract.py
HUB_PACKAGES := transformers peft datasets av timm torchvision diffusers torch_geometric lightning
# The newest 4.x of transformers, and the older versions of two packages that it needs. datasets needs a newer huggingface_hub.
TRANSFORMERS_4 := transformers==4.57.6 huggingface_hub==0.36.2 tokenizers==0.22.2

.DEFAULT_GOAL := help
.PHONY: help venv demo docs test test-long test-autoscaler test-xla test-oldest test-hub test-trackers test-xgboost chaos lint bench steps asynchronous checkpoints scaling autotune summaries failures sharded serving clean test-gpu test-gpu-multi

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "raydist needs Python 3.11 or newer, got `$(PYTHON) --version 2>&1`. Try: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,examples,images]'
	@touch $@

venv: $(STAMP)  ## Create the virtual environment and install the pinned versions

demo: $(STAMP)  ## Train on real images on two replicas of a local Ray
	$(BIN)/python examples/digits_fit.py --strategy mirrored --replicas 2

docs: $(STAMP)  ## Build the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# A process that waits in C++ does not hear the limit of a test: it writes its stacks and ends, and another goes on.
test: $(STAMP)  ## Run every test (PYTEST_ARGS="-k shuffle" for some)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder \
		-o faulthandler_timeout=400 -o faulthandler_exit_on_timeout=true $(PYTEST_ARGS)

GPU_PYTHON ?= $(BIN)/python
# On a machine with a GPU and a CUDA build of PyTorch; GPU_PYTHON names an interpreter that has both.
test-gpu:  ## Run the tests that need a GPU, and compare steps with a bare loop
	$(GPU_PYTHON) -m pytest -m gpu $(PYTEST_ARGS)
	$(GPU_PYTHON) -m benchmarks.gpu $(BENCH_ARGS)

test-gpu-multi:  ## The same on all GPUs of a machine with two or more: contract, exactness, benchmarks
	$(GPU_PYTHON) -m pytest tests/collectives/test_contract.py tests/strategies/test_gpus.py -k "nccl or gpu" $(PYTEST_ARGS)
	$(GPU_PYTHON) -m benchmarks.gpu --devices $$($(GPU_PYTHON) -c 'import torch; print(torch.cuda.device_count())') $(BENCH_ARGS)

$(XLA_STAMP): pyproject.toml constraints-xla.txt
	$(PYTHON) -m venv $(XLA)
	$(XLA)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-xla.txt -e '.[dev]' torch_xla
	@touch $@

# One process for all: the first that counts XLA's CPU devices fixes their number. 7 GB are installed.
test-xla: $(XLA_STAMP)  ## Train through TPUStrategy by torch_xla itself, on XLA's CPU devices
	PJRT_DEVICE=CPU CPU_NUM_DEVICES=3 XLA_THREAD_POOL_SIZE=16 $(XLA)/bin/python -m pytest \
		tests/collectives/test_contract.py tests/collectives/xla tests/strategies/test_tpu.py -k "xla or tpu" $(PYTEST_ARGS)

$(OLDEST_STAMP): pyproject.toml constraints-oldest.txt
	$(OLDEST_PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e '.[dev,images,examples]'
	@touch $@

# The oldest protobuf warns of itself on Python 3.12, torch 2.11 of sparse tensors however they are made. 6 GB are installed:
# torch 2.11 brings CUDA.
OLDEST_WARNINGS := -W "ignore:Type google:DeprecationWarning" -W "ignore:Sparse invariant checks:UserWarning"

test-oldest: $(OLDEST_STAMP)  ## A part of the tests with the oldest versions that pyproject.toml admits, on Python 3.12
	PYTHONWARNINGS="ignore:Type google:DeprecationWarning" $(OLDEST)/bin/python -m pytest $(OLDEST_WARNINGS) \
		$(OLDEST_TESTS) $(PYTEST_ARGS)

$(HUB_STAMP): pyproject.toml constraints-hub.txt Makefile
	$(PYTHON) -m venv $(HUB)
	$(HUB)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-hub.txt -e '.[dev]' $(HUB_PACKAGES)
	$(HUB)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(HUB)/transformers-4/site-packages $(TRANSFORMERS_4)
	@touch $@

# Packages warn of their own accord, which is no fault of raydist. Nothing is downloaded: models have random weights.
HUB_PYTEST := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(HUB)/bin/python -m pytest -W default

test-hub: $(HUB_STAMP)  ## Train models of transformers 5 and 4, peft, timm, torchvision, ... in an environment of 7 GB
	$(HUB_PYTEST) tests/hub tests/video $(PYTEST_ARGS)
	PYTHONPATH=$(abspath $(HUB)/transformers-4/site-packages) $(HUB_PYTEST) tests/hub/test_transformers*.py $(PYTEST_ARGS)

$(TRACKERS_STAMP): pyproject.toml Makefile
	$(PYTHON) -m venv $(TRACKERS)
	$(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev,wandb,mlflow]' torch==2.13.0 sqlalchemy alembic
	@touch $@

# Apart, as mlflow does not take the protobuf of constraints.txt.
test-trackers: $(TRACKERS_STAMP)  ## Log to Weights & Biases and MLflow by the real packages, without a network
	$(TRACKERS)/bin/python -m pytest -W default tests/trackers $(PYTEST_ARGS)

$(FORESTS_STAMP): pyproject.toml Makefile
	$(PYTHON) -m venv $(FORESTS)
	$(FORESTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,examples,xgboost]'
	@touch $@

test-xgboost: $(FORESTS_STAMP)  ## Random forests by XGBoost on Ray Train, beside scikit-learn's
	RAYDIST_LONG=1 $(FORESTS)/bin/python -m pytest -W default tests/ml/test_forest.py $(PYTEST_ARGS)

test-long: $(STAMP)  ## What takes too long for `make test`: machines apart, nodes that come and go, lost nodes, ...
	RAYDIST_LONG=1 $(BIN)/python -m pytest -m long $(PYTEST_ARGS)

test-autoscaler: $(STAMP)  ## Of these, nodes that come and go, on Ray's fake autoscaler: takes two minutes
	RAYDIST_LONG=1 $(BIN)/python -m pytest tests/test_autoscaling.py $(PYTEST_ARGS)

chaos: $(STAMP)  ## For long, what `make test` does a little of: kill workers, damage files, open and close strategies
	RAYDIST_CHAOS=1 RAYDIST_LONG=1 $(BIN)/python -m pytest tests/chaos $(PYTEST_ARGS)

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

asynchronous: $(STAMP) $(PEERS_STAMP)  ## Measure parameter servers beside TensorFlow's and plain Ray's (BENCH_ARGS="--smoke")
	$(BIN)/python -m benchmarks.asynchronous --peer-python $(PEERS)/bin/python $(BENCH_ARGS)

checkpoints: $(STAMP)  ## Measure what saving costs training, beside torch.save and async_save (BENCH_ARGS="--smoke")
	$(BIN)/python -m benchmarks.checkpoints $(BENCH_ARGS)

sharded: $(STAMP)  ## Measure memory and steps of divided models, beside FSDP2 under torchrun (BENCH_ARGS="--smoke")
	$(BIN)/python -m benchmarks.sharded $(BENCH_ARGS)

scaling: $(STAMP)  ## Measure 1 to 64 replicas on a simulated device, on one node and on four (BENCH_ARGS="--smoke")
	$(BIN)/python -m benchmarks.scaling $(BENCH_ARGS)

summaries: $(STAMP)  ## Compare training steps with summaries and without (BENCH_ARGS="--smoke")
	$(BIN)/python -m benchmarks.summaries $(BENCH_ARGS)

failures: $(STAMP)  ## Measure what recovery costs a step, and how long a lost replica is missed (BENCH_ARGS="--smoke")
	$(BIN)/python -m benchmarks.failures $(BENCH_ARGS)

serving: $(STAMP)  ## Compare served models with a bare Ray Serve deployment, and batches with single calls (BENCH_ARGS="--smoke")
	$(BIN)/python -m benchmarks.serving $(BENCH_ARGS)

autotune: $(STAMP)  ## Compare light pipelines with and without AUTOTUNE (BENCH_ARGS="--smoke")
	$(BIN)/python -m benchmarks.autotune $(BENCH_ARGS)

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) $(PEERS) $(XLA) $(HUB) $(TRACKERS) $(FORESTS) site .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
