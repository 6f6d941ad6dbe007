# Two commands do everything: `make demo` and `make test`. Both build their own virtual environment.
PYTHON ?= python3
VENV := .venv

.PHONY: demo test check bench clean

demo: $(VENV)/installed
	$(VENV)/bin/operations demo

test: check
	scripts/test

check: $(VENV)/developed
	scripts/check

bench: $(VENV)/developed
	scripts/bench

$(VENV)/installed: pyproject.toml scripts/install
	PYTHON=$(PYTHON) scripts/install

$(VENV)/developed: pyproject.toml scripts/install
	PYTHON=$(PYTHON) scripts/install --dev

clean:
	rm -rf $(VENV)
