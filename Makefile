# `make run` shows what Shardwise does, `make test` checks it. Both need only python3 (3.11 or 3.12) with venv.

VENV := .venv
BIN := $(VENV)/bin
TORCH := 2.13.0
# Older than pyproject.toml, or absent: the environment is made or brought up to date.
INSTALLED := $(VENV)/.installed

.PHONY: run test lint format bench clean

run: $(INSTALLED)
	$(BIN)/shardwise schedule zb-v --stages 4 --microbatches 8
	$(BIN)/shardwise schedule --compare --stages 4 --microbatches 8

test: lint
	$(BIN)/pytest -n auto -q

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	@for benchmark in $(sort $(wildcard benchmarks/*.py)); do \
	    echo "$$benchmark"; $(BIN)/python "$$benchmark" || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests docs benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The first python that is of the right version and can make an environment.
$(INSTALLED): pyproject.toml
	@for python in "$(PYTHON)" python3 python3.12 python3.11; do \
	    if command -v "$$python" >/dev/null && "$$python" -c 'import ensurepip, sys, venv; \
	        sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then found="$$python"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "error: no Python 3.11 or 3.12 with venv was found" >&2; \
	    echo "  try: make PYTHON=/path/to/python3.12, or on Debian and Ubuntu: apt install python3 python3-venv" >&2; \
	    exit 1; \
	fi; \
	echo "installing shardwise, torch and the development tools into $(VENV), once: this takes a few minutes"; \
	"$$found" -m venv $(VENV)
	@# One release of torch by its number, so that all of us test with the same; the package itself takes a range.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
