# One word per job. Everything is installed into .venv, with pip alone.
#   TORCH=torch==2.11.0 make test      another torch
#   PYTHON=python3.12 make test        another interpreter (for a new .venv)
#   GPU_PYTHON=python make gpu         the interpreter that has torch with CUDA

PYTHON ?= python3
TORCH ?= torch==2.13.0
GPU_PYTHON ?= python3
TEST_ARGS ?=
# Processes that the tests are spread over, a file at a time; 0 runs them in one. A test that waits
# leaves two processors to two others.
JOBS ?= 3
DEMO_ARGS ?=
BENCH_ARGS ?=
SECONDS ?= 60
ROUNDS ?=
PART ?=
PARTS ?=
VERSIONS ?= python3.12,torch==2.12.0 python3.13,torch==2.11.0
# The judges of tests/torture begin at seeds of their own in each tree of files: a run repeats
# another one. Empty, or in `make torture`: at new ones.
TORTURE_FROM ?= $(shell git rev-parse 'HEAD^{tree}' 2>/dev/null)

# Both distributions, with an extra of the library: $(call both,dev). The library comes first: pip
# looks for what the simulator asks for on an index where it has not met it yet.
both = --editable '.[$(1)]' --editable ./sim
SOURCES := $(CURDIR)/src:$(CURDIR)/sim/src
PROJECT_FILES := pyproject.toml sim/pyproject.toml

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
# Follows what was installed: it changes with the dependencies, the pins and the torch.
SUM := $(shell (cat $(PROJECT_FILES) constraints.txt; echo '$(TORCH)') | cksum | tr ' ' '-')
STAMP := $(VENV)/.installed-$(SUM)
# What the demo needs is less, and part of it.
DEMO_STAMP := $(or $(wildcard $(STAMP)),$(VENV)/.installed-demo-$(SUM))
# The tools of .venv come first. Hundreds of processes of the tests import the sources, so that their
# bytecode is kept, whatever the shell says.
RUN := PYTHONDONTWRITEBYTECODE= PATH="$(BIN):$$PATH"

# Environments of other pins than the tests'; each is made anew where its pins change.
stamp = $(1)/.installed-$(shell (cat $(PROJECT_FILES) $(2); echo '$(TORCH)') | cksum | tr ' ' '-')

VERL_VENV := .venv-verl
VERL_PINS := constraints-verl.txt
VERL_STAMP := $(call stamp,$(VERL_VENV),$(VERL_PINS))

FRAMEWORKS_VENV := .venv-frameworks
FRAMEWORKS_PINS := constraints-frameworks.txt
FRAMEWORKS_STAMP := $(call stamp,$(FRAMEWORKS_VENV),$(FRAMEWORKS_PINS))

# Folders with the sources of other projects, for `make test-projects`; an interpreter that has what
# they import, where none is to be made.
PROJECTS ?=
PROJECTS_PYTHON ?=
PROJECTS_VENV := .venv-projects
PROJECTS_PINS := benchmarks/projects/constraints.txt
PROJECTS_STAMP := $(call stamp,$(PROJECTS_VENV),$(PROJECTS_PINS))

RELEASE_VENV := .venv-release

.DEFAULT_GOAL := test
.PHONY: demo test test-all test-costs test-versions torture test-verl test-frameworks test-projects check docs bench bench-checkpoint gpu release-check release-versions publish

demo: $(DEMO_STAMP)
	$(RUN) residency demo $(DEMO_ARGS)

# Each process takes a file at a time, in the order of tests/conftest.py.
BY_FILE := --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(RUN) TORTURE_FROM=$(TORTURE_FROM) python -m pytest --timeout=300 -n $(JOBS) $(BY_FILE) $(TEST_ARGS)

# Measures what each test of the first tier takes, and lists anew those that are left to the second.
test-costs: $(STAMP)
	rm -rf build/costs
	-TEST_COSTS=$(CURDIR)/build/costs $(MAKE) test
	$(RUN) python tests/tools/costs.py build/costs

# Judges that know the public documentation alone, each file of them for SECONDS seconds, each test
# for ROUNDS seeds at most.
torture: TORTURE_FROM :=
torture: $(STAMP)
	$(RUN) TORTURE_SECONDS=$(SECONDS) TORTURE_ROUNDS=$(ROUNDS) TORTURE_FROM=$(TORTURE_FROM) \
		python -m pytest -m "" -n $(JOBS) $(BY_FILE) tests/torture $(TEST_ARGS)

# The second tier, and no test of the first: frameworks, the demo's cases, work in another order, and
# every operator, module and optimizer of torch over the simulated accelerator. Long runs and dry runs
# of random scripts take minutes for each seed, or many seeds: `make torture` alone judges them.
#   make test-all PART=2/4             the files of the third of four parts
# Without a part, the first tier under other versions follows.
test-all: $(STAMP)
	$(RUN) TORTURE_FROM=$(TORTURE_FROM) TEST_PART=$(PART) python -m pytest --timeout=900 -m whole -n $(JOBS) \
		$(BY_FILE) --ignore tests/torture/test_long_runs.py --ignore tests/torture/test_dry_runs.py \
		$(TEST_ARGS)
	$(if $(PART),,$(MAKE) test-versions)

