# Development commands. A fresh machine needs Python >= 3.10, a C++17 compiler and make; the rest is
# installed into .venv. Run `make help` for the list.

PYTHON ?= python3
VENV ?= .venv
# The PyTorch that is tested. Another build of it: make test TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=
# The release of SGLang whose engines are run on the CPU, and older ones. Before 0.5.11 it is patched, not plugged
# into.
SGLANG ?= 0.5.23
MORE_SGLANG := 0.5.11 0.5.6 0.4.9
# The versions of CPython that wheels are built for; by default the oldest and the newest that are here.
WHEELS ?=

# Of `make benchmarks`; BENCHMARKS="layers swap" for some of them.
DEVICE ?= cuda:0
DISK ?= .
RESULTS ?= benchmarks/results
BENCHMARKS ?=

PY := $(VENV)/bin/python
FUZZ_SECONDS ?= 10
FUZZ_TARGETS := fuzz-sizes fuzz-devices fuzz-settings fuzz-status_file fuzz-trace
CPP_TESTS := cpp-tests-address cpp-tests-thread
PIP := $(PY) -m pip --disable-pip-version-check --quiet
# What the requirement lists of pyproject.toml's extras need, without building the package for it.
REQUIREMENTS := $(PY) scripts/requirements.py

CPP_FILES = $(shell find csrc preload -name '*.cpp' -o -name '*.h')
BUILD_INPUTS = $(CPP_FILES) $(wildcard csrc/kernels/*.cu) CMakeLists.txt setup.py pyproject.toml scripts/cuda_headers.py scripts/nvcc.py
FORMATTED_PYTHON := setup.py python tests scripts docs/conf.py $(wildcard benchmarks examples)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check check-all benchmarks docs lint ruff mypy stubtest clang-format clang-tidy analyze format build wheels soak more-soak cpp-tests $(CPP_TESTS) cpp-tests-plain fuzz $(FUZZ_TARGETS) engines engines-sglang more-engines engines-vllm more-wheels sanitizers sanitize-address sanitize-thread clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo $(VENV)/.built ## Set up, then run the demo (uses a GPU where there is one)
	$(PY) -m fencepool demo $(DEMO_ARGS)

test: $(VENV)/.test $(VENV)/.built ## Set up, then run the fast tests
	$(PY) -m pytest -n $(PYTEST_WORKERS) $(PYTEST_ARGS)

check: docs cpp-tests soak fuzz engines wheels ## The long checks of continuous integration: docs, C++ tests, soak, fuzzing, engines, wheels

check-all: check more-soak more-engines more-wheels analyze sanitizers ## Everything: also older releases of SGLang, the other CPythons, the slowest soak tests, the static analyzer, and the Python tests under sanitizers

soak: $(VENV)/.test $(VENV)/.built ## Soak tests
	$(PY) -m pytest -m "soak and not release" -n $(PYTEST_WORKERS) --dist worksteal --durations=15 $(PYTEST_ARGS)

more-soak: $(VENV)/.test $(VENV)/.built
	$(PY) -m pytest -m release -n $(PYTEST_WORKERS) --dist worksteal --durations=15 $(PYTEST_ARGS)

fuzz: $(FUZZ_TARGETS) ## Coverage-guided fuzzing of whatever parses; FUZZ_SECONDS=600 for longer

$(FUZZ_TARGETS): fuzz-%: $(VENV)/.fuzz $(VENV)/.built
	mkdir -p build/fuzz/$*
	cd build/fuzz/$* && $(abspath $(PY)) $(CURDIR)/tests/fuzz/parsers.py $* -max_total_time=$(FUZZ_SECONDS) -verbosity=0 -print_final_stats=1

engines: engines-sglang engines-vllm ## Tests with real engines' own code, on the CPU

engines-sglang: $(SGLANG:%=engine-sglang-%) ## Real SGLang engines on the CPU, the newest release; SGLANG="0.5.11" for another

more-engines: $(MORE_SGLANG:%=engine-sglang-%)

engine-sglang-%: $(VENV)/.test $(VENV)/.built
	scripts/engines.sh $(PY) $* $(PYTEST_ARGS)

engines-vllm: $(VENV)/.test $(VENV)/.built ## Tests on the own code of real vLLM releases, which they fetch
	FENCEPOOL_REQUIRE_ENGINES=1 $(PY) -m pytest tests/test_vllm_sources.py -m engine -n $(PYTEST_WORKERS) $(PYTEST_ARGS)

cpp-tests: $(CPP_TESTS) ## C++ tests of the core under address, undefined and thread sanitizers (for a debugger: make cpp-tests-plain)

$(CPP_TESTS) cpp-tests-plain: cpp-tests-%: $(VENV)/.test
	scripts/cpp_tests.sh $(PY) $*

sanitizers: sanitize-address sanitize-thread ## The Python tests under address+undefined and thread sanitizers

sanitize-address sanitize-thread: sanitize-%: $(VENV)/.test
	scripts/check_sanitizer.sh $(PY) $* $(PYTEST_ARGS)

benchmarks: $(VENV)/.test $(VENV)/.built ## The benchmarks, but for sglang_engine.py: DEVICE=cuda:0 DISK=/folder (RESULTS=folder)
	scripts/benchmarks.sh $(PY) $(DEVICE) $(DISK) $(RESULTS) $(BENCHMARKS)

wheels: $(VENV)/.wheels ## Source distribution and wheels, checked, tagged and used on the oldest and the newest CPython; WHEELS="3.12" for another
	$(PY) scripts/check_wheels.py $(WHEELS)

more-wheels: $(VENV)/.wheels
	$(PY) scripts/check_wheels.py 3.11 3.12

docs: $(VENV)/.docs $(VENV)/.built ## The documentation as a site, docs/_build/html/index.html; warnings are errors
	$(PY) -m sphinx --fail-on-warning --keep-going --fresh-env --quiet -c docs . docs/_build/html

lint: ruff mypy stubtest clang-format clang-tidy ## Style, types and static analysis (make -k lint: all findings)

ruff: $(VENV)/.lint
	$(PY) -m ruff check $(FORMATTED_PYTHON)
	$(PY) -m ruff format --check $(FORMATTED_PYTHON)

mypy: $(VENV)/.lint $(VENV)/.test
	$(PY) -m mypy --strict python/fencepool

stubtest: $(VENV)/.lint $(VENV)/.test $(VENV)/.built
	PYTHONPATH=python $(PY) -m mypy.stubtest fencepool._core --mypy-config-file pyproject.toml --allowlist scripts/stubtest.allow

clang-format: $(VENV)/.lint
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)

clang-tidy: $(VENV)/.lint build/lint/compile_commands.json
	$(PY) scripts/tidy.py build/lint '--checks=-clang-analyzer-*'

analyze: $(VENV)/.lint build/lint/compile_commands.json ## Clang's static analyzer, which takes twice as long as all other checks together
	$(PY) scripts/tidy.py build/lint '--checks=-*,clang-analyzer-*'

format: $(VENV)/.lint ## Rewrite the sources in the house style
	$(PY) -m ruff check --fix --exit-zero $(FORMATTED_PYTHON)
	$(PY) -m ruff format $(FORMATTED_PYTHON)
	$(VENV)/bin/clang-format -i $(CPP_FILES)

build: $(VENV)/.built ## Build the extension in place, incrementally

clean: ## Remove what was built, keep the environment
	rm -rf build dist docs/_build python/*.egg-info $(VENV)/.built
	find python -name '*.so' -delete
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find python tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove the environment too
	rm -rf $(VENV)

# One stamp for each set of packages, so that a second run starts at once.

$(VENV)/.base: pyproject.toml scripts/requirements.py scripts/cuda_headers.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "fencepool needs Python 3.10 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade 'pip>=24'
	$(PIP) install $$($(REQUIREMENTS) build base)
	@touch $@

$(VENV)/.torch: Makefile | $(VENV)/.base
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	@touch $@

$(VENV)/.test: $(VENV)/.base $(VENV)/.torch
	$(PIP) install $$($(REQUIREMENTS) test)
	@touch $@

$(VENV)/.demo: $(VENV)/.base $(VENV)/.torch
	$(PIP) install $$($(REQUIREMENTS) demo) '$(TORCH)'
	@touch $@

$(VENV)/.docs: $(VENV)/.base $(VENV)/.torch
	$(PIP) install $$($(REQUIREMENTS) docs)
	@touch $@

$(VENV)/.fuzz: $(VENV)/.base $(VENV)/.torch
	$(PIP) install $$($(REQUIREMENTS) fuzz)
	@touch $@

$(VENV)/.wheels: $(VENV)/.base
	$(PIP) install $$($(REQUIREMENTS) wheels)
	@touch $@

$(VENV)/.lint: $(VENV)/.base
	$(PIP) install $$($(REQUIREMENTS) lint)
	@touch $@

$(VENV)/.built: $(VENV)/.base $(BUILD_INPUTS)
	FENCEPOOL_BUILD_DIR=build/dev FENCEPOOL_WERROR=1 \
	  $(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

build/lint/compile_commands.json: $(VENV)/.base CMakeLists.txt $(CPP_FILES)
	$(VENV)/bin/cmake -S . -B build/lint -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/$(PY) -Dpybind11_DIR=$$($(PY) -m pybind11 --cmakedir)
	@touch $@
