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
PARTS ?=
# The judges of tests/torture begin at seeds of their own in each tree of files: a run repeats
# another one. Empty, or in `make torture`: at new ones.
TORTURE_FROM ?= $(shell git rev-parse 'HEAD^{tree}' 2>/dev/null)

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
# Follows what was installed: it changes with the dependencies, the pins and the torch.
SUM := $(shell (cat pyproject.toml constraints.txt; echo '$(TORCH)') | cksum | tr ' ' '-')
STAMP := $(VENV)/.installed-$(SUM)
# What the demo needs is less, and part of it.
DEMO_STAMP := $(or $(wildcard $(STAMP)),$(VENV)/.installed-demo-$(SUM))
# The tools of .venv come first.
RUN := PATH="$(BIN):$$PATH"

VERL_VENV := .venv-verl
VERL_BIN := $(CURDIR)/$(VERL_VENV)/bin
VERL_STAMP := $(VERL_VENV)/.installed-$(shell (cat pyproject.toml constraints-verl.txt; echo '$(TORCH)') | cksum | tr ' ' '-')

FRAMEWORKS_VENV := .venv-frameworks
FRAMEWORKS_BIN := $(CURDIR)/$(FRAMEWORKS_VENV)/bin
FRAMEWORKS_PINS := constraints-frameworks.txt
FRAMEWORKS_STAMP := $(FRAMEWORKS_VENV)/.installed-$(shell (cat pyproject.toml $(FRAMEWORKS_PINS); echo '$(TORCH)') | cksum | tr ' ' '-')

# Folders with the sources of other projects, for `make test-projects`; an interpreter that has what
# they import, where none is to be made.
PROJECTS ?=
PROJECTS_PYTHON ?=
PROJECTS_VENV := .venv-projects
PROJECTS_BIN := $(CURDIR)/$(PROJECTS_VENV)/bin
PROJECTS_PINS := benchmarks/projects/constraints.txt
PROJECTS_STAMP := $(PROJECTS_VENV)/.installed-$(shell (cat pyproject.toml $(PROJECTS_PINS); echo '$(TORCH)') | cksum | tr ' ' '-')

RELEASE_VENV := .venv-release

.DEFAULT_GOAL := test
.PHONY: demo test test-all torture test-verl test-frameworks test-projects check docs bench bench-checkpoint gpu release-check

demo: $(DEMO_STAMP)
	$(RUN) residency demo $(DEMO_ARGS)

test: $(STAMP)
	$(RUN) TORTURE_FROM=$(TORTURE_FROM) python -m pytest --timeout=300 -n $(JOBS) --dist loadfile $(TEST_ARGS)

# Judges that know the public documentation alone, each file of them for SECONDS seconds, each test
# for ROUNDS seeds at most.
torture: TORTURE_FROM :=
torture: $(STAMP)
	$(RUN) TORTURE_SECONDS=$(SECONDS) TORTURE_ROUNDS=$(ROUNDS) TORTURE_FROM=$(TORTURE_FROM) \
		python -m pytest -m "" -n $(JOBS) --dist loadfile tests/torture $(TEST_ARGS)

# The second tier, and no test of the first: frameworks, the demo's cases, work in another order, and
# every operator, module and optimizer of torch over the simulated accelerator. Long runs and dry runs
# of random scripts take minutes for each seed: `make torture` alone judges them.
test-all: $(STAMP)
	$(RUN) TORTURE_FROM=$(TORTURE_FROM) python -m pytest --timeout=300 -m whole -n $(JOBS) \
		--dist loadfile --ignore tests/torture/test_long_runs.py --ignore tests/torture/test_dry_runs.py $(TEST_ARGS)

# verl pins an older transformers than the other tests take, so it has an environment of its own.
test-verl: $(VERL_STAMP)
	PATH="$(VERL_BIN):$$PATH" python -m pytest --timeout=1200 tests/verl $(TEST_ARGS)

# Axolotl, LLaMA-Factory and torchtitan themselves: they pin other versions than the other tests take.
# Without this environment their tests run against stand-ins.
test-frameworks: $(FRAMEWORKS_STAMP)
	PATH="$(FRAMEWORKS_BIN):$$PATH" python -m pytest --timeout=1200 -m "" tests/integrations/test_axolotl.py \
		tests/integrations/test_llamafactory.py tests/integrations/test_torchtitan.py $(TEST_ARGS)

# The code of XTuner, prime-rl and torchtitan themselves, stock beside ours, on the simulated accelerator:
#   make test-projects PROJECTS="/path/to/xtuner /path/to/prime-rl /path/to/torchtitan"
# Nothing is written into the folders, which are recognised by what is in them.
test-projects: $(if $(PROJECTS_PYTHON),,$(PROJECTS_STAMP))
	PATH="$(PROJECTS_BIN):$$PATH" $(or $(PROJECTS_PYTHON),python) -m benchmarks.projects $(PROJECTS)

