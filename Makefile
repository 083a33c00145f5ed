# Every target sets up what it needs: a virtual environment in .venv, made once, and the packages of
# constraints.txt, installed again when that file or pyproject.toml changes.
#
#   make demo        generate a text with the embedded model
#   make test        the tests of every day      make test-full   the slow ones too (make test-slow: they alone)
#   make lint        format, lint, types         make bench       measure generation
#   make clean       remove the environment and the caches

VENV := .venv
BIN := $(VENV)/bin
# Twice quiet: errors only. The locked versions come from constraints.txt.
INSTALL = $(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt --editable
LOCK := pyproject.toml constraints.txt
PROMPT := Once upon a time

.PHONY: demo test test-full test-slow lint bench clean
# Two installs into one environment must not overlap, whatever -j says.
.NOTPARALLEL:

demo: $(VENV)/.runtime
	$(BIN)/python -m deepinfer_jax generate "$(PROMPT)"

test: $(VENV)/.test
	$(BIN)/python -m pytest

test-full: $(VENV)/.test
	$(BIN)/python -m pytest -m "slow or not slow"

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.runtime
	$(BIN)/python benchmarks/generate.py

clean:
	rm -rf $(VENV) .jax_cache .pytest_cache .ruff_cache .hypothesis

# A Python is found by running it: version managers put names on PATH that do not run everywhere.
$(VENV)/.created:
	@for python in python3.12 python3; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
	    echo "Creating $(VENV) with $$python"; \
	    $$python -m venv --clear $(VENV) && touch $@; exit; \
	  fi; \
	done; \
	echo "No Python >= 3.12 runs here: tried python3.12 and python3, got '$$(python3 --version 2>&1 | head -n 1)'." >&2; \
	echo "Install Python 3.12 so that 'python3.12' runs in this folder, then run make again." >&2; \
	exit 1

$(VENV)/.runtime: $(VENV)/.created $(LOCK)
	@echo "Installing the package (once, a minute or more)"
	@$(INSTALL) .
	@touch $@

$(VENV)/.test: $(VENV)/.created $(LOCK)
	@echo "Installing the package and the test tools (once, a minute or more)"
	@$(INSTALL) '.[test]'
	@touch $@ $(VENV)/.runtime

$(VENV)/.lint: $(VENV)/.created $(LOCK)
	@echo "Installing the package and the lint tools (once, a minute or more)"
	@$(INSTALL) '.[lint,train]'
	@touch $@ $(VENV)/.runtime
