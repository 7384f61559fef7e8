"""Clusters for tests: one for all tests of a run, and fresh ones for those that break what they use.

As root these are real multi-host clusters; what is missing then is a failure with its remedy, never a skip.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from deeplink.scheduler.testbed.cluster import Options, Sandbox
from deeplink.scheduler.testbed.shape import Shape
from tests.waiting import LIMIT_S

Factory = Callable[..., Sandbox]
PATIENT = Options(wait_s=LIMIT_S)
# What a test runs on a machine of a cluster is waited for like everything else.
(Sandbox.run.__kwdefaults__ or {})["timeout_s"] = LIMIT_S


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """Eight nodes on two leaves, dealt round robin. Leave it as you found it: heal, boot, no jobs."""
    cluster = Sandbox.up(f"t-{os.getpid()}-{secrets.token_hex(3)}", Shape(interleave=True), PATIENT)
    yield cluster
    cluster.down()


@pytest.fixture
def fresh_sandbox() -> Iterator[Factory]:
    """Return a function that brings up a cluster of the test's own: `fresh_sandbox(Shape.of(2), Options(...))`."""
    names: list[str] = []

    def bring_up(shape: Shape | None = None, options: Options | None = None) -> Sandbox:
        names.append(f"f-{os.getpid()}-{secrets.token_hex(3)}")
        return Sandbox.up(names[-1], shape, replace(options or PATIENT, wait_s=LIMIT_S))

    yield bring_up
    for name in names:
        Sandbox.clear(name)
