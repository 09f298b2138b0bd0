# Each target makes what it needs. `make serve` and `make test` are all that a new user types.
PYTHON ?= python3
BIN := .venv/bin
RUNTIME := .venv/.installed
DEV := .venv/.installed-dev
LOAD_TESTERS := .venv-load-testers/.installed
LM_EVAL := .venv-lm-eval/.installed
TRACE_UI := .venv-trace-ui/.installed
AUDIT := .venv-audit/.installed
# Where torch's wheels for CPUs are. They are taken where no NVIDIA driver is: PyPI's bring CUDA,
# gigabytes of it. Empty takes PyPI's.
CPU_WHEELS ?= https://download.pytorch.org/whl/cpu
# Which tests go to which worker: tests/conftest.py.
WORKERS := -n 2 --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help serve stop demo trace-ui guidellm aiperf lm-eval test test-deployed test-slice test-slow test-coverage campaign campaign-short check audit format clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

serve: $(RUNTIME) ## start a server on this machine and send it a first 16K-token question
	@$(BIN)/csps serve $(ARGS)

stop: $(RUNTIME) ## drain and stop the server
	@$(BIN)/csps stop

demo: $(RUNTIME) ## send the question again
	@$(BIN)/csps demo $(ARGS)

trace-ui: $(RUNTIME) $(TRACE_UI) ## start a trace viewer, and a server that sends its traces there
	@$(BIN)/csps trace ui $(ARGS)

guidellm: $(LOAD_TESTERS) ## load-test the running server with guidellm
	@.venv-load-testers/bin/python benchmarks/load_testers.py $@ $(ARGS)

aiperf: $(LOAD_TESTERS) ## load-test the running server with aiperf
	@.venv-load-testers/bin/python benchmarks/load_testers.py $@ $(ARGS)

lm-eval: $(DEV) $(LM_EVAL) ## let lm-eval judge the included model's answers
	$(BIN)/pytest tests/services/test_lm_eval.py -m slow $(ARGS)

test: $(DEV) ## run the tests (minutes, two cores suffice)
	$(BIN)/pytest $(WORKERS) $(ARGS)

test-deployed: $(DEV) ## deploy a server with each scheduling policy, one that trades accuracy, and by csps serve, and ask it
	$(BIN)/pytest tests/end_to_end/test_every_policy.py tests/end_to_end/test_bounds.py tests/end_to_end/test_serve_command.py -m slow $(ARGS)

# Each commit runs another slice, so that some days of work run them all. Where the history is cut
# off, as in a shallow clone, it is the same one.
test-slice: $(DEV) ## run a ten-minute slice of the tests that take long
	$(BIN)/pytest $(WORKERS) -m slow --slice $$(git rev-list --count HEAD 2>/dev/null || echo 0) $(ARGS)

test-slow: $(DEV) ## run the tests that take long as well
	$(BIN)/pytest $(WORKERS) -m "slow or not slow" --hypothesis-profile=slow $(ARGS)

test-coverage: $(DEV) ## run the tests and print which share of each file's lines they reach
	$(BIN)/pytest $(WORKERS) --cov --cov-report=term $(ARGS)

campaign: $(DEV) ## break a deployed server in every way; hours, but a second start goes on
	$(BIN)/python tests/campaign $(ARGS)

campaign-short: $(DEV) ## two minutes of it
	$(BIN)/python tests/campaign --budget 120

check: $(DEV) ## lint, format, types, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini tests benchmarks
	$(BIN)/pytest -q tests/test_import_direction.py

audit: $(AUDIT) ## list known vulnerabilities of what is pinned, and write dist/sbom.json
	@mkdir -p dist
	.venv-audit/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
	  --output-file dist/sbom.json constraints.txt
	.venv-audit/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

format: $(DEV) ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## stop the server, remove the environment and what the server has left behind
	@if [ -e run/ray.json ]; then $(MAKE) --no-print-directory stop; fi
	rm -rf .venv .venv-audit .venv-lm-eval .venv-load-testers .venv-trace-ui run build dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "csps needs Python 3.11 or newer; choose one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv

# Without its dependencies, which the next command takes from where all others come from.
define torch_for_cpus
@if [ -n '$(CPU_WHEELS)' ] && ! command -v nvidia-smi >/dev/null && ! [ -e /proc/driver/nvidia ]; then \
  $(1) install --quiet --disable-pip-version-check --retries 1 --timeout 15 --no-deps \
    --index-url '$(CPU_WHEELS)' $$(grep '^torch==' constraints.txt) || \
  echo "no torch for CPUs at $(CPU_WHEELS): taking the usual index's, which may bring gigabytes of" \
    "CUDA libraries. CPU_WHEELS=URL names another index, CPU_WHEELS= none" >&2; \
fi
endef

$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	$(call torch_for_cpus,$(BIN)/pip)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(call torch_for_cpus,$(BIN)/pip)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(RUNTIME)

# In an environment of their own: their requirements contradict constraints.txt. torch as there.
$(LOAD_TESTERS): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-load-testers
	$(call torch_for_cpus,.venv-load-testers/bin/pip)
	.venv-load-testers/bin/pip install --quiet --disable-pip-version-check \
	  $$(grep '^torch==' constraints.txt) $$(.venv-load-testers/bin/python -c "import tomllib; \
	  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['bench'])")
	@touch $@

# In an environment of its own: thirty packages for one test, and none of them a need of csps.
$(LM_EVAL): Makefile
	$(PYTHON) -m venv .venv-lm-eval
	.venv-lm-eval/bin/pip install --quiet --disable-pip-version-check \
	  'lm-eval[api]==0.4.13' 'transformers>=5.0,<6'
	@touch $@

# In an environment of its own: it is large, and serves another purpose.
$(TRACE_UI): pyproject.toml
	$(PYTHON) -m venv .venv-trace-ui
	.venv-trace-ui/bin/pip install --quiet --disable-pip-version-check \
	  $$(.venv-trace-ui/bin/python -c "import tomllib; \
	  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['ui'])")
	@touch $@

# In an environment of its own: neither the product nor its tests need them.
$(AUDIT): Makefile
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install --quiet --disable-pip-version-check pip-audit==2.10.1 cyclonedx-bom==7.5.0
	@touch $@
