# The two commands are `make demo` and `make test`; each does all its own set-up. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(sort $(wildcard proto/deeplink/v1/*.proto))
PROTO_OUT ?= .

.PHONY: help venv demo test check lint types layers unit proto proto-check cluster-tests clean

help:  ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

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
