# `make help` lists what there is to do. Everything runs in .venv, which the first command that needs it makes.

PYTHON ?=
VENV   := .venv
VENV42 := .venv42
STAMP   := $(VENV)/.installed
STAMP42 := $(VENV42)/.installed
BENCH_STAMP := $(VENV)/.bench-installed
DOCS_STAMP  := $(VENV)/.docs-installed
BIN    := $(VENV)/bin
BIN42  := $(VENV42)/bin

# The first Python of 3.10 to 3.13 on this machine, unless PYTHON= names one.
FIND_PYTHON = for p in $(if $(PYTHON),"$(PYTHON)",python3.11 python3.12 python3.13 python3.10 python3); do \
	if "$$p" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then echo "$$p"; exit 0; fi; done; \
	echo "make: no Python of 3.10 to 3.13 found$(if $(PYTHON), at PYTHON=$(PYTHON),); install one, or name it with make PYTHON=/path/to/python3.11" >&2; exit 1

# $(call make_venv,directory,constraints file,extra of RayDP,what it is)
define make_venv
	@set -e; python=$$($(FIND_PYTHON)); \
	echo "Making $(1) with $$("$$python" --version): $(4)"; \
	[ -x $(1)/bin/python ] || "$$python" -m venv $(1); \
	echo "Installing the versions of $(2); this downloads about 1 GB the first time and takes some minutes ..."; \
	$(1)/bin/python -m pip install -qq --disable-pip-version-check \
		--editable '.[dev,demo,java,$(3)]' --constraint $(2); \
	touch $(1)/.installed; echo "$(1) is ready."
endef

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)$$/\1\t\2/' | \
		while IFS="$$(printf '\t')" read -r name text; do printf '  %-13s %s\n' "$$name" "$$text"; done

.PHONY: venv venv42
venv: $(STAMP) ## Make .venv with the tested versions (Spark 3.5); PYTHON=... chooses the interpreter
venv42: $(STAMP42) ## Make .venv42 with the second tested pair (Spark 4.2)

$(STAMP): pyproject.toml constraints.txt
	$(call make_venv,$(VENV),constraints.txt,raydp,Spark 3.5 on Ray)

$(STAMP42): pyproject.toml constraints-spark42.txt
	$(call make_venv,$(VENV42),constraints-spark42.txt,raydp-spark4,Spark 4.2 on Ray)

.PHONY: demo
demo: $(STAMP) ## Replay a year of flights as a stream, query and check its state; ARGS=--kill-host; ARGS=--kafka: payments
	@$(if $(filter --kafka,$(ARGS)),$(BIN)/python -m tests.services.artifacts kafka spark35-kafka && \
		$(BIN)/python -m examples.fraud $(filter-out --kafka,$(ARGS)),$(BIN)/statestore demo $(ARGS))

.PHONY: test test-slow test-fast test-matrix test-thorough test-pythons
test: $(STAMP) ## Run the tests on Spark 3.5, a representative part of what takes long, and say how long it took
	@$(BIN)/python -m tests.run $(ARGS)

test-slow: $(STAMP) $(STAMP42) ## Run what make test leaves out: slow tests, and all those on Spark 4.2
	@$(BIN)/python -m tests.run --slow $(ARGS)

test-thorough: $(STAMP) $(STAMP42) ## Run what both leave out: the other line of Spark for each stream, more random work
	@$(BIN)/python -m tests.run --thorough $(ARGS)

# The other Pythons that are promised: each that is on this machine, by name or as pyenv keeps them.
OTHER_PYTHONS := 3.10 3.12 3.13

test-pythons: ## Run the tests without clusters, and the demo, on the other Pythons that are on this machine
	@venvs=; for version in $(OTHER_PYTHONS); do found=; \
		for p in "python$$version" "$$HOME"/.pyenv/versions/"$$version".*/bin/python; do \
			if [ -z "$$found" ] && "$$p" -c 'pass' 2>/dev/null; then found=$$p; fi; done; \
		if [ -z "$$found" ]; then echo "Python $$version is skipped: there is no python$$version here, nor in ~/.pyenv/versions."; continue; fi; \
		venv=.venv$$(echo "$$version" | tr -d .); \
		$(MAKE) --no-print-directory "$$venv/.installed" PYTHON="$$found" || exit 1; venvs="$$venvs $$venv"; done; \
	if [ -n "$$venvs" ]; then set -- $$venvs; "$$1/bin/python" -m tests.run --pythons $$venvs; fi

.venv3%/.installed: pyproject.toml constraints.txt
	$(call make_venv,.venv3$*,constraints.txt,raydp,Spark 3.5 on Ray)

test-matrix: $(STAMP) ## Run a part of the tests in each supported environment, which it makes in .venvs; ARGS="--cells spark-4.3"
	@$(BIN)/python -m tests.matrix $(ARGS)

test-fast: $(STAMP) ## Run the tests that need neither Ray nor Spark, nor long (seconds)
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "not ray and not spark and not long" $(ARGS)

.PHONY: services
services: $(STAMP) ## Fetch Kafka, HDFS and YARN for the tests that need them into .services; needs Maven
	@$(BIN)/python -m tests.services.artifacts $(ARGS)

.PHONY: test-services
test-services: $(STAMP) $(STAMP42) services ## Run the tests over a real Kafka, HDFS and YARN
	@$(BIN)/python -m tests.run --services $(ARGS)

.PHONY: lab
lab: $(STAMP) ## Four machines on this one, a stream over them, and a prompt to kill, cut off and slow machines; needs root
	@$(BIN)/python -m tests.lab $(ARGS)

.PHONY: lint format
lint: $(STAMP) ## Check style (ruff), types (mypy --strict) and layers (import-linter)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

format: $(STAMP) ## Rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: docs
docs: $(DOCS_STAMP) ## Build the site from docs/ into docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx -b html -W --keep-going -q -j auto docs docs/_build/html
	@echo "The site is docs/_build/html/index.html"

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[docs]' --constraint constraints.txt
	@touch $@

.PHONY: reference
reference: $(STAMP) ## Write the generated blocks of docs/reference from docstrings, options, commands and metrics
	@$(BIN)/python -m tests.docs.reference

.PHONY: screenshots
screenshots: $(STAMP) ## Take the pictures of the page for the docs, in docs/images; needs Debian's chromium
	$(BIN)/python -m tests.spark_bridge.ui.screenshots

.PHONY: manifests
manifests: $(STAMP) ## Write deploy/kubernetes from the chart; needs Debian's golang-go and golang-github-masterminds-sprig-dev
	$(BIN)/python -m tests.deploy.rendered_chart

.PHONY: bench bench-smoke bench-list
bench: $(BENCH_STAMP) ## Measure every comparison and write benchmarks/RESULTS.md, hours; ARGS="throughput --keys 100000" for one
	$(BIN)/python benchmarks/bench.py $(ARGS)

bench-smoke: $(BENCH_STAMP) ## The same on small sizes: are results equal, and has anything become much slower?
	$(BIN)/python benchmarks/bench.py --smoke $(ARGS)

bench-list: $(STAMP) ## Name the comparisons and their sizes
	@$(BIN)/python benchmarks/bench.py --list

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[bench]' --constraint constraints.txt
	@touch $@

.PHONY: clean
clean: ## Remove the environments, caches and build products
	rm -rf $(VENV) $(VENV42) .services .venv3* .venvs .venv-quix benchmarks/.environments docs/_build build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
