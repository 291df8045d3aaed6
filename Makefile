# `make run` trains a small model on this machine, `make test` checks it. Both need only python3 (3.11 or newer) with venv.

VENV := .venv
BIN := $(VENV)/bin
TORCH := 2.13.0
TOOLS := tests/tools.txt
# Older than pyproject.toml or the list of tools, or absent: the environment is made or brought up to date.
INSTALLED := $(VENV)/.installed

.PHONY: run test test-gpu browser slurm guidellm lint format bench clean

run: $(INSTALLED)
	$(BIN)/shardwise train

# Two workers more than cores, each with one thread: while one waits for its processes another computes. Tests that share
# ranks are in four groups, each in one worker: ranks are processes too. The linter and the type checker run beside
# them; what they say comes at the end. All must pass. What Python compiles is kept, also where that is switched off:
# every process that a test starts would compile it again.
WORKERS = $(shell $(BIN)/python -c 'import os; print((os.cpu_count() or 1) + 2)')
test: $(INSTALLED) browser slurm
	@said=$$(mktemp); \
	$(MAKE) --no-print-directory lint >"$$said" 2>&1 & lint=$$!; \
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadgroup -q --durations=15; tests=$$?; \
	wait $$lint; lint=$$?; \
	cat "$$said"; rm -f "$$said"; \
	[ $$lint = 0 ] || echo "error: the linter, the formatter or the type checker is not content: see above" >&2; \
	[ $$tests = 0 ] && [ $$lint = 0 ]

# On a machine with a GPU, with the torch that it has: every plan over NCCL against one device, in fp32 and bf16, models
# of Hugging Face, ranks that are lost, bad input, and the tests that need a GPU. Nothing is installed; what cannot be run
# is said. With SECONDS=560 it stops in time, with status 3, and goes on when it is called again.
test-gpu:
	PYTHONPATH=src:.$(if $(PYTHONPATH),:$(PYTHONPATH)) $(or $(PYTHON),python3) -m tests.gpu $(if $(SECONDS),--seconds $(SECONDS))

# Tests of the report page open it in a real browser. Where none can be installed they are skipped, and say so.
browser:
	@has() { command -v chromedriver >/dev/null && \
	    { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null; }; \
	if ! has && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing chromium and its driver, once: tests of the report page open it in a real browser"; \
	    apt-get update -qq >/dev/null 2>&1; \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver >/dev/null 2>&1; \
	fi; \
	if ! has; then \
	    echo "note: no chromium with chromedriver was found, so the tests in tests/explain/report are skipped" >&2; \
	    echo "  try: sudo apt install chromium chromium-driver" >&2; \
	fi

# Tests of `shardwise launch` start a real Slurm and a real ssh server on this machine. Where they cannot be installed the
# tests are skipped, and say so.
slurm:
	@has() { PATH=$$PATH:/usr/sbin; for program in slurmctld slurmd munged sbatch sshd; do command -v $$program >/dev/null || return 1; done; }; \
	if ! has && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing Slurm, munge and an ssh server, once: tests of shardwise launch start them"; \
	    apt-get update -qq >/dev/null 2>&1; \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	        slurmctld slurmd slurm-client munge openssh-server >/dev/null 2>&1; \
	fi; \
	if ! has; then \
	    echo "note: no Slurm or no ssh server was found, so tests in tests/launch are skipped" >&2; \
	    echo "  try: sudo apt install slurmctld slurmd slurm-client munge openssh-server" >&2; \
	fi

# A load generator that `pytest --whole` sends to the server. It needs releases of its own, so it has an environment of its
# own, which finds all else, torch too, in ours.
guidellm: $(VENV)/guidellm/bin/guidellm
$(VENV)/guidellm/bin/guidellm: $(INSTALLED)
	$(BIN)/python -m venv --without-pip $(VENV)/guidellm
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	    "$$($(VENV)/guidellm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth"
	$(VENV)/guidellm/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(TOOLS) guidellm
	@touch $@

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

# The first python that is of the right version and can make an environment; of those of the same version the quickest.
# One that was compiled without a profile, as pyenv does by default, takes half as long again as Debian's for a loop of
# small calls (3.11, aarch64). `make PYTHON=...` says which one.
FITS = import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
VERSION = import sys; print(*sys.version_info[:2])
HOW_LONG = import timeit; print(int(1e6 * min(timeit.repeat("[str(f(i)) for i in range(999)]", "f = lambda i: getattr(i, \"real\", i)", number=200))))
$(INSTALLED): pyproject.toml $(TOOLS)
	@for python in "$(PYTHON)" python3 python3.12 python3.13 python3.14 python3.11; do \
	    if command -v "$$python" >/dev/null && "$$python" -c '$(FITS)' 2>/dev/null; then found="$$python"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "error: no Python 3.11 or newer with venv was found" >&2; \
	    echo "  try: make PYTHON=/path/to/python3.12, or on Debian and Ubuntu: apt install python3 python3-venv" >&2; \
	    exit 1; \
	fi; \
	if [ -z "$(PYTHON)" ] && [ "$$("$$found" -c '$(VERSION)')" = "$$(/usr/bin/python3 -c '$(VERSION)' 2>/dev/null)" ] && \
	    /usr/bin/python3 -c '$(FITS)' 2>/dev/null && \
	    [ "$$(/usr/bin/python3 -c '$(HOW_LONG)')" -lt "$$("$$found" -c '$(HOW_LONG)')" ]; then found=/usr/bin/python3; fi; \
	echo "installing shardwise, torch and the development tools into $(VENV), once: this takes a few minutes"; \
	"$$found" -m venv $(VENV)
	@# One release of torch and of each tool by its number, so that all of us test with the same; the package itself takes
	@# ranges. Where a release cannot be had, the newest is taken, and said.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(TOOLS) --editable '.[dev]' || { \
	    echo "note: not every release that $(TOOLS) names can be had here; the newest ones are taken instead" >&2; \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'; }
	@touch $@
