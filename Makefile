# Every target makes the environment first, but `gpu`, `gpu-bundle` and `clean`; when it is there
# already, that takes no time.
#   make demo [ENGINE=sglang] [MODEL=folder-or-name] [DEMO="--users 5 --turns 3"] [RAG="--chunks 8"]
#   make demo-cluster [MODEL=folder-or-name] [CLUSTER="--documents 3 --tokens 2048 --store redis"]
#   make demo-router [ROUTER="--kill sglang"]
#   make test [PYTEST="-k restart"]
#   make gpu [GPU_PARTS=kernels,worker] [GPU_PYTHON=python3]

PYTHON ?= python3
ENGINE ?= vllm
VENV := .venvs/vllm
RUN := $(VENV)/bin/python
RUN_SGLANG := .venvs/sglang/bin/python
RELEASE := .venvs/release/bin
SGLANG_TESTS := tests/engines/test_sglang*.py
SERVER_TESTS := tests/integration/server
# What is in neither: tests/kernels and SGLang's tests.
VLLM_TESTS = tests/engines tests/adversary tests/integration tests/gpu --ignore-glob='tests/engines/test_sglang*' --ignore-glob='$(SERVER_TESTS)/*'
FAST_TESTS = tests/adapters tests/unit
# The files of tests that need every core. Collecting all the others too takes 16 s.
ALONE = $(filter-out tests/engines/test_sglang%,$(shell grep -lrw --include='test_*.py' whole_machine tests))
# Modules in their order: those with engines come first, and the short ones even out what is left.
SPREAD := -n 2 --dist loadscope --no-loadscope-reorder
# Three targets at a time, because an installation waits for the disk.
LANES := $(MAKE) --no-print-directory -j 3
# The longest first.
ENVIRONMENTS := env-sglang env env-release env-compat
CODE := kvcore kernels/kvcore_kernels adapters/vllm/kvcore_vllm adapters/trtllm/kvcore_trtllm adapters/sglang/kvcore_sglang devtools/kvcore_devtools demo tools/env.py tools/env_load.py tools/env_routers.py tools/docs_hooks.py tools/gpu tools/release.py

# Images of containers often set it to 1. Each process would then compile the sources again.
export PYTHONDONTWRITEBYTECODE :=

SITE = NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

.PHONY: help answers env env-all env-compat env-load env-release env-routers env-sglang demo demo-cluster demo-router test test-all test-vllm test-beside test-compat test-unit test-unit-adapters test-unit-c-o test-unit-p-z mistakes test-sglang test-kernels test-adversary soak model imports lint bench gpu gpu-bundle docs docs-site lock release-files clean clean-env
.DEFAULT_GOAL := help

help:
	@echo "make demo        a real vLLM (ENGINE=sglang: SGLang) with and without kvcore: times, equal answers (minutes)"
	@echo "make demo-cluster  two hosts, a vLLM on each, Mooncake between them (minutes)"
	@echo "make demo-router  vLLM and SGLang behind Dynamo's, vLLM's and SGLang's router (minutes)"
	@echo "make test        the environments, the engines and all tests (about half an hour)"
	@echo "make test-all    those, and the variants that they leave out (hours; nightly)"
	@echo "make answers     records anew what engines without kvcore answer, in tests/answers"
	@echo "make test-sglang  what needs SGLang, in an environment of its own"
	@echo "make test-unit   the fast tests, no engine"
	@echo "make soak        agents on two vLLM behind a server, and what breaks there (an hour; SOAK=\"--minutes 5\")"
	@echo "make mistakes    mistakes of the past, put back one by one: the tests still find them (minutes)"
	@echo "make env-compat  vLLM 0.30 and 0.33, SGLang 0.5.20, in layers over the other environments"
	@echo "make test-kernels  the Triton kernels: interpreted, and compiled for GPUs that are not here"
	@echo "make test-adversary  attacks on real tiers, stores, servers and sockets (docs/security.md)"
	@echo "make test-compat  the probes against each listed release of the engines, from its wheel"
	@echo "make lint        ruff, mypy --strict and the import contract"
	@echo "make bench       the measurements the project promises"
	@echo "make gpu         on a machine with a GPU: tests, measurements, real vLLM (25 minutes at most); no network needed"
	@echo "make gpu-bundle  what such a machine lacks, in folders of at most 60 MiB, in results/gpu-bundle"
	@echo "make docs        write the pages that are generated"
	@echo "make docs-site   the documentation as a site, in site/; fails on a broken link"
	@echo "make lock        write deploy/requirements*.txt anew: versions and hashes, from the package index"
	@echo "make release-files  the packages, their bill of materials, requirements and sums, in dist/"
	@echo "make clean       remove results and caches (clean-env: the environment too)"