# The first tier under other interpreters and torches, each in an environment of its own, which takes
# 6 GiB where torch is a build for CUDA:
#   make test-versions VERSIONS=python3.12,torch==2.12.0
test-versions: $(VERSIONS:%=test-version-%)

# pip may not exchange the torch for another that something else would rather have.
comma := ,
test-version-%:
	mkdir -p build
	echo '$(lastword $(subst $(comma), ,$*))' >build/constraints-$*.txt
	PIP_CONSTRAINT=$(CURDIR)/build/constraints-$*.txt $(MAKE) test VENV=.venv-$(subst $(comma),-,$(subst ==,-,$*)) \
		PYTHON=$(firstword $(subst $(comma), ,$*)) TORCH=$(lastword $(subst $(comma), ,$*))

# verl pins an older transformers than the other tests take, so it has an environment of its own.
test-verl: $(VERL_STAMP)
	PATH="$(CURDIR)/$(VERL_VENV)/bin:$$PATH" python -m pytest --timeout=1200 tests/verl $(TEST_ARGS)

# Axolotl, LLaMA-Factory and torchtitan themselves: they pin other versions than the other tests take.
# Without this environment their tests run against stand-ins.
test-frameworks: $(FRAMEWORKS_STAMP)
	PATH="$(CURDIR)/$(FRAMEWORKS_VENV)/bin:$$PATH" python -m pytest --timeout=1200 -m "" tests/integrations/test_axolotl.py \
		tests/integrations/test_llamafactory.py tests/integrations/test_torchtitan.py $(TEST_ARGS)

# The code of XTuner, prime-rl and torchtitan themselves, stock beside ours, on the simulated accelerator:
#   make test-projects PROJECTS="/path/to/xtuner /path/to/prime-rl /path/to/torchtitan"
# Nothing is written into the folders, which are recognised by what is in them.
test-projects: $(if $(PROJECTS_PYTHON),,$(PROJECTS_STAMP))
	PATH="$(CURDIR)/$(PROJECTS_VENV)/bin:$$PATH" $(or $(PROJECTS_PYTHON),python) -m benchmarks.projects $(PROJECTS)

