# Each target sets up .venv by itself: once, and again only when the requirements change.
#   make test ARGS="-k norm"      passes ARGS to pytest
#   make demo PYTHON=/path/to/it  chooses the Python that .venv is made with (3.11 or 3.12)
DATA = digits
ARGS =
PYTHON ?=

BIN   := .venv/bin
STAMP := .venv/.installed
# A name on the PATH proves little (pyenv's shims are there for versions that are not), so each candidate is run.
CANDIDATES = python3.11 python3.12 python3 python $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.1[12].*/bin/python)
SUITABLE   = import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))

.PHONY: help demo test docs readme bench clean distclean

help:
	@echo 'make demo [DATA=digits|cifar10|a/folder]  train on pictures, complete occluded ones, write figures to out/'
	@echo '                                          (with digits also: find the odd nodes of a small graph)'
	@echo 'make test                                 run every notebook and every test'
	@echo 'make docs                                 build the documentation site (without Quarto, a plain preview)'
	@echo 'make readme                               README.md from nbs/index.ipynb'
	@echo 'make bench                                run every script of benchmarks/'
	@echo 'make clean | distclean                    remove what was built | and .venv'

# The stamp is written last: an install that failed or was interrupted leaves none, and the next call goes on.
# Without build isolation, because with everything in place pip then needs no network at all.
$(STAMP): settings.ini setup.py pyproject.toml constraints.txt
	@rm -f $@
	@if ! { $(BIN)/python -c '$(SUITABLE)' && $(BIN)/python -m pip --version; } >/dev/null 2>&1; then \
	  found=; \
	  for p in $(or $(PYTHON),$(CANDIDATES)); do \
	    if "$$p" -c '$(SUITABLE)' >/dev/null 2>&1; then found=$$p; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'No suitable Python found. Needed: Python 3.11 or 3.12 with its venv module' >&2; \
	    echo '(on Debian and Ubuntu a package of its own: python3.11-venv). Tried: $(or $(PYTHON),$(CANDIDATES))' >&2; \
	    echo 'Name one yourself with: make $(or $(MAKECMDGOALS),demo) PYTHON=/path/to/python3.11' >&2; \
	    exit 1; \
	  fi; \
	  echo "Making .venv with $$found"; \
	  "$$found" -m venv --clear .venv || exit 1; \
	fi
	@echo 'Installing the tested set of packages into .venv (a few minutes the first time)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/et_demo --data "$(DATA)" --out out
	$(if $(filter digits,$(DATA)),$(BIN)/et_demo_graphs --out out)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

readme: $(STAMP)
	$(BIN)/python scripts/readme.py

# Each notebook goes along as it is, for the link on its page that downloads it.
docs: readme
	$(BIN)/python scripts/stage_docs.py
	$(BIN)/python scripts/check_docs.py
	@if command -v quarto >/dev/null; then \
	  (cd _proc && PATH="$(CURDIR)/$(BIN):$$PATH" quarto render --no-cache) || exit 1; \
	  rm -rf _docs && mv _proc/_docs _docs && mkdir _docs/notebooks && cp nbs/*.ipynb _docs/notebooks/ || exit 1; \
	  echo 'The site is in _docs/index.html'; \
	else \
	  echo 'Quarto is not on the PATH, so the pages are staged and checked, and previewed without the theme of the site.'; \
	  $(BIN)/python scripts/preview_docs.py || exit 1; \
	  echo 'To render them install Quarto 1.7 or newer: https://quarto.org/docs/get-started/'; \
	fi

bench: $(STAMP)
	@ls benchmarks/*.py >/dev/null 2>&1 || { echo 'benchmarks/ holds no scripts: nothing to run.'; exit 0; }; \
	for f in benchmarks/*.py; do echo "== $$f"; $(BIN)/python "$$f" || exit 1; done

clean:
	rm -rf out _docs _preview _proc build dist *.egg-info .pytest_cache .hypothesis
	find nbs tests scripts experiments et_nbdev \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
