# Each target has a virtual environment of its own under $(VENVS), made once and kept.
# PIP_ARGS is handed to every pip install (for a package index of your own, say).
PYTHON ?= python3
VENVS  ?= $(CURDIR)/.venvs
RUNS   ?= $(CURDIR)/runs
PIP_ARGS ?=

MAIN := $(VENVS)/main
VLLM := $(VENVS)/vllm
VERL := $(VENVS)/verl
# An environment is made again for other pins, and for another checkout that it is kept for.
PINS := $(shell (pwd; cat pyproject.toml constraints*.txt) | cksum | cut -d' ' -f1)
PIP   = -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

# A store looks its peers up in reverse; a name service that does not answer must not hold tests up.
export RES_OPTIONS ?= timeout:1 attempts:1

.PHONY: demo test lint format bench tools faults package test-vllm test-verl clean

demo: $(MAIN)/.ready-$(PINS)
	@$(MAIN)/bin/phasesync demo --runs $(RUNS) $(DEMO_ARGS)

# What computes and waits for nobody runs on every core; tests of real processes run one by one.
PURE := $(addprefix tests/,audit checker cli core importers plugin report simulator spec world)
ELSEWHERE := $(addprefix --ignore=tests/,vllm verl net fences/faults)

test: lint $(MAIN)/.ready-$(PINS)
	@code=0; \
	$(MAIN)/bin/python -m pytest -n auto --dist worksteal $(PURE) $(TEST_ARGS) || code=$$?; \
	$(MAIN)/bin/python -m pytest $(PURE:%=--ignore=%) $(ELSEWHERE) $(TEST_ARGS) || code=$$?; \
	exit $$code

# Faults by chance over every transport, and real networks; FAULTS=10000 for a night.
FAULTS ?= 500
faults: $(MAIN)/.ready-$(PINS)
	PHASESYNC_FAULTS=$(FAULTS) $(MAIN)/bin/python -m pytest tests/fences/faults tests/net $(TEST_ARGS)

# The wheel as a user gets it, in an environment that has never seen the checkout.
package: $(MAIN)/.ready-$(PINS)
	@rm -rf dist $(VENVS)/package
	$(MAIN)/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist $(PIP_ARGS) .
	$(PYTHON) -m venv $(VENVS)/package
	$(VENVS)/package/bin/python $(PIP) -c constraints.txt dist/phasesync-*.whl
	cd $(VENVS)/package && bin/phasesync protocols && bin/phasesync doctor && \
	  bin/phasesync lint colocated && bin/phasesync check basic --time-limit 60

lint: $(MAIN)/.ready-$(PINS)
	$(MAIN)/bin/ruff check .
	$(MAIN)/bin/ruff format --check .
	$(MAIN)/bin/mypy
	$(MAIN)/bin/lint-imports

format: $(MAIN)/.ready-$(PINS)
	$(MAIN)/bin/ruff check --fix .
	$(MAIN)/bin/ruff format .

bench: $(MAIN)/.ready-$(PINS)
	$(MAIN)/bin/phasesync bench fence $(BENCH_ARGS)
	$(MAIN)/bin/phasesync bench check

# The checkers that ours is held against; without them their tests are skipped, but not in CI.
tools:
	@for tool in spin cc java; do command -v $$tool >/dev/null || lacks=1; done; \
	[ -z "$$lacks" ] || { apt-get update -qq && apt-get install -y -qq \
	  --no-install-recommends spin gcc libc6-dev default-jre-headless; }

clean:
	rm -rf $(VENVS) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

$(MAIN)/.ready-$(PINS):
	@echo "making $(MAIN) (the first time takes a minute or two)"
	@test -x $(MAIN)/bin/python || $(PYTHON) -m venv $(MAIN)
	@$(MAIN)/bin/python $(PIP) -c constraints.txt torch numpy
	@$(MAIN)/bin/python $(PIP) -c constraints.txt -e '.[dev,ray,zstd]'
	@rm -f $(MAIN)/.ready-* && touch $@

