# From a clean clone: `make demo` shows it working, `make test` proves it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint docs soak format clean

demo: $(VENV)/ready
	$(BIN)/secu demo

test: $(VENV)/ready
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/audit

docs: $(VENV)/ready
	$(BIN)/zensical build --clean --strict

# Kills, interrupts and starves every command that writes, for up to an hour. The tests include a short form.
soak: $(VENV)/ready
	cd benchmarks && OMP_NUM_THREADS=1 ../$(BIN)/python -m soak

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The set-up is repeated when what is installed changes. The stamp is written last, so that a failed set-up is not taken as done.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 4) and "secu needs Python 3.11.4 or newer, got " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .cache