check: $(STAMP)
	$(RUN) ruff check src sim tests benchmarks
	$(RUN) ruff format --check src sim tests benchmarks
	$(RUN) clang-format --dry-run --Werror sim/src/residency_sim/csrc/*
	$(RUN) mypy --strict src sim/src
	$(RUN) basedpyright --warnings
	$(RUN) python -m pytest -q tests/test_architecture.py

# The site, in build/docs: a page that nothing leads to, or a link that leads nowhere, ends it.
docs: $(STAMP)
	$(RUN) python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

bench: $(STAMP)
	$(RUN) python -m benchmarks

# Beside the peers that are installed: BENCH_ARGS='--size=1GiB --rounds=1' make bench-checkpoint
bench-checkpoint: $(STAMP)
	$(RUN) python -m benchmarks checkpoint $(BENCH_ARGS)

# For a machine with a GPU: probes, the tests on it, benchmarks and the demo, and one dated report.
# Uses an interpreter that has torch with CUDA and what CONTRIBUTING.md names. A part or several, of
# probe, optimizers, saves, memory, stacks, benchmarks, record, demo, atlas, or of tests and figures,
# which are all of the first and the rest but atlas: make gpu PARTS="probe optimizers"
gpu:
	PYTHONPATH=$(SOURCES) $(GPU_PYTHON) -m benchmarks.gpu $(PARTS)

# What an upload would publish, in dist/: both distributions, built, checked, built again from their
# sdists, and installed into an empty environment: the library alone, which saves, restores and says
# what is missing; with the simulator, which a dry run takes; and what the demo's first case needs.
RELEASE_TOOLS := $(CURDIR)/$(RELEASE_VENV)/tools/bin
# In the environment of a folder: $(call installed,folder,extra) and $(call within,folder) command.
define installed
	$(PYTHON) -m venv $(RELEASE_VENV)/$(1)
	$(RELEASE_VENV)/$(1)/bin/python -m pip install --quiet '$(TORCH)'
	$(RELEASE_VENV)/$(1)/bin/python -m pip install --quiet --constraint constraints.txt \
		--find-links dist "$$(ls dist/residency-*.whl)$(2)"
endef
within = cd $(RELEASE_VENV) && PATH="$$PWD/$(1)/bin:$$PATH"

release-check:
	rm -rf dist $(RELEASE_VENV)
	$(PYTHON) -m venv $(RELEASE_VENV)/tools
	$(RELEASE_TOOLS)/python -m pip install --quiet --constraint constraints.txt hatchling twine
	$(RELEASE_TOOLS)/hatchling build --directory $(CURDIR)/dist
	cd sim && $(RELEASE_TOOLS)/hatchling build --directory $(CURDIR)/dist
	$(RELEASE_TOOLS)/twine check --strict dist/*
	set -e; for name in residency residency_sim; do \
		folder=$(CURDIR)/$(RELEASE_VENV)/sdists/$$name; mkdir -p $$folder; \
		tar -xf dist/$$name-*.tar.gz -C $$folder --strip-components=1; \
		(cd $$folder && $(RELEASE_TOOLS)/hatchling build --target wheel); \
		cmp dist/$$name-*.whl $$folder/dist/*.whl; \
	done
	$(call installed,alone)
	$(call within,alone) residency --version
	$(call within,alone) python $(CURDIR)/tests/tools/library_alone.py
	$(call installed,sim,[sim])
	$(call within,sim) residency dry-run --device l4 -- python $(CURDIR)/examples/nanogpt.py
	$(call installed,demo,[demo])
	$(call within,demo) residency demo --case resume

# The same under other interpreters and torches, each in environments of its own:
#   make release-versions VERSIONS=python3.13,torch==2.11.0
release-versions: $(VERSIONS:%=release-version-%)

release-version-%:
	$(MAKE) release-check RELEASE_VENV=.venv-release-$(subst $(comma),-,$(subst ==,-,$*)) \
		PYTHON=$(firstword $(subst $(comma), ,$*)) TORCH=$(lastword $(subst $(comma), ,$*))

# Uploads the files that have just been checked. It asks for the token of the index, or takes it
# from TWINE_PASSWORD.
publish: release-check
	$(RELEASE_TOOLS)/twine upload dist/*

# Installs both distributions with an extra, and pip's options: $(call install,dev,--quiet). torch
# comes first and alone: a later resolution then finds it installed and fetches no other build. The
# simulator needs no more to be compiled, which it is while pip fetches the rest: what uses it then
# finds it, waits for it, or, where that failed, compiles it again and says what is wrong.
define install
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(2) '$(TORCH)'
	PYTHONPATH=$(SOURCES) $(BIN)/python -c 'from residency import sim; sim.build()' >$(VENV)/simulator.log 2>&1 & \
	$(BIN)/python -m pip install $(2) --constraint constraints.txt $(call both,$(1))
endef

$(STAMP): $(PROJECT_FILES) constraints.txt
	$(call install,dev,--quiet)
	rm -f $(VENV)/.installed-*
	touch $@

$(VENV)/.installed-demo-$(SUM): $(PROJECT_FILES) constraints.txt
	@echo "installing torch and the demo's frameworks into $(VENV), for a minute or two"
	$(call install,demo,--no-compile)
	touch $@

# An environment with both: $(call environment,venv,pins,what pip installs with what it asks
# for,what it installs without).
define environment
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet '$(TORCH)'
	$(1)/bin/python -m pip install --quiet --constraint $(2) $(3)
	$(1)/bin/python -m pip install --quiet --constraint $(2) --no-deps $(4)
	rm -f $(1)/.installed-*
	touch $@
endef

# fastapi and uvicorn are what verl imports and does not ask for. Trinity-RFT is installed without what
# it asks for, of which its worker needs nothing: it wants another transformers than verl 0.9 does.
VERL_NEED := --editable '.[testing,verl]' --editable ./sim fastapi pytest-timeout uvicorn

$(VERL_STAMP): $(PROJECT_FILES) $(VERL_PINS)
	$(call environment,$(VERL_VENV),$(VERL_PINS),$(VERL_NEED),trinity-rft)

# Axolotl and LLaMA-Factory without what they ask for, which contradicts each other; of it the tests
# need this. triton asks for no torch.
FRAMEWORKS_NEED := $(call both,testing) accelerate addict art colorama datasets einops evaluate numba omegaconf peft pillow \
	posthog pytest-timeout python-dotenv torchdata torchtitan transformers triton trl wandb

$(FRAMEWORKS_STAMP): $(PROJECT_FILES) $(FRAMEWORKS_PINS)
	$(call environment,$(FRAMEWORKS_VENV),$(FRAMEWORKS_PINS),$(FRAMEWORKS_NEED),axolotl llamafactory)

# What the sources import and the runs need; for the rest there are stand-ins, which the report names.
# triton and torch_checkpointing without what they ask for, which is another build of torch.
PROJECTS_NEED := $(call both,sim) beartype cyclopts datasets einops grain jaxtyping loguru mmengine more_itertools pillow \
	prime-pydantic-config pydantic safetensors spmd_types tensorboard tensordict tokenizers tomli tomli-w torchdata \
	transformers tyro xxhash

$(PROJECTS_STAMP): $(PROJECT_FILES) $(PROJECTS_PINS)
	$(call environment,$(PROJECTS_VENV),$(PROJECTS_PINS),$(PROJECTS_NEED),torch_checkpointing triton)
