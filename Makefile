# Each target does its own set-up. Requirements: Python 3.11 or newer with venv, make, and access to PyPI; bench-gpu needs no PyPI if
# PYTHON can import the packages.
PYTHON ?= python3
BIN := .venv/bin
RUN := OMP_NUM_THREADS=1 $(BIN)/python

.PHONY: help test demo lint docs bench bench-gpu clean

help:
	@echo "make test   install into .venv and run all tests"
	@echo "make demo   install into .venv; archive -> dataset -> a minute of pre-training; the shipped model beside it and the baselines"
	@echo "make lint   run ruff and mypy"
	@echo "make docs   make the site of docs/ in site/, from an environment of its own; a warning is an error"
	@echo "make bench  measure this machine for 15 minutes (rerun to continue); tables in benchmarks/RESULTS.md"
	@echo "make bench-gpu   the same on a GPU, 15 minutes including checks and tests (rerun to continue)"
	@echo "make clean  remove .venv, .venv-docs, .bench, demo/ and site/"

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(None if sys.version_info >= (3, 11) else 'Python 3.11 or newer is required: make PYTHON=python3.11')"
	@echo "installing into .venv: some 4 GB of disk, a few minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip==26.3
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    --editable ".[cu13,cluster,s3,formats,hub,onnx,bench]" --group test --group lint
	@touch $@

test: .venv/installed
	$(RUN) -m pytest -n 3 --dist loadfile --max-worker-restart 0

demo: .venv/installed
	rm -rf demo
	$(RUN) -m omnilead synth demo/archive --patients 1000 --layout ptbxl --workers 2
	$(RUN) -m omnilead shard demo/archive --out demo/dataset --format both --dx-sources ptb-xl --workers 2
	$(RUN) -m omnilead verify demo/dataset --archive demo/archive
	$(RUN) -m omnilead show demo/dataset --png demo/summary.png > demo/summary.txt
	$(RUN) -m omnilead show demo/dataset --crop 0 --png demo/ecg.png
	$(BIN)/python -m docs.augmentations demo/augmentations.png --data demo/dataset
	$(BIN)/python -m omnilead pretrain --config small --data demo/dataset --out demo/run --set train.steps=200 --set train.batch_crops=32 \
	    --set train.validate_every=0
	$(BIN)/python -m omnilead bench --models small a-minute=demo/run --data demo/dataset --tasks diagnosis --leads 12 --share 0.1 1 --out demo/bench
	@echo "see demo/summary.png, demo/ecg.png, demo/augmentations.png, demo/run/report.html, demo/bench/bench.png"

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv-docs/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check pip==26.3
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --group docs
	@touch $@

docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "see site/index.html"

bench: .venv/installed
	$(RUN) -m benchmarks.run suite --minutes 13
	$(RUN) -m benchmarks.report

ifneq ($(filter bench-gpu,$(MAKECMDGOALS)),)
  IMPORTS := benchmarks.first_run, benchmarks.report, deepspeed, pytest, wfdb, zarr
  READY := $(shell $(PYTHON) -c "import $(IMPORTS)" >/dev/null 2>&1 && echo yes)
endif
GPU_PYTHON := $(if $(READY),$(PYTHON),$(BIN)/python)

bench-gpu: $(if $(READY),,.venv/installed)
	-$(GPU_PYTHON) -m benchmarks.first_run .bench --device cuda --only 'install|smoke'
# -W default: a warning must not fail a test on the one machine where it can run; nor must a file of tests that lacks a package
	-timeout 180 $(GPU_PYTHON) -m pytest -m gpu -q --no-header -W default --continue-on-collection-errors
	$(GPU_PYTHON) -m benchmarks.run suite --device cuda --minutes 10; code=$$?; \
	    $(GPU_PYTHON) -m benchmarks.report && exit $$code  # the tables are made also if a case failed

clean:
	rm -rf .venv .venv-docs .bench demo site
