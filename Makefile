# Two commands matter: `make book` and `make test`. Both make the environment first, in .venv, and use it again the next time.
.POSIX:
.SUFFIXES:
.NOTPARALLEL: # what runs next to a measurement spoils it
.PHONY: help book test test-all raytest lint smoke lab clean

PY = .venv/bin/python
STAMP = .venv/.nanoinfer-installed
LOCK = requirements.lock
PROFILE = laptop
# make counts what it leaves out: these tests need a GPU, a browser, Ray or the open internet
HERE = not gpu and not browser and not ray and not network
# two workers; the tests of a file stay together, and with them the models and servers that they share
TWO = -n 2 --dist loadfile

export HF_HUB_DISABLE_TELEMETRY = 1
export DO_NOT_TRACK = 1
# as nanoinfer/__init__.py has it, for kernels that import torch first
export GOMP_SPINCOUNT = 10000
export PIP_DISABLE_PIP_VERSION_CHECK = 1

help: ## say what there is
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1: /'

book: $(STAMP) ## run every chapter on this machine and build the book into _build/html
	@$(PY) -m nanoinfer book --profile $(PROFILE)

test: $(STAMP) ## run the quick tests, some minutes (what needs a GPU, a browser, Ray or the open internet is left out)
	@$(PY) -m pytest $(TWO) -m "$(HERE) and not slow"

test-all: $(STAMP) ## run the slow tests too, and with all of Hypothesis' examples
	@HYPOTHESIS_PROFILE=ci $(PY) -m pytest $(TWO) -m "$(HERE)"

# Ray is not in the lock: it gets an environment of its own, on top of the project's.
raytest: $(STAMP) ## the tests that need Ray, some minutes
	@set -e; \
	$(PY) -m venv _build/ray; \
	packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	echo "import site; site.addsitedir('$$($(PY) -c "$$packages")')" >"$$(_build/ray/bin/python -c "$$packages")/project.pth"; \
	_build/ray/bin/python -m pip install --quiet --progress-bar off "ray[serve]==2.60.0"; \
	_build/ray/bin/python -m pytest -q -m ray tests

lint: $(STAMP) ## ruff, its formatter and mypy in strict mode
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

smoke: $(STAMP) ## run every chapter on a tiny random model: seconds, and no measurements
	@$(PY) -m nanoinfer run --profile smoke

lab: $(STAMP) ## open the chapters in JupyterLab
	@$(PY) -m jupyterlab notebooks

clean: ## remove what was built, but the environment and the model stay
	rm -rf _build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The candidates are really run: a name on the PATH may be a shim that starts nothing.
$(STAMP): $(LOCK) pyproject.toml
	@set -e; \
	fits='import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; \
	if ! $(PY) -c "$$fits" 2>/dev/null; then \
	  found=; \
	  for python in python3 python3.12 python3.13 python3.11; do \
	    if $$python -c "$$fits" >/dev/null 2>&1; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "nanoinfer needs Python 3.11, 3.12 or 3.13 with its venv module (Debian and Ubuntu: apt install python3 python3-venv)" >&2; exit 1; \
	  fi; \
	  echo "Making .venv with $$($$found -V) ($$found)"; \
	  rm -rf .venv; $$found -m venv .venv; \
	fi; \
	$(PY) scripts/install.py || { \
	  echo "The environment is not complete: pip's reason stands above. Mend it and run make again; it goes on where it stopped." >&2; exit 1; }; \
	touch $@; echo "The environment is ready: .venv"
