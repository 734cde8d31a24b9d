# Everything runs in .venv, which is built when it is missing or out of date.
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu   takes torch's CPU wheels where pip would take CUDA ones
PYTHON ?= python3
TORCH_INDEX ?=
PY := .venv/bin/python
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
export OMP_NUM_THREADS ?= 1
ROOT := $(if $(filter 0,$(shell id -u)),,sudo)
define INSTALL_CHROMIUM
{ command -v apt-get >/dev/null || { echo "There is no apt-get here: install Chromium as 'chromium' by hand." >&2; exit 1; }; \
	$(ROOT) apt-get update -q && $(ROOT) apt-get install -qy --no-install-recommends chromium; }
endef

.PHONY: demo test test-all check format bench browser clean

demo: .venv/core
	$(PY) -m pfed compare local fedavg fedrep cd2pfed fedcd dualfed fedbsd partialfed-fix partialfed-adaptive \
		--data digits --clients 10 --alpha 0.3 --test-split matched --test-fraction 0.7 --public 0.1 --model mlp \
		--rounds 15 --local.epochs 2 --local.lr 0.1 --eval-every 5 --seeds 2 --set fedcd.batch=32 \
		--set dualfed.lam=1 --set dualfed.projector_bn=false --set partialfed-fix.strategy=wo_fc \
		--runs runs --report report.html
	@echo "The report is report.html; the runs are in runs."

test: .venv/ready
	$(PY) -m pytest -n 2

test-all: .venv/ready
	$(PY) -m pytest -n 2 -m ""

check: .venv/ready
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest -n 2

# Debian's Chromium and Playwright, with which the tests look at pages; without them those tests are skipped.
browser: .venv/ready
	@command -v chromium >/dev/null || $(INSTALL_CHROMIUM)
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[browser]"

format: .venv/ready
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: .venv/ready
	$(PY) benchmarks/overhead.py
	$(PY) benchmarks/methods.py
	$(PY) benchmarks/bound.py --profile
	$(PY) benchmarks/layout.py
	$(PY) benchmarks/durability.py
	$(PY) benchmarks/report.py
	$(PY) benchmarks/watch.py
	$(PY) benchmarks/cluster.py
	$(PY) benchmarks/deploy.py
	$(PY) benchmarks/detection.py

.venv/core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pfed needs Python 3.11 or newer: make PYTHON=/path/to/python3")'
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --no-compile --disable-pip-version-check $(INDEX) --constraint constraints.txt --editable .
	touch .venv/core

.venv/ready: .venv/core
	$(PY) -m pip install --quiet --disable-pip-version-check $(INDEX) --constraint constraints.txt --editable ".[dev]"
	touch .venv/ready

clean:
	rm -rf .venv runs report.html
