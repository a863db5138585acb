# Needs: make and Python 3.11 or newer with its venv module. Everything else comes into .venv (Python packages, and Node as a
# Python package) and tests/node/node_modules (the npm packages that tests talk to). The tests also need PostgreSQL and
# Redis, which `make test` installs when it may (root, on Debian) and asks for otherwise.
#
#   make demo                 the demo, in its own environment
#   make test                 everything CI checks
#   make test ARGS="-k name"  pytest only, with these arguments
#   make lint                 the checks without the tests
#   make docs                 the documentation, into site/
#   make bench                the benchmarks
#   make clean                remove all of the above

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
DEMO_EXTRAS := providers,server
COVERAGE := 95

# An advertisement, no warning of the build.
export NO_MKDOCS_2_WARNING := 1
# Node, npm and the servers that come as wheels are found by name, in recipes and in tests.
export PATH := $(CURDIR)/$(BIN):$(PATH)

VENV_STAMP := $(VENV)/.stamp-venv
DEMO_STAMP := $(VENV)/.stamp-demo
DEV_STAMP := $(VENV)/.stamp-dev
NODE_STAMP := tests/node/node_modules/.stamp

.PHONY: help demo test lint docs bench clean install servers

help:
	@sed -n 's/^#   //p' Makefile

# --- environments ---------------------------------------------------------------------------------------------------------

$(VENV_STAMP):
	@is_311() { command -v "$$1" >/dev/null && "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }; \
	python=; \
	for candidate in python3.11 python3; do \
	    if is_311 "$$candidate"; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "stepwell needs Python 3.11 or newer, and neither python3.11 nor python3 is one." >&2; \
	    echo "Install it and run this command again, on Debian: apt-get install python3 python3-venv" >&2; \
	    exit 1; \
	fi; \
	if ! "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
	    package=$$("$$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$$package"; \
	    else \
	        echo "$$python has no venv module. Install it and run this command again: sudo apt-get install $$package" >&2; \
	        exit 1; \
	    fi; \
	fi; \
	echo "Creating $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv $(VENV)
	@touch $@

$(DEMO_STAMP): pyproject.toml $(VENV_STAMP)
	@echo "Installing stepwell[$(DEMO_EXTRAS)] into $(VENV)"
	@$(PIP_INSTALL) -e '.[$(DEMO_EXTRAS)]'
	@touch $@

$(DEV_STAMP): pyproject.toml $(VENV_STAMP)
	@echo "Installing stepwell[dev] into $(VENV)"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $(DEMO_STAMP) $@

$(NODE_STAMP): tests/node/package.json tests/node/package-lock.json $(DEV_STAMP)
	@echo "Installing the npm packages of tests/node"
	@npm ci --prefix tests/node --ignore-scripts --no-fund --no-audit --loglevel=error || { \
	    echo "The provider tests need the npm packages of tests/node. See the error above, then run:" >&2; \
	    echo "    $(BIN)/npm ci --prefix tests/node --ignore-scripts" >&2; \
	    exit 1; \
	}
	@touch $@

# The tests start PostgreSQL and Redis themselves; here they are only installed.
servers:
	@tests/servers/install.sh

install: $(DEV_STAMP) $(NODE_STAMP) servers

# --- what people call -----------------------------------------------------------------------------------------------------

demo: $(DEMO_STAMP)
	@$(BIN)/stepwell demo $(ARGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	if [ -d tests/typing ]; then $(BIN)/mypy; fi

docs: $(DEV_STAMP)
	$(BIN)/mkdocs build --strict

ifeq ($(strip $(ARGS)),)
test: $(NODE_STAMP) servers lint docs
	$(BIN)/pytest --cov --cov-report=term --cov-fail-under=$(COVERAGE)
else
test: $(NODE_STAMP) servers
	$(BIN)/pytest $(ARGS)
endif

bench: $(DEV_STAMP)
	$(BIN)/python -m bench $(ARGS)

clean:
	rm -rf $(VENV) tests/node/node_modules site dist build .coverage .coverage.* htmlcov \
	    .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
