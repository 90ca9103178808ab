# Every target does its own set-up; a second run reuses what is there and needs no network.
# `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
JOBS ?= $(shell nproc)
VENV := .venv
PY := $(VENV)/bin/python
EDGELLM := $(VENV)/bin/edgellm
PIP := $(PY) -m pip --disable-pip-version-check --no-input
REQUIREMENTS := $(PY) tests/tools/requirements.py
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

C_FILES = $(shell find native samples -name '*.[ch]' -o -name '*.inl')
CLANG ?= $(firstword $(foreach name,clang-19 clang,$(shell command -v $(name))))
PROMPT ?= What is the capital of France, and what is it known for?
FUZZ_RUNS ?= 10000000
FUZZ_READERS ?= safetensors=300000 packed=200000 gguf=350000 gguf_model=150000 onnx=50000

comma := ,
say = @printf '\n\033[1m== %s\033[0m\n' "$(1)"

.PHONY: help demo test lint format typecheck tidy install test-c test-sanitize test-aarch64 \
        test-x86-models test-python test-wheel models-check fuzz fuzz-readers bench arm-report ablation \
        clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 16

# ---- set-up ----------------------------------------------------------------------------------

$(PY):
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(
	    v < (3, 11) and f"edgellm needs Python 3.11 or newer, this is {v[0]}.{v[1]}: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# pip asks the network only when a requirement is not satisfied yet.
$(VENV)/.have-%: pyproject.toml tests/tools/requirements.py | $(PY)
	@printf '== %s\n' "Python packages: $(subst +,$(comma) ,$*) (once)"
	$(PIP) install --quiet --progress-bar on $$($(REQUIREMENTS) $(subst +, ,$*))
	touch $@

RUN := $(VENV)/.have-run+export+build
DEV := $(VENV)/.have-run+dev

# The Python files are used where they lie; the C library is built in build/editable.
$(VENV)/.installed: pyproject.toml | $(RUN)
	@printf '== %s\n' "edgellm, editable (compiles the C library)"
	$(PIP) install --quiet --no-index --no-deps --no-build-isolation \
	    --config-settings build-dir=build/editable --editable .
	touch $@

install: $(VENV)/.installed ## the edgellm command in .venv, C library up to date
	@site=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
	cmake --build build/editable --parallel $(JOBS) > build/editable.log 2>&1 \
	    || { cat build/editable.log; exit 1; }
	cmake --install build/editable --prefix build/stage > /dev/null
	cd build/stage
	for file in $$(find . -type f); do  # moved into place: running programs keep the old library
	    cmp -s "$$file" "$$site/$$file" && continue
	    cp "$$file" "$$site/$$file.new"
	    mv "$$site/$$file.new" "$$site/$$file"
	done

# ---- the two commands of the README -----------------------------------------------------------

demo: install ## a real model answers in the terminal
	@$(EDGELLM) pull smollm2
	$(EDGELLM) run smollm2 "$(PROMPT)"

test: ## everything CI runs
	@start=$$SECONDS
	for stage in lint test-c test-sanitize test-aarch64 test-python test-wheel; do
	    $(MAKE) $$stage
	done
	printf '\nall passed in %d s\n' $$((SECONDS - start))

# ---- style and types ----------------------------------------------------------------------------

lint: $(DEV) ## style and types
	$(call say,lint)
	@ruff check --quiet .
	ruff format --quiet --check . || { echo 'run: make format'; exit 1; }
	clang-format --dry-run -Werror $(C_FILES) || { echo 'run: make format'; exit 1; }
	$(MAKE) typecheck

# mypy does not know the package table, so it sees the folders merged by links.
typecheck: $(DEV) ## mypy, strict
	@rm -rf build/typecheck
	mkdir -p build/typecheck/edgellm
	ln -s $(addprefix $(CURDIR)/,$(wildcard edgellm/*) exporters devices) build/typecheck/edgellm/
	mypy -p edgellm

format: $(DEV) ## rewrite the sources in the project's style
	@ruff check --quiet --fix . || true
	ruff format --quiet .
	clang-format -i $(C_FILES)

tidy: $(DEV) build/native/build.ninja ## clang-tidy over the C library
	@clang-tidy --quiet -p build/native $$(find native/src -name '*.c' | grep -v neon)

# ---- C tests -------------------------------------------------------------------------------------

C_TEST = cmake -S native -B $(1) -G Ninja -DELM_BUILD_TESTS=ON -DELM_WERROR=ON $(2) > $(1).log 2>&1 \
    || { cat $(1).log; exit 1; }; \
    cmake --build $(1) --parallel $(JOBS) >> $(1).log 2>&1 || { cat $(1).log; exit 1; }; \
    ctest --test-dir $(1) --output-on-failure --no-tests=error --parallel $(JOBS)

build/native/build.ninja: native/CMakeLists.txt $(DEV)
	@mkdir -p build
	cmake -S native -B build/native -G Ninja -DELM_BUILD_TESTS=ON -DELM_WERROR=ON \
	    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON > build/native.log

test-c: $(DEV) ## C tests
	$(call say,C tests)
	@mkdir -p build
	$(call C_TEST,build/native,-DCMAKE_EXPORT_COMPILE_COMMANDS=ON)

test-sanitize: $(DEV) ## C tests under ASan and UBSan
	$(call say,C tests: AddressSanitizer and UndefinedBehaviorSanitizer)
	@mkdir -p build
	$(call C_TEST,build/native-sanitize,-DELM_SANITIZE=ON)

# Correctness only: qemu says nothing about speed. `max` has i8mm and dotprod, neoverse-n1 dotprod,
# cortex-a72 neither.
ARM_TOOLS = command -v aarch64-linux-gnu-gcc > /dev/null && command -v qemu-aarch64 > /dev/null
test-aarch64: $(DEV) ## C tests for AArch64 under qemu (skipped without a cross compiler)
	$(call say,C tests: AArch64 under qemu)
	@mkdir -p build
	if ! { $(ARM_TOOLS); } && [ "$$(id -u)" = 0 ] && [ ! -e build/apt.log ]; then
	    echo "installing gcc-aarch64-linux-gnu and qemu-user (once)"
	    { apt-get update && apt-get install -y --no-install-recommends gcc-aarch64-linux-gnu \
	        libc6-dev-arm64-cross qemu-user; } > build/apt.log 2>&1 || echo "failed: build/apt.log"
	fi
	if $(ARM_TOOLS); then
	    export QEMU_CPU=max
	    $(call C_TEST,build/native-aarch64,--toolchain cmake/toolchain-aarch64.cmake)
	    for cpu in neoverse-n1 cortex-a72; do
	        QEMU_CPU=$$cpu ctest --test-dir build/native-aarch64 --output-on-failure -R kernels
	    done
	else
	    echo "SKIPPED: needs Debian's gcc-aarch64-linux-gnu and qemu-user"
	fi

# A part of test-python. Old CPUs are emulated: works or says what is missing, same bits.
test-x86-models: $(DEV) install test-c ## x86-64 without AVX2, AVX-512 under qemu
	$(call say,pytest: emulated x86-64 processors)
	@$(PY) -m pytest -q tests/kernels/test_x86_models.py

# ---- Python tests ---------------------------------------------------------------------------------

test-python: $(DEV) install ## pytest
	$(call say,pytest)
	@$(PY) -m pytest -q

# What a user gets from `pip install .`: a wheel in an empty environment, without torch and onnx.
build/wheel-venv/.have-run: pyproject.toml $(DEV)
	@rm -rf build/wheel-venv
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip install --quiet $$($(REQUIREMENTS) run export)
	touch $@

test-wheel: $(DEV) build/wheel-venv/.have-run ## the wheel in a fresh environment
	$(call say,wheel in a fresh environment)
	@rm -rf build/dist
	$(PIP) wheel --quiet --no-index --no-deps --no-build-isolation \
	    --config-settings build-dir=build/wheel --wheel-dir build/dist .
	build/wheel-venv/bin/python -m pip install --quiet --no-index --no-deps --force-reinstall \
	    build/dist/edgellm-*.whl
	build/wheel-venv/bin/python tests/tools/wheel_check.py

# ---- measuring --------------------------------------------------------------------------------------

models-check: $(DEV) install test-c test-aarch64 ## the three real models against their oracles (downloads 850 MB)
	@TQDM_DISABLE=1 $(PY) tests/tools/models_check.py $(ARGS)

fuzz: $(DEV) install ## fuzz the C reader: FUZZ_RUNS executions (10 million), needs clang
	@if [ -z "$(CLANG)" ]; then
	    echo "make fuzz needs clang with its runtime (Debian: apt-get install clang-19 libclang-rt-19-dev)"
	    exit 1
	fi
	mkdir -p build/fuzz/corpus
	$(PY) tests/tools/edge_files.py build/fuzz/corpus
	$(CLANG) -std=c11 -D_GNU_SOURCE -DELM_FUZZ -g -O2 -fsanitize=fuzzer,address,undefined \
	    -fno-sanitize-recover=all -fsanitize-coverage-ignorelist=native/tests/fuzz_ignorelist.txt \
	    -Inative/include -Inative/src native/tests/fuzz_file.c native/src/base/*.c \
	    native/src/format/*.c -lpthread -o build/fuzz/file
	cd build/fuzz
	./file -runs=$$(( $(FUZZ_RUNS) / $(JOBS) )) -jobs=$(JOBS) -workers=$(JOBS) -timeout=10 \
	    -rss_limit_mb=2048 -print_final_stats=1 corpus
	grep -h number_of_executed_units fuzz-*.log

# Atheris has wheels for some Pythons only, so that nothing else asks for it.
fuzz-readers: $(DEV) $(VENV)/.have-run+fuzz install ## fuzz the Python readers: FUZZ_READERS executions (a million)
	@mkdir -p build/fuzz
	cd build/fuzz
	for pair in $(FUZZ_READERS); do
	    target=$${pair%=*}
	    echo "$$target: $${pair#*=} executions"
	    $(CURDIR)/$(PY) ../../tests/fuzz/fuzz_readers.py $$target corpus-$$target -runs=$${pair#*=} \
	        -timeout=30 -rss_limit_mb=2048 -max_len=100000 -artifact_prefix=$$target- \
	        > $$target.log 2>&1 || { tail -n 40 $$target.log; exit 1; }
	    grep -o 'DONE .*' $$target.log
	done

bench: install ## speed of SmolLM2 on this machine, beside the stored run (ARGS=--save-baseline)
	@$(EDGELLM) pull smollm2
	$(EDGELLM) bench smollm2 $(ARGS)

ablation: $(DEV) install ## what each step of calibration gives: ARGS="FOLDER --text FILE" (an hour or so)
	@$(PY) tests/tools/ablation.py $(ARGS)

arm-report: $(DEV) ## cycles of the ARM loops by llvm-mca; ARGS="--peers FOLDER" adds peers
	@$(PY) tests/tools/arm_report.py $(ARGS)

clean: ## remove build products; keeps the environment and pulled models
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis $(VENV)/.installed
