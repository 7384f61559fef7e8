# The two commands are `make demo` and `make test`; each does all its own set-up. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-bench
# Where there is no wheel of torch: EXTRAS=demo-light, whose training does without.
EXTRAS ?= demo
# What tests/cache/source/on_s3.py needs, all of it: s3fs, moto, and what those need.
S3 := s3fs moto aiobotocore aiohappyeyeballs aiohttp aioitertools aiosignal blinker boto3 botocore certifi \
    charset-normalizer flask flask-cors frozenlist idna itsdangerous jmespath multidict propcache requests responses \
    s3transfer werkzeug wrapt xmltodict yarl
PROTOS := $(sort $(wildcard proto/deeplink/v1/*.proto))
PROTO_OUT ?= .
# From Debian 13 on pivot_root is in util-linux-extra, and e2fsprogs is not there by itself.
SLURM := slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins iproute2 util-linux util-linux-extra e2fsprogs
TEST_TOOLS := chromium chromium-driver prometheus prometheus-alertmanager systemd charliecloud-runtime
# setuptools warns of its own editable installs; nobody here can do anything about it.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
PEER_PIP := PYTHONWARNINGS=ignore $(PEERS)/bin/python -m pip --quiet --disable-pip-version-check --no-input install --no-deps --no-compile
say = @printf '%-9s %s\n' $(1) $(2)

# What a shell happens to export must not change what is installed or imported.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE PIP_REQUIRE_VIRTUALENV

.PHONY: help demo test test-cluster fresh test-faults check thorough static lint types layers grammar near whole bench-cache bench-scheduler bench-watchdog bench-console storm format picture reference house proto proto-check wheel venv venv-dev slurm test-tools clean
.DELETE_ON_ERROR:

help:  ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Debian's downloads and pip's go on side by side: -j2 whatever the caller's make was told.
demo:  ## the whole story on this machine; DATA=folder for images of your own, KEEP=1 to keep the cluster, ARGS=
	@$(MAKE) --no-print-directory -j2 venv slurm
	@exec $(BIN)/deeplink demo $(if $(DATA),--data "$(DATA)") $(if $(filter-out 0 no,$(KEEP)),--keep) $(ARGS)

test:  ## every check and every test, on a real Slurm when root (what .ci/run runs)
	@$(MAKE) --no-print-directory -j2 venv-dev slurm test-tools
	@$(MAKE) --no-print-directory --keep-going -j2 static whole

thorough:  ## make test with all examples of the properties, where it tries a quarter
	@$(MAKE) --no-print-directory test ARGS="--hypothesis-profile=thorough $(ARGS)"

check: venv-dev  ## style, types, layers, stubs and a minute of the tests nearest to the change: before every commit
	@$(MAKE) --no-print-directory --keep-going -j2 static near

static: lint types layers proto-check

lint:
	$(call say,style,"ruff check and ruff format --check")
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .

types:
	$(call say,types,"mypy --strict")
	@$(BIN)/mypy --no-error-summary

# No cache: a stale one has hidden a broken contract.
layers:
	$(call say,layers,"import-linter")
	@mkdir -p build && $(BIN)/lint-imports --no-logo --no-cache >build/layers.txt 2>&1 || { cat build/layers.txt; exit 1; }

# mmengine imports yapf, which renames its grammar into the user's cache before it is written out: of two that begin
# at once with an empty cache, one can read an empty file. So one of them begins before both.
grammar:
	@$(BIN)/python -c 'import yapf'

near: grammar
	$(call say,tests,"a minute of the quick ones nearest to the change")
	@$(BIN)/python tests/near.py

whole: grammar
	$(call say,tests,"all of them")
	@$(BIN)/python tests/nothing_left.py $(BIN)/python tests/lanes.py --whole $(ARGS)

test-cluster:  ## the tests on a real Slurm alone; EXTRAS=demo-light where there is no torch
	@$(MAKE) --no-print-directory -j2 $(VENV)/.ready-cluster slurm
	@.ci/debian containers ch-run charliecloud-runtime
	@$(BIN)/python tests/nothing_left.py $(BIN)/python -m pytest -m cluster -n 2 --dist loadfile --whole tests/cluster $(ARGS)

# Half an hour, and kept out of .ci/run: for before a release.
fresh:  ## both commands in a minimal Debian of its own, when root; SUITE=bookworm, or trixie or forky for newer Slurms
	@.ci/fresh $(or $(SUITE),bookworm) $(ARGS)

test-faults: venv-dev slurm  ## every fault under full load, 500 runs of the cache's model and 20 with real processes: 20 minutes
	@$(BIN)/python tests/nothing_left.py $(BIN)/python -m pytest -q tests/faults tests/cluster/test_faults.py \
	    --hypothesis-profile=thorough $(ARGS)

# Peers pin what we cannot live with: an environment of their own, as in benchmarks/requirements.txt and nothing resolved.
bench-cache: venv $(PEERS)/.ready  ## measure the cache beside its peers; ARGS="--quick --only packing,local"; build/bench/cache.json
	@.ci/debian bench 'redis-server memcached' redis-server memcached
	@$(BIN)/python -m benchmarks.cache $(ARGS)

bench-scheduler: venv slurm  ## measure the scheduler; ARGS="--quick --only placement,overhead --traces FOLDER"; build/bench/scheduler.json
	@$(BIN)/python -m benchmarks.scheduler $(ARGS)

bench-watchdog: venv slurm  ## measure faults beside stock Slurm; ARGS="--quick --only node-killed-spare,leaf-cut"; build/bench/watchdog.json
	@$(BIN)/python -m benchmarks.watchdog $(ARGS)

storm: venv slurm  ## cases of faults drawn from a seed, on a real Slurm; MINUTES=60 SEED=7, or one: CASE="2+0 none; ..."
	@$(BIN)/python tests/nothing_left.py $(BIN)/python -m benchmarks.storm --minutes $(or $(MINUTES),60) \
	    --seed $(or $(SEED),7) $(if $(CASE),--case "$(CASE)") $(ARGS)

bench-console: venv  ## measure the operator's page: CPU, memory, bytes and answers; ARGS="--seconds 60"; build/bench/console.json
	@$(BIN)/python -m benchmarks.console $(ARGS)

$(PEERS)/.ready: benchmarks/requirements.txt
	@mkdir -p build && .ci/python-venv $(PYTHON) $(PEERS)
	$(call say,peers,"installing benchmarks/requirements.txt into $(PEERS); one that cannot be had is not measured")
	@$(PEER_PIP) -r $< 2>build/peers.txt || while read -r line; do \
	    case $$line in ''|\#*) ;; *) $(PEER_PIP) "$$line" 2>>build/peers.txt || echo "peers     not installed: $$line";; esac; \
	done <$<
	@touch $@

format:  ## put the code into its format
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

# The digest lets a test see that the picture is the text's.
picture:  ## draw docs/architecture.svg from its .dot (graphviz)
	@.ci/debian graphviz dot graphviz
	@{ dot -Tsvg docs/architecture.dot; echo "<!-- sha256 of architecture.dot: $$(sha256sum <docs/architecture.dot | cut -c1-64) -->"; } >docs/architecture.svg

reference: venv-dev  ## write docs/reference.md: what commands and errors say of themselves
	@$(BIN)/python -m tests.reference

house: venv-dev  ## the product's size, and how many modules a task passes; ARGS=--modules lists them
	@$(BIN)/python -m tests.house $(ARGS)

proto:  ## generate deeplink/v1 from proto/
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=$(PROTO_OUT) --grpc_python_out=$(PROTO_OUT) \
	    --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	    --mypy_out=quiet:$(PROTO_OUT) --mypy_grpc_out=quiet:$(PROTO_OUT) $(PROTOS)

# Generates beside, compares, and says what differs; never touches the tree.
proto-check:  ## check that deeplink/v1 is what proto/ says
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(MAKE) --no-print-directory proto PROTO_OUT="$$fresh" >/dev/null && \
	diff -r -x __init__.py -x __pycache__ "$$fresh/deeplink/v1" deeplink/v1 \
	    || { echo 'generated stubs are stale: run `make proto`' >&2; exit 1; }

wheel: venv-dev  ## build sdist and wheel into dist/
	$(call say,wheel,"dist/")
	@mkdir -p build && $(BIN)/python -m build --outdir dist . >build/wheel.txt 2>&1 || { tail -30 build/wheel.txt; exit 1; }
	@ls dist

venv: $(VENV)/.ready  ## .venv with all that the demo needs
venv-dev: $(VENV)/.ready-dev  ## .venv with what the tests and checks need besides

$(BIN)/python:
	@mkdir -p build && .ci/python-venv $(PYTHON) $(VENV)

# Without its constraint `torch` may be any version. Bytecode of 11,000 files, most of them never imported, costs a
# minute: only what the training script imports is compiled, here and not by each rank anew (which runs as another user).
$(VENV)/.ready: pyproject.toml constraints.txt | $(BIN)/python
	$(call say,venv,"installing deeplink[$(EXTRAS)] into $(VENV) as in constraints.txt")
	@$(PIP) install -c constraints.txt 'pip>=25.1'
	@$(PIP) install --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@$(BIN)/python .ci/warm.py
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(call say,venv,"installing the tools of tests and checks")
	@$(PIP) install --no-compile -c constraints.txt --group dev
	@# Their own lists of needs have OpenCV, matplotlib and another torch, which what we use of them does without.
	@$(PIP) install --no-compile --no-deps -c constraints.txt mmengine torchdata \
	    accelerate lightning lightning-utilities torchmetrics transformers tokenizers safetensors regex
	@# A source package that builds nothing when told so, but asks torch what it could build. In a folder of its own:
	@# where pytest-randomly finds it, every run of pytest imports it, and torch.
	@DS_BUILD_OPS=0 $(PIP) install --no-compile --no-deps --no-build-isolation --upgrade -c constraints.txt \
	    --target $(VENV)/deepspeed deepspeed
	@# S3's driver, and a server for it, ask for another python-dateutil than all else: for one test, in its own process.
	@$(PIP) install --no-compile --no-deps --upgrade -c constraints.txt --target $(VENV)/s3 $(S3)
	@touch $@

$(VENV)/.ready-cluster: $(VENV)/.ready
	$(call say,venv,"installing what the tests on a real Slurm need")
	@$(PIP) install --no-compile -c constraints.txt --group cluster
	@touch $@

slurm:  ## Slurm's packages, when root on Debian or Ubuntu (needed by demo and test)
	@.ci/debian slurm 'slurmctld slurmd sbatch munged ip unshare pivot_root mkfs.ext4' $(SLURM)

test-tools: | slurm
	@.ci/debian tools 'chromium chromedriver promtool prometheus-alertmanager systemd-analyze ch-run' $(TEST_TOOLS)
	@# A minimal Debian has no /etc/hosts: there nobody knows `localhost`, which chromedriver listens on.
	@getent hosts localhost >/dev/null || .ci/debian names '' libnss-myhostname

clean:  ## remove what was built (not .venv)
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -not -path './$(PEERS)/*' -prune -exec rm -rf {} +
