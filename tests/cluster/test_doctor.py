"""`deeplink doctor` on a real cluster: a healthy one, one with faults that were provoked, and one that hangs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deeplink
from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandError, CommandTimeoutError
from deeplink.scheduler.slurm.nodeset import NodeSetError, fold, unfold
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL, Shape
from tests.cluster.conftest import Factory
from tests.scheduler.slurm.test_hanging import VERBS

pytestmark = [pytest.mark.cluster]

SSD = {"DEEPLINK_STORE": "/local/ssd/dl"}
Findings = dict[str, list[dict[str, Any]]]


def examined(cluster: Sandbox, *words: str, env: dict[str, str]) -> Findings:
    done = cluster.run(CTL, ["deeplink", "doctor", "--json", "--disk-mib", "4", *words], env=env, timeout_s=60)
    facts = json.loads(done.stdout)
    assert done.code == (1 if facts["errors"] else 0), done.stderr
    found: Findings = {}
    for one in facts["findings"]:
        found.setdefault(one["check"], []).append(one)
    return found


def of(findings: Findings, check: str) -> list[tuple[str, str]]:
    return [(one["severity"], one["where"]) for one in findings[check]]


def test_a_healthy_cluster_has_no_errors_and_nothing_is_left_behind(sandbox: Sandbox) -> None:
    found = examined(sandbox, "--nodes", "4", env=SSD)
    assert not [one for findings in found.values() for one in findings if one["severity"] == "error"], found
    for check in ("store-private", "catalog-shared", "state-shared", "agent-ports", "rank-ports", "clocks"):
        assert [severity for severity, _ in of(found, check)] == ["ok"], found[check]
    assert len(found["store-speed"]) == 4
    left = sandbox.run(CTL, ["find", str(sandbox.home), "-name", ".deeplink-doctor*"])
    assert left.stdout == ""


def provoke(cluster: Sandbox) -> None:
    """Break n1's way to n2, give n2 other code and n3 none, and a site's epilog that wipes the SSD."""
    package = Path(deeplink.__file__).parent
    epilog, other, empty = cluster.home / "epilog.sh", cluster.home / "other.py", cluster.home / "empty"
    epilog.write_text("#!/bin/sh\nrm -rf /local/ssd/*\n")
    epilog.chmod(0o755)
    other.write_text((package / "__init__.py").read_text().replace("__version__ =", "__version__ = '9.9'  #"))
    empty.mkdir()
    for node, argv in (
        ("n1", ["ip", "route", "add", "unreachable", f"{cluster.shape.address('n2')}/32"]),
        ("n2", ["mount", "--bind", str(other), str(package / "__init__.py")]),
        ("n3", ["mount", "--bind", str(empty), str(package / "cli")]),
    ):
        done = cluster.run(node, argv, root=True)
        assert done.code == 0, done
    with (cluster.layout.slurm_conf).open("a") as conf:
        conf.write(f"KillOnBadExit=1\nSlurmdTimeout=0\nEpilog={epilog}\n")
    assert cluster.run(CTL, ["scontrol", "reconfigure"], root=True).code == 0


def test_provoked_faults_are_found_and_named(fresh_sandbox: Factory) -> None:
    cluster = fresh_sandbox(Shape.of(4))
    token = cluster.home / "token"
    token.write_text("secret")
    token.chmod(0o644)
    provoke(cluster)
    env = SSD | {"DEEPLINK_WATCH": f"{cluster.shape.address(CTL)}:7999", "DEEPLINK_WATCH_TOKEN_FILE": str(token)}
    found = examined(cluster, "--nodes", "4", env=env)
    assert ("error", "n3") in of(found, "nodes-answer")
    assert ("ok", "n[0-2]") in of(found, "nodes-answer")
    assert of(found, "versions-alike")[0] == ("error", "n2")
    assert {where for severity, where in of(found, "rank-ports") if severity == "error"} >= {"n1"}
    assert any("n1 to n2: port " in one["said"] for one in found["agent-ports"]), found["agent-ports"]
    assert of(found, "kill-on-bad-exit") == [("warning", "")]
    assert of(found, "slurmd-timeout") == [("error", "")]
    assert of(found, "site-scripts")[0] == ("error", "n[0-2]")
    assert ("error", "n[0-2]") in of(found, "watchdog")
    assert of(found, "token-files")[0][0] == "error"
    assert [severity for severity, _ in of(found, "store-private")] == ["ok"]
    # A store on the shared home, and one in memory.
    at_home = {"DEEPLINK_STORE": str(cluster.home / "store")}
    shared = examined(cluster, "--nodes", "2", "--srun-option=--exclude=n3", env=at_home)
    assert of(shared, "store-private")[0][0] == "error"
    memory = examined(cluster, "--nodes", "1", "--srun-option=--exclude=n3", env={"DEEPLINK_STORE": "/dev/shm/dl"})
    assert of(memory, "store-on-disk")[0][0] == "warning"
    hangs_and_comes_back(cluster)


def hangs_and_comes_back(cluster: Sandbox) -> None:
    """Freeze slurmctld: every verb ends with the error it says, and the doctor tells it."""
    (controller,) = [machine.daemon for machine in cluster.status() if machine.name == CTL]
    assert controller is not None
    slurm = Slurm(run=_patient(cluster))
    with (cluster.layout.slurm_conf).open("a") as conf:
        conf.write("MessageTimeout=2\n")  # clients read it themselves: they give up sooner
    os.kill(controller, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(len(VERBS) + 1) as pool:
            told = pool.submit(cluster.run, CTL, ["deeplink", "doctor", "--quick"], timeout_s=60)
            for problem in pool.map(partial(raised, slurm), VERBS.values()):
                assert isinstance(problem, CommandError | CommandTimeoutError)
            assert told.result().code == 1
            assert "slurm-answers" in told.result().stdout
    finally:
        os.kill(controller, signal.SIGCONT)
    assert slurm.nodes()


def _patient(cluster: Sandbox) -> Any:
    run = cluster.runner()
    return lambda argv, *, timeout_s=12.0: run(argv, timeout_s=min(timeout_s, 12.0))


def raised(slurm: Slurm, verb: Callable[[Slurm], object]) -> DeepLinkError | None:
    try:
        verb(slurm)
    except DeepLinkError as problem:
        return problem
    return None


NUMBERS = st.one_of(
    st.integers(0, 120).map(str),
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: f"{pair[0]}-{pair[0] + pair[1]}"),
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: f"{pair[0]:03}-{pair[0] + pair[1]:03}"),
)
PARTS = st.one_of(
    st.tuples(st.sampled_from(["n", "gpu-a", "rack1-n", "x0y"]), st.lists(NUMBERS, min_size=1, max_size=4)).map(
        lambda pair: f"{pair[0]}[{','.join(pair[1])}]"
    ),
    st.sampled_from(["login1", "n7", "n007", "head.example", "a-b-1"]),
)
SETS = st.lists(PARTS, min_size=1, max_size=4).map(",".join)


@settings(max_examples=3)
@given(texts=st.lists(SETS, min_size=25, max_size=25))
def test_node_sets_mean_what_scontrol_says_they_mean(sandbox: Sandbox, texts: list[str]) -> None:
    ours = [set(unfold(text)) for text in texts]
    folded = [fold(names) for names in ours]
    script = 'for text in "$@"; do scontrol show hostnames "$text" || exit 1; echo --; done'
    done = sandbox.run(CTL, ["bash", "-c", script, "bash", *texts, *folded])
    assert done.code == 0, done.stderr
    theirs = [set(part.split()) for part in done.stdout.split("--\n")[:-1]]
    assert theirs == [*ours, *ours]


def test_what_is_no_node_set_is_an_error_and_no_set_of_something_else() -> None:
    for text in ("n[0-", "n[3-1]", "n0 n1", "@group", "n[0-1]]"):
        with pytest.raises(NodeSetError):
            unfold(text)