# A real vLLM on a CPU, at the pins that fit together; nothing else of that environment is ours.
test-vllm: $(VLLM)/.ready-$(PINS)
	$(VLLM)/bin/python -m pytest tests/vllm -o filterwarnings=ignore $(TEST_ARGS)

$(VLLM)/.ready-$(PINS):
	@echo "making $(VLLM) (the first time takes some minutes)"
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python $(PIP) --no-deps -r constraints-vllm.txt
	@$(VLLM)/bin/python $(PIP) --no-deps -e .
	@rm -f $(VLLM)/.ready-* && touch $@

# Three releases of verl, each in an environment of its own, over one of what they import on a CPU.
# The runs end with a table: each fault, what stock verl does, what verl with phasesync does.
# SkyRL asks for a newer Python than the rest; its own code runs here.
test-verl: $(VERL)-0.8.0/.ready-$(PINS) $(VERL)-0.9.0/.ready-$(PINS) $(VERL)-0.9.1/.ready-$(PINS) $(VENVS)/skyrl/.ready-$(PINS)
	@rm -f $(VERL)/table
	PHASESYNC_TABLE=$(VERL)/table $(VERL)-0.8.0/bin/python -m pytest $(VERL_ARGS) tests/verl/test_ab.py \
	  tests/verl/test_calls.py tests/verl/test_example.py tests/verl/test_surfaces.py $(TEST_ARGS)
	PHASESYNC_TABLE=$(VERL)/table $(VERL)-0.9.0/bin/python -m pytest $(VERL_ARGS) tests/verl $(TEST_ARGS)
	PHASESYNC_TABLE=$(VERL)/table $(VERL)-0.9.1/bin/python -m pytest $(VERL_ARGS) tests/verl \
	  tests/integrations/test_nemo_rl.py $(TEST_ARGS)
	PHASESYNC_TABLE=$(VERL)/table $(VENVS)/skyrl/bin/python -m pytest $(VERL_ARGS) tests/skyrl $(TEST_ARGS)
	@$(VERL)/bin/python -m tests.verl.table $(VERL)/table

VERL_ARGS  := -o filterwarnings=default -p no:cacheprovider
VERL_NEEDS := torch numpy tensordict 'ray[default]' omegaconf hydra-core codetiming dill pandas peft \
  transformers datasets torchdata accelerate pyarrow packaging tensorboard pylatexenc cachetools \
  pyzmq msgspec fastapi uvicorn nvtx orjson pytest pytest-timeout

# An environment of its own over the one in $(VERL): $(call over-verl,FOLDER,PACKAGES)
define over-verl
	@test -x $(1)/bin/python || $(PYTHON) -m venv --without-pip $(1)
	@$(VERL)/bin/python $(subst -m pip,-m pip --python $(1)/bin/python,$(PIP)) --no-deps --ignore-requires-python $(2)
	@echo "import site; site.addsitedir('$$($(VERL)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")')" \
	  > "$$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/verl-needs.pth"
	@rm -f $(1)/.ready-* && touch $@
endef

$(VERL)-%/.ready-$(PINS): $(VERL)/.ready-$(PINS)
	$(call over-verl,$(VERL)-$*,verl==$*)

$(VENVS)/skyrl/.ready-$(PINS): $(VERL)/.ready-$(PINS)
	$(call over-verl,$(VENVS)/skyrl,skyrl==0.4.0 skyrl-gym==0.4.0 cloudpathlib==0.26.0 loguru==0.7.3 jaxtyping==0.3.11)

$(VERL)/.ready-$(PINS):
	@echo "making $(VERL) (the first time takes some minutes)"
	@test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	@$(VERL)/bin/python $(PIP) -c constraints-verl.txt $(VERL_NEEDS)
	@$(VERL)/bin/python $(PIP) -c constraints-verl.txt -e .
	@rm -f $(VERL)/.ready-* && touch $@
