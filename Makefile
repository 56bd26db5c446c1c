# `make demo` and `make test` are all a newcomer needs: each sets up .venv on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests of a file share what they set up, so a file stays on one core; each process computes with one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

COMPOSE := docker compose -f containers/compose.yaml --profile monitoring
# Writes the list of packages of a release. It has an environment of its own, since nothing else needs it.
CYCLONEDX := cyclonedx-bom==7.5.0

# Containers often forbid Python to keep what it has compiled; then each of the many processes would compile all anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo federation containers test test-all check docs check-pages wheel sbom format clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/installed  ## set up .venv with everything

$(VENV)/installed: pyproject.toml packages/fedclade-papers/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fedclade needs Python 3.11 or later; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing fedclade with all that its tests and examples need into $(VENV)/, once: some minutes, about 3.6 GB."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[dev]" -e packages/fedclade-papers
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps byzfl==0.0.11 opacus==1.6.0  # what tests use of them needs no torchvision
	touch $@

demo: install  ## the main job on handwritten digits: FedAvg, CFL, oracle and local in one table
	$(BIN)/fedclade demo

federation: install  ## a server and NODES=4 clients as processes on this machine, over TLS; DATA=digits or mnist
	$(BIN)/python examples/flower/federation.py --nodes $(or $(NODES),4) --data $(or $(DATA),digits)

containers:  ## build the images of containers/, and run a federation in them; needs docker compose
	docker build --build-arg TORCH_INDEX="$(TORCH_INDEX)" -f containers/Containerfile -t fedclade .
	docker run --rm fedclade fedclade run cfl-digits-label-swap --rounds 2 --out /tmp/first --quiet
	$(COMPOSE) up --build --detach prometheus grafana
	$(COMPOSE) run --rm -e RUN_CONFIG="network.metrics=9100 network.metrics_address=0.0.0.0" operator
	$(COMPOSE) exec -T prometheus wget -qO- "http://localhost:9090/api/v1/query?query=max_over_time(fedclade_round%5B1h%5D)" \
		| grep '"value"'
	$(COMPOSE) exec -T grafana wget -qO- http://localhost:3000/api/health
	$(COMPOSE) down --volumes

test: install  ## the quick tests, some at a time on each core
	$(PYTEST) -m "not slow and not long and not scheduled"

test-all: test  ## the quick tests, and then all others: real processes, long runs, whole experiments
	$(PYTEST) -m "(slow or long) and not scheduled"

.PHONY: test-scheduled test-bounds
test-scheduled: install  ## the tests that a weekly workflow runs: worked examples, and more federations of real processes
	$(PYTEST) -m scheduled

BOUNDS := lowest newest
test-bounds: install  ## tests with the lowest and the newest versions of all dependencies, in new environments
	for which in $(BOUNDS); do $(BIN)/python tests/versions/check_versions.py $$which $(ARGUMENTS) || exit 1; done

check: install  ## lint, types, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: install  ## the site, in site/; a warning is an error; with FEDCLADE_DOCS_EXECUTE=true notebooks are executed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

check-pages: docs  ## check pages of the site in Chromium (PAGES="faq.html ..."; else one of each kind): accessibility, width, and that nothing is loaded from elsewhere
	$(BIN)/python docs/check_pages.py site $(PAGES)

wheel: install  ## build the wheels, and use them in an environment that has nothing else
	$(BIN)/python tests/wheel/check_wheel.py $(ARGUMENTS)

sbom: install  ## list what fedclade[all] installs, with licences, in sbom.cdx.json (CycloneDX)
	rm -rf build/sbom && $(PYTHON) -m venv build/sbom/all && $(PYTHON) -m venv build/sbom/tool
	build/sbom/all/bin/python -m pip install --quiet --constraint=constraints.txt ".[all]"
	build/sbom/tool/bin/python -m pip install --quiet $(CYCLONEDX)
	build/sbom/tool/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library \
		--output-reproducible --output-file sbom.cdx.json build/sbom/all/bin/python

format: install  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and caches
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
