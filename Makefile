# `make serve` answers a chat request on a CPU, `make test` proves that everything works; both set up what is missing.
#
#   PYTHON            the interpreter that the virtual environment is made from (3.11 or newer)
#   TORCH_INDEX_URL   where to look for another build of torch, a CPU one on Linux for example

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TRITON := 3.9.0

.PHONY: setup serve test lint format faults bench-peers bench-serve bench-routing

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Manta needs Python 3.11 or newer; choose one with make PYTHON=..." >&2; exit 1; }
	@echo "Setting up .venv; this takes a minute or two."
	$(PYTHON) -m venv .venv
	$(PIP) -c constraints.txt $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) torch
	@# A CUDA build of torch brings the one triton that it works with; pinning that as well would contradict it.
	@$(BIN)/python -c 'import triton' 2>/dev/null || [ "$$(uname)" != Linux ] || $(PIP) triton==$(TRITON)
	$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

serve: setup
	@$(BIN)/manta models fetch demo
	@echo "Starting the service; once its log says that it is ready, talk to it with: $(BIN)/manta chat --temperature 0" >&2
	@RAY_USAGE_STATS_ENABLED=0 exec $(BIN)/manta serve serve_configs/demo.yaml

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/python -m pytest

# Breaks replicas, ingresses, steps and clients of a running service, and prints what others see; 1 if that is wrong.
# JSON=FILE writes the rows.
faults: setup
	@RAY_USAGE_STATS_ENABLED=0 $(BIN)/python -m tests.faults $(if $(JSON),--json $(JSON))

# JSON=FILE writes the figures. Each engine gets a virtual environment of its own in the cache folder (minutes, once);
# TORCH_INDEX_URL is where a CPU build of torch comes from where the usual index has none.
bench-peers: setup
	$(BIN)/python -m tests.perf.peers $(if $(JSON),--json $(JSON))

# The demo service over HTTP beside its own engine; BESIDE="manta-haproxy vllm" adds Ray Serve's other ways, or vLLM's server.
bench-serve: setup
	$(BIN)/python -m tests.perf.serve $(if $(JSON),--json $(JSON)) $(if $(BESIDE),--beside $(BESIDE))

# A trace over HTTP against real replicas, once with each router; `manta bench routing` simulates the same.
bench-routing: setup
	@RAY_USAGE_STATS_ENABLED=0 $(BIN)/python -m tests.perf.routing.replay $(if $(JSON),--json $(JSON))
