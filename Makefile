# From a bare machine to a trained model. The first call of a target sets up what it needs, later ones start at once.
#
#   make train      train a model on the text of the Python standard library; again: resume, or say it is done
#                   on two CPU cores a small one; on 1, 2, 4 or 8 GPUs the size of GPT-2 small; in FP8 instead of bf16:
#                   make train ARGS="--fp8-format hybrid"
#   make test       the fast tests, which need no GPU            make gpu-test   those that need one
#   make test-full  all tests: every layout, every grid          make lint       ruff and clang-format
#   make mutations  plant bugs, each caught by a fast test       make goldens    renew the kept results (docs/testing.md)
#   make sanitize   all kernels under compute-sanitizer, on a GPU (docs/debugging.md); TOOL=racecheck
#   make faults     kill, damage, interrupt: the fault matrix (docs/reliability.md; an hour); ARGS="K1 T1 --count 5"
#   make gpu-gate OLD=../other    is this checkout as fast as that one, on one GPU? gpu-gate-many: on two and four
#   make kernels    compile cuda/ (done by itself with a GPU)    make clean      remove all of that but runs/ and data/
#
# make test ARGS="tests/test_tp.py -k name" runs those tests alone.
#
# PYTHON=/path/to/python3 chooses the interpreter (>= 3.11). One that has torch >= 2.11 is used as it is; else torch
# is installed as constraints.txt pins it.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The plain python3 if it has torch (a GPU machine), else the Python for which constraints.txt was made, else python3.
has_torch := import sys, importlib.metadata as m; v = m.version("torch").split("."); sys.exit((int(v[0]), int(v[1])) < (2, 11))
PYTHON ?= $(shell python3 -c '$(has_torch)' 2>/dev/null && echo python3 || command -v python3.11 || echo python3)
VENV ?= .venv
py := $(VENV)/bin/python

# GPUs that torch can use; asked only where there is a device, since the asking takes two seconds.
gpus = $(if $(wildcard /dev/nvidia[0-9]*),$(shell $(py) -c 'import torch; print(torch.cuda.device_count())'),0)
# Those that `make train` uses: a power of two, at most 8, which its batch divides by.
train_gpus = $(shell found=$(gpus); for n in 8 4 2 1; do [ $$found -lt $$n ] || { echo $$n; break; }; done)
# A run that Ctrl-C has stopped and saved is no error.
for_make := $(py) tools/train_for_make.py
TEST_FLAGS ?= -n 2 --dist worksteal

.PHONY: help train test test-full gpu-test sanitize mutations faults goldens gpu-gate gpu-gate-many kernels lint clean

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

$(VENV)/.train: pyproject.toml constraints.txt tools/environment.py
	@$(PYTHON) tools/environment.py $(VENV) viz hf build
	@touch $@

$(VENV)/.test: $(VENV)/.train
	@$(PYTHON) tools/environment.py $(VENV) viz hf build dev oracle
	@touch $@

$(VENV)/.kernels: $(VENV)/.train setup.py $(wildcard cuda/*)
	@$(py) setup.py -q build_ext --inplace
	@! compgen -G "nanomegatron/_kernels*.so" > /dev/null || touch $@ # asked again once there is a compiler

kernels: $(VENV)/.kernels

train: $(VENV)/.train $(if $(wildcard /dev/nvidia[0-9]*),$(VENV)/.kernels)
	@gpus=$(train_gpus); if [ "$$gpus" ]; then \
		exec $(for_make) $(py) -m torch.distributed.run --standalone --nproc-per-node $$gpus \
			train.py $(or $(TRAIN_FLAGS),--config demo-gpu) $(ARGS); \
	else \
		exec $(for_make) $(py) train.py $(or $(TRAIN_FLAGS),--config tiny-cpu --run-name python) --nproc 2 $(ARGS); \
	fi

test: $(VENV)/.test
	$(py) -m pytest $(or $(ARGS),$(TEST_FLAGS))

test-full: $(VENV)/.test
	$(py) -m pytest --full $(or $(ARGS),$(TEST_FLAGS))

gpu-test: $(VENV)/.test $(VENV)/.kernels
	$(py) -m pytest tests/gpu $(ARGS)

TOOL ?= memcheck
sanitize: $(VENV)/.test $(VENV)/.kernels
	compute-sanitizer --tool $(TOOL) --error-exitcode 1 --kernel-name-exclude kns=at:: $(py) $(or $(ARGS),-m tools.kernel_errors)

mutations: $(VENV)/.test
	$(py) tools/mutations.py $(ARGS)

faults: $(VENV)/.test
	$(py) tools/faults.py $(ARGS)

goldens: $(VENV)/.test
	$(py) -m tests.golden --write

OLD ?= $(error OLD is the checkout to compare with: make $@ OLD=../nanomegatron-before)
gpu-gate: $(VENV)/.kernels
	$(py) tools/gpu_gate.py --old $(OLD) $(ARGS)

gpu-gate-many: $(VENV)/.kernels
	$(py) tools/gpu_gate.py --old $(OLD) --gpus $(if $(filter 2 3,$(gpus)),2,4) $(ARGS)

lint: $(VENV)/.test
	$(py) -m ruff check .
	$(py) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror cuda/*.c* cuda/*.h

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache *.egg-info nanomegatron/_kernels*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
