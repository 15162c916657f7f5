# Each target sets up .venv by itself, with what it needs and no more: once, and again only when the requirements change.
#   make test ARGS="-k norm"      passes ARGS to pytest
#   make test DGL=1               compares with DGL, too: installs it and torch (Python 3.11 only)
#   make demo PYTHON=/path/to/it  chooses the Python that .venv is made with, one of `pythons` in settings.ini
DATA   ?= digits
ARGS   ?=
DGL    ?=
PYTHON ?=
override DATA := $(or $(strip $(DATA)),digits)

BIN     := .venv/bin
COMMA   := ,
PYTHONS := $(shell sed -n 's/^pythons = //p' settings.ini)
PYENV   := $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions
# A name on the PATH proves little (pyenv's shims are there for versions that are not), so each candidate is run.
CANDIDATES = $(PYTHONS:%=python%) python3 python $(foreach v,$(PYTHONS),$(wildcard $(PYENV)/$(v).*/bin/python))
SUITABLE   = import sys, venv, ensurepip; sys.exit("%d.%d" % sys.version_info[:2] not in "$(PYTHONS)".split())

.PHONY: help demo check test docs readme bench clean distclean
.NOTPARALLEL:

help:
	@echo 'make demo [DATA=digits|cifar10|a/folder]  solve a puzzle and complete photographs with trained models, then train on'
	@echo '                                          pictures and complete occluded ones (digits: odd nodes, too); to out/'
	@echo 'make check                                style, types and the proofs of the core: a few minutes'
	@echo 'make test [DGL=1]                         run every notebook and every test (DGL=1: compare with DGL, too)'
	@echo 'make docs                                 build the documentation site (without Quarto, stage and check its pages)'
	@echo 'make readme                               README.md, and the list of the engine room'
	@echo 'make bench                                run every script of benchmarks/'
	@echo 'make clean | distclean                    remove what was built | and .venv'

# A .venv stays on the Python that it was made with; to name another one is an error.
ifneq ($(and $(PYTHON),$(wildcard $(BIN)/python),$(filter-out help clean distclean,$(or $(MAKECMDGOALS),demo))),)
  version = $(shell { "$(1)" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; } 2>/dev/null)
  MADE_WITH := $(call version,$(BIN)/python)
  ASKED_FOR := $(or $(call version,$(PYTHON)),no Python that runs)
  ifneq ($(filter-out $(ASKED_FOR),$(MADE_WITH)),)
    $(error .venv was made with Python $(MADE_WITH), and PYTHON=$(PYTHON) is $(ASKED_FOR): run `make distclean` first)
  endif
endif

.venv/.made: settings.ini
	@if ! { $(BIN)/python -c '$(SUITABLE)' && $(BIN)/python -m pip --version; } >/dev/null 2>&1; then \
	  found=; \
	  for p in $(or $(PYTHON),$(CANDIDATES)); do \
	    if "$$p" -c '$(SUITABLE)' >/dev/null 2>&1; then found=$$p; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'No suitable Python found. Needed: Python $(firstword $(PYTHONS)) to $(lastword $(PYTHONS)) with its venv module' >&2; \
	    echo '(on Debian and Ubuntu a package of its own: python$(firstword $(PYTHONS))-venv). Tried: $(or $(PYTHON),$(CANDIDATES))' >&2; \
	    echo 'Name one yourself with: make $(or $(MAKECMDGOALS),demo) PYTHON=/path/to/python' >&2; \
	    exit 1; \
	  fi; \
	  echo "Making .venv with $$found (a few seconds)"; \
	  "$$found" -m venv --clear .venv || exit 1; \
	fi
	@touch $@

# A level of .venv is an extra of settings.ini, and its stamp: what it is for, and which levels it holds. The stamp is written
# last: an install that failed or was interrupted leaves none, and the next call goes on.
# Without build isolation, because with everything in place pip then needs no network at all.
FOR_demo   = the demo (usually a minute)
FOR_images = other pictures than digits (usually a minute)
FOR_dev    = notebooks and tests (usually two minutes)
FOR_check  = the check of types (usually half a minute)
FOR_dgl    = comparing with DGL: torch, large (usually two minutes)
HOLDS_images = .venv/.demo
HOLDS_dev    = .venv/.demo .venv/.images
.venv/.%: .venv/.made settings.ini setup.py pyproject.toml constraints.txt
	@rm -f $@
	@echo 'Installing into .venv what is needed for $(FOR_$*)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'setuptools>=77'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[$*]'
	@touch $(HOLDS_$*) $@

demo: .venv/.$(if $(filter-out digits,$(DATA)),images,demo)
	@echo 'First a board and six photographs (ten seconds each), then training on pictures of $(DATA) (about two minutes on two quiet cores)$(if $(filter-out digits,$(DATA)),,$(COMMA) then odd nodes of a graph (half a minute))'
	$(BIN)/et_demo_puzzle --out out
	$(BIN)/et_demo --data "$(DATA)" --out out
	$(if $(filter-out digits,$(DATA)),,$(BIN)/et_demo_graphs --out out)

check: .venv/.dev .venv/.check
	$(BIN)/ruff check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -m "core and not long" $(ARGS)

test: .venv/.dev $(if $(filter 1,$(DGL)),.venv/.dgl)
	@$(BIN)/python -c 'import sys; from importlib.util import find_spec; sys.exit(not find_spec("dgl"))' || \
	  echo 'Tests that compare with DGL are skipped, since it is not installed: DGL=1 installs it, on Python 3.11 alone'
	$(BIN)/python -m pytest $(ARGS)

readme: .venv/.dev
	$(BIN)/python scripts/readme.py

# Each notebook goes along as it is, for the link on its page that downloads it.
docs: readme
	$(BIN)/python scripts/stage_docs.py
	$(BIN)/python scripts/check_docs.py
	@if command -v quarto >/dev/null; then \
	  (cd _proc && PATH="$(CURDIR)/$(BIN):$$PATH" quarto render --no-cache) || exit 1; \
	  rm -rf _docs && mv _proc/_docs _docs && mkdir -p _docs/notebooks/engine || exit 1; \
	  cp nbs/*.ipynb _docs/notebooks/ && cp nbs/engine/*.ipynb _docs/notebooks/engine/ || exit 1; \
	  $(BIN)/python scripts/search_text.py _docs/search.json || exit 1; \
	  echo 'The site is in _docs/index.html'; \
	else \
	  echo 'The pages are staged in _proc/ and checked. To render them install Quarto 1.7: https://quarto.org/docs/get-started/'; \
	fi

bench: .venv/.dev
	@ls benchmarks/*.py >/dev/null 2>&1 || { echo 'benchmarks/ holds no scripts: nothing to run.'; exit 0; }; \
	for f in $(filter-out %reference.py %timing.py, $(wildcard benchmarks/*.py)); do echo "== $$f"; $(BIN)/python "$$f" || exit 1; done

clean:
	rm -rf out _docs _proc build dist *.egg-info .pytest_cache .hypothesis
	find nbs tests scripts experiments et_nbdev \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