check: $(STAMP)
	$(RUN) ruff check src tests benchmarks
	$(RUN) ruff format --check src tests benchmarks
	$(RUN) clang-format --dry-run --Werror src/residency/sim/csrc/*
	$(RUN) mypy --strict src
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
# probe, optimizers, saves, memory, stacks, benchmarks, demo: make gpu PARTS="probe optimizers"
gpu:
	PYTHONPATH=src $(GPU_PYTHON) -m benchmarks.gpu $(PARTS)

# What an upload would publish, in dist/: built, checked, built again from the sdist, and installed into
# an empty environment, from which the demo's first case runs.
release-check:
	rm -rf dist $(RELEASE_VENV)
	$(PYTHON) -m venv $(RELEASE_VENV)/tools
	$(RELEASE_VENV)/tools/bin/python -m pip install --quiet --constraint constraints.txt hatchling twine
	$(RELEASE_VENV)/tools/bin/hatchling build
	$(RELEASE_VENV)/tools/bin/twine check --strict dist/*
	mkdir $(RELEASE_VENV)/sdist && tar -xf dist/*.tar.gz -C $(RELEASE_VENV)/sdist --strip-components=1
	cd $(RELEASE_VENV)/sdist && ../tools/bin/hatchling build --target wheel
	cmp dist/*.whl $(RELEASE_VENV)/sdist/dist/*.whl
	$(PYTHON) -m venv $(RELEASE_VENV)/empty
	$(RELEASE_VENV)/empty/bin/python -m pip install --quiet '$(TORCH)'
	$(RELEASE_VENV)/empty/bin/python -m pip install --quiet --constraint constraints.txt "$$(ls dist/*.whl)[demo]"
	cd $(RELEASE_VENV) && PATH="$$PWD/empty/bin:$$PATH" residency --version
	cd $(RELEASE_VENV) && PATH="$$PWD/empty/bin:$$PATH" residency demo --case resume

# Installs this package with an extra, and pip's options: $(call install,dev,--quiet). torch comes
# first and alone: a later resolution then finds it installed and fetches no other build. The
# simulator needs no more to be compiled, which it is while pip fetches the rest: what uses it then
# finds it, waits for it, or, where that failed, compiles it again and says what is wrong.
define install
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(2) '$(TORCH)'
	PYTHONPATH=src $(BIN)/python -c 'from residency import sim; sim.build()' >$(VENV)/simulator.log 2>&1 & \
	$(BIN)/python -m pip install $(2) --constraint constraints.txt --editable '.[$(1)]'
endef

$(STAMP): pyproject.toml constraints.txt
	$(call install,dev,--quiet)
	rm -f $(VENV)/.installed-*
	touch $@

$(VENV)/.installed-demo-$(SUM): pyproject.toml constraints.txt
	@echo "installing torch and the demo's frameworks into $(VENV), for a minute or two"
	$(call install,demo,--no-compile)
	touch $@

# fastapi and uvicorn are what verl imports and does not ask for. Trinity-RFT is installed without what
# it asks for, of which its worker needs nothing: it wants another transformers than verl 0.9 does.
$(VERL_STAMP): pyproject.toml constraints-verl.txt
	test -x $(VERL_BIN)/python || $(PYTHON) -m venv $(VERL_VENV)
	$(VERL_BIN)/python -m pip install --quiet '$(TORCH)'
	$(VERL_BIN)/python -m pip install --quiet --constraint constraints-verl.txt \
		--editable '.[testing,verl]' fastapi pytest-timeout uvicorn
	$(VERL_BIN)/python -m pip install --quiet --constraint constraints-verl.txt --no-deps trinity-rft
	rm -f $(VERL_VENV)/.installed-*
	touch $@

# Axolotl and LLaMA-Factory without what they ask for, which contradicts each other; of it the tests
# need this. triton asks for no torch.
FRAMEWORKS_NEED := accelerate addict art colorama datasets einops evaluate numba omegaconf peft pillow posthog \
	pytest-timeout python-dotenv torchdata torchtitan transformers triton trl wandb

$(FRAMEWORKS_STAMP): pyproject.toml $(FRAMEWORKS_PINS)
	test -x $(FRAMEWORKS_BIN)/python || $(PYTHON) -m venv $(FRAMEWORKS_VENV)
	$(FRAMEWORKS_BIN)/python -m pip install --quiet '$(TORCH)'
	$(FRAMEWORKS_BIN)/python -m pip install --quiet --constraint $(FRAMEWORKS_PINS) --editable '.[testing]' $(FRAMEWORKS_NEED)
	$(FRAMEWORKS_BIN)/python -m pip install --quiet --constraint $(FRAMEWORKS_PINS) --no-deps axolotl llamafactory
	rm -f $(FRAMEWORKS_VENV)/.installed-*
	touch $@

# What the sources import and the runs need; for the rest there are stand-ins, which the report names.
# triton and torch_checkpointing without what they ask for, which is another build of torch.
PROJECTS_NEED := beartype cyclopts datasets einops grain jaxtyping loguru mmengine more_itertools pillow prime-pydantic-config \
	pydantic safetensors spmd_types tensorboard tensordict tokenizers tomli tomli-w torchdata transformers tyro xxhash

$(PROJECTS_STAMP): pyproject.toml $(PROJECTS_PINS)
	test -x $(PROJECTS_BIN)/python || $(PYTHON) -m venv $(PROJECTS_VENV)
	$(PROJECTS_BIN)/python -m pip install --quiet '$(TORCH)'
	$(PROJECTS_BIN)/python -m pip install --quiet --constraint $(PROJECTS_PINS) --editable '.[sim]' $(PROJECTS_NEED)
	$(PROJECTS_BIN)/python -m pip install --quiet --constraint $(PROJECTS_PINS) --no-deps torch_checkpointing triton
	rm -f $(PROJECTS_VENV)/.installed-*
	touch $@