env:
	@$(PYTHON) tools/env.py vllm

# The oldest and the newest engines that kvcore is tested with, beside the environments' own.
env-compat: env-vllm-0.30 env-vllm-0.33 env-sglang-0.5.20

env-vllm-%: env
	@$(PYTHON) tools/env.py vllm-$*

env-sglang-%: env-sglang
	@$(PYTHON) tools/env.py sglang-$*

env-all:
	@$(LANES) $(ENVIRONMENTS)

env-sglang:
	@$(PYTHON) tools/env.py sglang

env-release:
	@$(PYTHON) tools/env.py release

env-routers:
	@$(PYTHON) -m tools.env_routers

env-load: env
	@$(PYTHON) -m tools.env_load

demo:
	@$(PYTHON) tools/env.py $(ENGINE)
	.venvs/$(ENGINE)/bin/python -m demo --engine $(ENGINE) $(if $(MODEL),--model "$(MODEL)") $(DEMO)
	.venvs/$(ENGINE)/bin/python -m demo.rag --engine $(ENGINE) $(if $(MODEL),--model "$(MODEL)") $(RAG)

demo-cluster: env
	$(RUN) -m demo.cluster $(if $(MODEL),--model "$(MODEL)") $(CLUSTER)

# Needs vLLM, and Redis from the environment.
soak: env
	$(RUN) -m kvcore_devtools.soak_agents $(SOAK)

demo-router: env env-sglang env-routers
	$(RUN) -m demo.router $(if $(MODEL),--model "$(MODEL)") $(ROUTER)

# Both cores are busy. A test of an engine waits for a quarter of its time, so two of them are on each
# core: vLLM's beside what needs no engine, and then beside SGLang's, whose environment is made
# meanwhile. Kernels, which wait least, come after vLLM's, beside SGLang's and at a lower priority.
CHOSEN = not exhaustive
# Answers of engines without kvcore are read from tests/answers. Nightly, the engines are asked again.
ANSWERS = use
test-all: ANSWERS = verify
test-all: CHOSEN = exhaustive or not exhaustive
PARTS = $(LANES) $(ENVIRONMENTS) test-vllm test-beside docs-site imports CHOSEN="$(CHOSEN)" ANSWERS=$(ANSWERS)
test:
	@$(PARTS)

test-all:
	@$(LANES) env-vllm-0.31 env-routers
	@code=0; \
	$(PARTS) || code=1; \
	set -x; $(RUN) -m pytest $(ALONE) -m whole_machine --answers=$(ANSWERS) $(PYTEST) || code=1; \
	exit $$code
	$(RUN) -m kvcore_devtools.mistakes

# Two parts of `make test`. Each starts as soon as it has its environments. The second shows each of
# its runs when it has ended. What fails in one run does not hide what fails in another.
OPTIONS = $(SPREAD) --answers=$(ANSWERS) $(PYTEST)
test-vllm: env-vllm-0.30 env-vllm-0.33 model
	@code=0; \
	set -x; $(RUN) -m pytest $(VLLM_TESTS) -m "not whole_machine and ($(CHOSEN))" $(OPTIONS) || code=1; \
	nice -n 10 $(RUN) -m pytest tests/kernels -m "$(CHOSEN)" $(OPTIONS) || code=1; \
	exit $$code

