# Each target makes its own virtual environment and installs pinned versions into it.
PYTHON ?= python3
VENV ?= .venv
OLDEST_VENV ?= .venv-oldest
# Two processes of one thread each: the suite is many small models, which more threads would not speed up.
PYTEST_FLAGS ?= -n 2
STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-tests
OLDEST_STAMP := $(OLDEST_VENV)/.installed

.PHONY: demo test test-oldest lint

demo: $(STAMP)
	$(VENV)/bin/kvbridge demo

test: $(TEST_STAMP)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(PYTEST_FLAGS)

test-oldest: $(OLDEST_STAMP)
	OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python -m pytest $(PYTEST_FLAGS) -m core

lint: $(TEST_STAMP)
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy kvbridge_hf

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch numpy
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(TEST_STAMP): $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,eval]"
	touch $@

$(OLDEST_STAMP): pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet --constraint constraints-oldest.txt torch numpy
	$(OLDEST_VENV)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable ".[dev]"
	touch $@
