# Each target has a virtual environment of its own under $(VENVS), made once and kept.
# PIP_ARGS is handed to every pip install (for a package index of your own, say).
PYTHON ?= python3
VENVS  ?= $(CURDIR)/.venvs
RUNS   ?= $(CURDIR)/runs
PIP_ARGS ?=

MAIN := $(VENVS)/main
VLLM := $(VENVS)/vllm
VERL := $(VENVS)/verl
PINS := $(shell cat pyproject.toml constraints*.txt 2>/dev/null | cksum | cut -d' ' -f1)
PIP   = -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

.PHONY: demo test lint format bench faults test-vllm test-verl package clean

demo: $(MAIN)/.ready-$(PINS)
	@$(MAIN)/bin/phasesync demo --runs $(RUNS) $(DEMO_ARGS)

test: lint $(MAIN)/.ready-$(PINS)
	$(MAIN)/bin/python -m pytest $(TEST_ARGS)

lint: $(MAIN)/.ready-$(PINS)
	$(MAIN)/bin/ruff check .
	$(MAIN)/bin/ruff format --check .
	$(MAIN)/bin/mypy
	$(MAIN)/bin/lint-imports

format: $(MAIN)/.ready-$(PINS)
	$(MAIN)/bin/ruff check --fix .
	$(MAIN)/bin/ruff format .

bench: $(MAIN)/.ready-$(PINS)
	$(MAIN)/bin/phasesync bench fence
	$(MAIN)/bin/phasesync bench audit
	$(MAIN)/bin/phasesync bench check

clean:
	rm -rf $(VENVS) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

$(MAIN)/.ready-$(PINS):
	@echo "making $(MAIN) (the first time takes a minute or two)"
	@test -x $(MAIN)/bin/python || $(PYTHON) -m venv $(MAIN)
	@$(MAIN)/bin/python $(PIP) -c constraints.txt torch numpy
	@$(MAIN)/bin/python $(PIP) -c constraints.txt -e '.[dev,zstd]'
	@rm -f $(MAIN)/.ready-* && touch $@
