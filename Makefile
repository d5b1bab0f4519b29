# make demo   set up; pretrain, evaluate and compare three kinds of masks on built-in images (minutes on 2 cores)
# make test   set up, lint, and run all tests; make test-fast: only those that take seconds
# The environment in .venv is built from the requirements files and rebuilt only when they change.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
STAMP := $(VENV)/.installed
REQUIREMENTS := requirements.txt requirements-extra.txt requirements-dev.txt

.PHONY: demo test test-fast lint clean
demo: $(STAMP)
	./demo.sh $(VENV)/bin/python

test: $(STAMP) lint
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup

test-fast: $(STAMP)
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup -m "not slow and not cluster"

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

$(STAMP): $(REQUIREMENTS)
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(REQUIREMENTS:%=-r %)
	touch $@

clean:
	rm -rf $(VENV) output_dir