test-beside: env-release model
	@code=0; \
	run() { said=$$("$$@" 2>&1) || code=1; printf '+ %s\n%s\n' "$$*" "$$said"; }; \
	run $(RUN) -m pytest $(SERVER_TESTS) $(FAST_TESTS) -m "not whole_machine and ($(CHOSEN))" $(OPTIONS); \
	run $(PYTHON) tools/env.py sglang; \
	run $(PYTHON) tools/env.py sglang-0.5.20; \
	run $(RUN_SGLANG) -m pytest $(SGLANG_TESTS) -m "$(CHOSEN)" $(OPTIONS); \
	exit $$code

test-sglang: env-sglang
	$(RUN_SGLANG) -m kvcore.harness.models smollm2
	$(RUN_SGLANG) -m pytest $(SGLANG_TESTS) $(SPREAD) -m "$(CHOSEN)" $(PYTEST)

model: env
	$(RUN) -m kvcore.harness.models smollm2

imports: env
	$(VENV)/bin/lint-imports

# From nothing: what no test asks for any more is left out.
answers: env-all model
	rm -rf tests/answers
	@$(MAKE) --no-print-directory test-vllm test-beside ANSWERS=record
	$(RUN) -m pytest $(ALONE) -m "whole_machine and ($(CHOSEN))" --answers=record $(PYTEST)

# Three parts side by side, because tests wait for a fifth of their time; without xdist, which would
# collect all tests in each process and import vLLM there: only tests of adapters and one of events do.
# Properties are tried on a fifth of the examples that CI tries; `make test` tries new ones, and more.
UNIT = OMP_NUM_THREADS=1 $(RUN) -m pytest -m "not engine and not slow and not exhaustive" --hypothesis-profile=quick
BESIDE_ADAPTERS := tests/unit/_util tests/unit/cli tests/unit/events
test-unit: env
	@$(LANES) test-unit-adapters test-unit-c-o test-unit-p-z

test-unit-adapters:
	$(UNIT) tests/adapters $(BESIDE_ADAPTERS) $(PYTEST)

test-unit-c-o:
	$(UNIT) tests/unit --ignore-glob='tests/unit/[p-z]*' $(BESIDE_ADAPTERS:%=--ignore-glob='%/*') $(PYTEST)

test-unit-p-z:
	$(UNIT) tests/unit --ignore-glob='tests/unit/[_a-o]*' $(PYTEST)

mistakes: env
	$(RUN) -m kvcore_devtools.mistakes $(MISTAKES)

test-kernels: env
	$(RUN) -m pytest tests/kernels $(PYTEST)

test-adversary: env
	$(RUN) -m kvcore.harness.models smollm2
	$(RUN) -m pytest tests/adversary $(SPREAD) $(PYTEST)

test-compat: env
	$(RUN) -m tools.compat $(COMPAT)

lint: env
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy $(CODE)
	$(VENV)/bin/lint-imports

bench: env
	$(RUN) -m benchmarks $(BENCH)

# These two make no environment: a machine without a network could not. They take .venvs/vllm if it
# is there, else $(PYTHON).
GPU_PYTHON ?= $(if $(wildcard $(RUN)),$(RUN),$(PYTHON))

gpu:
	$(if $(GPU_PARTS),GPU_PARTS="$(GPU_PARTS)") $(GPU_PYTHON) -m tools.gpu

gpu-bundle:
	$(GPU_PYTHON) -m tools.gpu.bundle

docs: env
	$(RUN) -m tools.settings
	$(RUN) -m tools.identity > docs/identity.md
	$(RUN) -m tools.compat --page
	$(RUN) -m tools.gpu.page

docs-site: env
	$(SITE)

lock: env-release
	$(RELEASE)/python -m tools.release lock

release-files: env-release
	rm -rf dist
	UV_PYTHON_DOWNLOADS=never $(RELEASE)/uv build --python $(RELEASE)/python --build-constraints deploy/requirements-build.txt --require-hashes
	$(RELEASE)/python -m tools.release files

clean:
	rm -rf results site build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache

clean-env: clean
	rm -rf $(VENV) .venvs/aiperf .venvs/lmcache .venvs/release .venvs/routers .venvs/sglang .venvs/vllm-* .venvs/sglang-*
