# Needs python3 (3.11 or newer) with venv, and make. pip's own settings (index, wheel folders,
# certificates) are honoured.
#
#   make train                                  the example on two CPU processes; results in runs/stdlib
#   make train ARGS="--trainer.devices 4"       the same with other settings of its configuration
#   make test                                   all tests
#   make lint                                   formatting, lint and types

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: train test lint clean

train: $(VENV)/.train
	$(BIN)/python examples/stdlib/train.py fit --config examples/stdlib/config.yaml $(ARGS)

# The tests of one process and those of several ranks run side by side; the first report is shown below the second.
test: $(VENV)/.test
	@mkdir -p build; echo "tests of several ranks; those of one process run beside them"; \
	$(BIN)/python -m pytest -m "not ranks" -p no:cacheprovider > build/tests-of-one-process.txt 2>&1 & one=$$!; \
	trap 'kill $$one 2> /dev/null' INT TERM; \
	$(BIN)/python -m pytest -m ranks; ranks=$$?; \
	wait $$one; one=$$?; cat build/tests-of-one-process.txt; \
	test $$one -eq 0 -a $$ranks -eq 0

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs

# torch goes first and alone: no other requirement can then replace the build of it that pip chose.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	touch $@

$(VENV)/.train: $(VENV)/.torch setup.cfg pyproject.toml
	$(PIP) install -c constraints.txt -e ".[plots]"
	touch $@

$(VENV)/.test: $(VENV)/.torch setup.cfg pyproject.toml
	$(PIP) install -c constraints.txt -e ".[test,dev]"
	touch $@
