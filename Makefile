# `make demo` and `make test` set up all they need in .venv; see README.md.
PYTHON_VENV := .venv/bin/python

.PHONY: help demo test gpu-test bench-save-overhead lint clean

help:
	@echo "make demo                 restart a real vLLM server and answer from stored KV"
	@echo "make test                 lint, types, import contracts and all tests"
	@echo "make gpu-test             the tests that need an NVIDIA GPU"
	@echo "make bench-save-overhead  what saving costs the engine"
	@echo "make lint                 the checks of make test that are not tests"
	@echo "make clean                remove caches and build products"

demo:
	scripts/setup_env.sh demo
	$(PYTHON_VENV) benchmarks/demo.py $(ARGS)

test:
	scripts/setup_env.sh test
	scripts/check

gpu-test:
	@nvidia-smi -L 2>/dev/null | grep -q '^GPU ' || { echo "make gpu-test needs an NVIDIA GPU; none answers here" >&2; exit 1; }
	scripts/setup_env.sh test
	$(PYTHON_VENV) -m pytest -m gpu $(ARGS)

bench-save-overhead:
	scripts/setup_env.sh demo
	$(PYTHON_VENV) benchmarks/save_overhead.py $(ARGS)

lint:
	scripts/setup_env.sh test
	scripts/check lint

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find fx_kvbackend tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
