# Two commands do everything: `make demo` and `make test`. Both build their own virtual environment.
PYTHON ?= python3
VENV := .venv
# The tests start hundreds of processes; without bytecode each of them would compile the package again.
export PYTHONDONTWRITEBYTECODE :=
STARTED := $(shell date +%s)
seconds = $$(($$(date +%s) - $(STARTED))) s

.PHONY: demo test check bench docs clean

demo: $(VENV)/installed
	@echo "set up after $(seconds)"
	$(VENV)/bin/operations demo $(DEMO)
	@echo "make demo took $(seconds)"

# The demo first: on a clean clone both commands are then timed as a newcomer meets them.
test:
	@$(MAKE) --no-print-directory demo DEMO=--once
	@$(MAKE) --no-print-directory $(VENV)/developed
	scripts/test --checks
	@echo "make test took $(seconds), the demo included"

check: $(VENV)/developed
	scripts/check

bench: $(VENV)/developed
	scripts/bench

docs:
	scripts/docs

$(VENV)/installed: pyproject.toml requirements.lock scripts/install
	PYTHON=$(PYTHON) scripts/install

$(VENV)/developed: pyproject.toml requirements-dev.lock scripts/install
	PYTHON=$(PYTHON) scripts/install --dev

clean:
	rm -rf $(VENV) .matrix build
