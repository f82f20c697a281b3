# make demo shows what this does, make test shows that it is right; both start from a fresh machine with Python >= 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Byte code is compiled on all cores after installing: pip would do it on one, and later starts would have none where the
# environment cannot be written.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
SPREAD := --numprocesses logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/python -m pytest $(SPREAD)
RESOLUTION_lowest := lowest-direct
RESOLUTION_newest := highest

.DEFAULT_GOAL := help
.PHONY: demo test test-lowest test-newest check campaign soak docs lint clean help

demo: $(VENV)/base.stamp ## distil, export, quantise and measure the embedded default; needs no network once installed
	rm -rf runs/demo
	@echo "This takes some minutes; README.md says how many it took us."
	$(BIN)/compress distill --teacher minilm --data intents --out runs/demo --effort quick

test: lint ## what continuous integration runs: lint, then every test
	$(PYTEST)

test-lowest: build/lowest/stamp ## every test with the oldest versions that pyproject.toml allows
	build/lowest/bin/python -m pytest $(SPREAD)

test-newest: build/newest/stamp ## every test with the newest versions of today
	build/newest/bin/python -m pytest $(SPREAD)

check: lint ## lint, then the quick tests
	$(PYTEST) -m "not slow"

campaign: $(VENV)/dev.stamp ## interrupt, damage and deceive every command, 30 minutes; COMPRESS_CAMPAIGN_SEED=1 draws other cases
	COMPRESS_CAMPAIGN=whole $(BIN)/python -m pytest tests/campaign tests/exporters/test_text.py --numprocesses logical --maxprocesses 8 --dist worksteal

soak: $(VENV)/dev.stamp ## run for 30 minutes each what runs for long, one after the other: is memory flat, is nothing paid twice
	$(BIN)/python -m tests.campaign.soak --minutes 30

docs: $(VENV)/dev.stamp ## build the site into build/site; open build/site/index.html
	$(BIN)/mkdocs build --strict

lint: $(VENV)/dev.stamp ## ruff, mypy and codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

clean: ## remove what make made: the environment, caches, the demo's run
	rm -rf $(VENV) runs/demo build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# What tests is as new as may be: only the versions of what compress needs are at a limit.
build/lowest/stamp build/newest/stamp: build/%/stamp: pyproject.toml
	$(PYTHON) -m venv --clear build/$*
	build/$*/bin/python -m pip install -qq uv
	build/$*/bin/uv pip install --quiet --python build/$*/bin/python --resolution $(RESOLUTION_$*) \
		--editable '.[demo,fast,gguf,lan,openvino,postgresql]'
	build/$*/bin/uv pip install --quiet --python build/$*/bin/python pytest pytest-xdist psutil seqeval sentence-transformers \
		build hatchling mkdocs 'mkdocstrings[python]' pymdown-extensions
	touch $@

$(VENV)/dev.stamp: $(VENV)/base.stamp requirements/dev.txt
	$(PIP) --no-deps --require-hashes -r requirements/dev.txt
	$(COMPILE)
	touch $@

$(VENV)/base.stamp: requirements/base.txt requirements/torch.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python >= 3.11 is needed: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps --require-hashes -r requirements/base.txt
	$(PIP) -r requirements/torch.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	$(COMPILE)
	touch $@
