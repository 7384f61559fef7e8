"""The cache beside its model: any order of packing, reading, evicting, killing, joining and damage."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from typing_extensions import override

from tests.faults.model import CacheMachine, InProcess, Members, Processes
from tests.faults.processes import Nodes

IS_THOROUGH = settings.get_current_profile_name() == "thorough"


class InProcessMachine(CacheMachine):
    @override
    def members_of(self, nodes: Nodes) -> Members:
        return InProcess(nodes)


class ProcessesMachine(CacheMachine):
    @override
    def members_of(self, nodes: Nodes) -> Members:
        return Processes(nodes)


def limits(runs: int, steps: int) -> settings:
    return settings(
        max_examples=runs,
        stateful_step_count=steps,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


TestInProcess = pytest.mark.slow(pytest.mark.timeout(3600)(InProcessMachine.TestCase))
TestInProcess.settings = limits(500 if IS_THOROUGH else 8, 30)
TestProcesses = pytest.mark.slow(pytest.mark.timeout(3600)(ProcessesMachine.TestCase))
TestProcesses.settings = limits(20 if IS_THOROUGH else 2, 20)
