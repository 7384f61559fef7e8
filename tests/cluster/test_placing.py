"""Where `deeplink sbatch` puts jobs on a real Slurm, beside stock sbatch, and what their record says of it."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from typing import Any

import pytest

from deeplink.scheduler.placement.hint import decision
from deeplink.scheduler.placement.hint.decision import HintKind, Recorded, Why
from deeplink.scheduler.placement.model import Constants, constants_text
from deeplink.scheduler.slurm.nodeset import unfold
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL
from tests.cluster.jobs import folder_of, submit
from tests.cluster.watchdogs import watchdog
from tests.processes import PATIENT_SBATCH
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster]

EVEN, ODD = {"n0", "n2", "n4", "n6"}, {"n1", "n3", "n5", "n7"}
WITHOUT_PLANNER = {"DEEPLINK_PLAN": "off"}


@pytest.fixture(scope="module", autouse=True)
def watched(sandbox: Sandbox) -> Iterator[None]:
    """Have a watchdog agree to look after nodes hinted by name."""
    with watchdog(sandbox, 7498) as env, pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setitem(WITHOUT_PLANNER, name, value)
        yield


@pytest.fixture(autouse=True)
def empty(sandbox: Sandbox) -> Iterator[None]:
    """Begin on idle nodes, with no claims of the last test, and leave them idle."""
    clear(sandbox)
    yield
    clear(sandbox)


# Another test's submission may have left a planner behind it, which would look after the jobs of these.
END_PLANNERS = r"""
for lock in .local/state/deeplink/plan/*.lock; do
    pid=$(sed -n 's/.*"pid": \([0-9]*\).*/\1/p' "$lock" 2>/dev/null)
    if [ -n "$pid" ]; then kill "$pid"; while kill -0 "$pid"; do sleep 0.05; done; fi
done 2>/dev/null
true
"""


def clear(sandbox: Sandbox) -> None:
    sandbox.run(CTL, ["bash", "-c", END_PLANNERS])
    sandbox.run(CTL, ["scancel", "-u", sandbox.user.name])
    sandbox.run(CTL, ["bash", "-c", "rm -rf .local/state/deeplink/wishes/agreed.json .local/share/deeplink"])
    sandbox.await_idle(LIMIT_S)


def wish(sandbox: Sandbox, *words: str, **env: str) -> tuple[int, Recorded]:
    """Submit a job that sleeps; return its id and what is on its record."""
    argv = [*PATIENT_SBATCH, "--parsable", "-o", "/dev/null", *words, "--wrap", "sleep 600"]
    done = sandbox.run(CTL, argv, env=WITHOUT_PLANNER | env)
    assert done.code == 0, done.stderr
    job = int(done.stdout)
    (recorded,) = decision.read(decision.job_folder(sandbox.home / ".local/state/deeplink", job))
    return job, recorded


def nodes_of(sandbox: Sandbox, job: int) -> set[str]:
    """Return where a job runs, once it does."""

    def said() -> str:
        return sandbox.run(CTL, ["squeue", "-h", "-j", str(job), "-o", "%T %N"]).stdout.strip()

    until(lambda: said().startswith("RUNNING"), LIMIT_S, said)
    return set(unfold(said().split()[1]))


def hold(sandbox: Sandbox, nodes: set[str]) -> None:
    """Note that these nodes hold a dataset."""
    held = {node: {"bytes": 1, "unix": time.time()} for node in nodes}
    said = json.dumps({"format": 1, "total": 4, "nodes": held})
    write = "mkdir -p .local/share/deeplink/catalog/images && cd $_ && echo ab >latest && cat >ab.held"
    assert sandbox.run(CTL, ["bash", "-c", write], stdin=said).code == 0


def other_than_stock(sandbox: Sandbox) -> set[str]:
    """Return the leaf that Slurm by itself would not choose."""
    said = sandbox.run(CTL, ["sbatch", "--test-only", "-N4", "--exclusive", "--wrap", "true"]).stderr
    return EVEN if "n[1,3,5,7]" in said else ODD


def test_a_job_runs_where_its_record_expects_it_and_data_and_links_decide(sandbox: Sandbox) -> None:
    job, recorded = wish(sandbox, "-N4", "--exclusive")
    assert recorded.decision.why is Why.AS_GOOD
    assert nodes_of(sandbox, job) == set(recorded.decision.expected) in (EVEN, ODD)
    clear(sandbox)

    better = other_than_stock(sandbox)
    hold(sandbox, better)
    job, recorded = wish(sandbox, "-N4", "--exclusive", "--deeplink-data=images")
    assert (recorded.decision.kind, recorded.decision.candidates[0].percent_local) == (HintKind.NODES, 100.0)
    assert nodes_of(sandbox, job) == set(recorded.decision.nodes) == better
    stock = sandbox.run(
        CTL, ["sbatch", "--parsable", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600"]
    )
    assert nodes_of(sandbox, int(stock.stdout)) == (EVEN | ODD) - better


def with_a_slow_node(sandbox: Sandbox, better: set[str]) -> str:
    """Write a topology in which a node of the leaf that Slurm would choose is slow; return its path."""
    leaves = {"leaf0": EVEN, "leaf1": ODD}
    slow = next(node for leaf in leaves.values() if leaf != better for node in sorted(leaf))
    switches: dict[str, Any] = {leaf: {"nodes": sorted(nodes), "gbps": 100} for leaf, nodes in leaves.items()}
    switches["core"] = {"switches": list(leaves), "gbps": 100}
    leaf = next(name for name, nodes in leaves.items() if slow in nodes)
    links = [{"below": slow, "above": leaf, "gbps": 25, "usual_gbps": 100}]
    path = folder_of(sandbox) / "fabric.json"
    path.write_text(json.dumps({"switches": switches, "links": links}))
    return str(path)


def test_a_slow_uplink_of_the_sites_topology_is_avoided(sandbox: Sandbox) -> None:
    better = other_than_stock(sandbox)
    slow = with_a_slow_node(sandbox, better)
    job, recorded = wish(sandbox, "-N4", "--exclusive", DEEPLINK_TOPOLOGY=slow)
    assert nodes_of(sandbox, job) == set(recorded.decision.nodes) == better


def test_a_slow_uplink_is_avoided_by_jobs_whose_step_it_makes_longer(sandbox: Sandbox) -> None:
    better, folder = other_than_stock(sandbox), folder_of(sandbox)
    (folder / "constants.json").write_text(constants_text(Constants()))
    env = {
        "DEEPLINK_TOPOLOGY": with_a_slow_node(sandbox, better),
        "DEEPLINK_MODEL": str(folder / "constants.json"),
    }
    found = {}
    for name, gradient_bytes in (("silent", 1e3), ("talkative", 1e9)):
        profile = folder / f"{name}.json"
        said = {"format": 1, "batch": 8, "sample_s": 0.002, "gradient_bytes": gradient_bytes}
        profile.write_text(json.dumps(said))
        job, recorded = wish(sandbox, "-N4", "--exclusive", f"--deeplink-profile={profile}", **env)
        assert recorded.decision.cost == "predicted step"
        found[name] = recorded.decision
        assert nodes_of(sandbox, job) == set(recorded.decision.expected)
        clear(sandbox)
    assert found["silent"].why is Why.AS_GOOD
    assert set(found["talkative"].nodes) == better
    best, own = found["talkative"].candidates[0].step_s, found["talkative"].own
    assert own is not None
    assert best is not None
    assert own.step_s == pytest.approx(4 * best, rel=0.2)


def test_a_wish_that_slurm_would_make_wait_is_not_made(sandbox: Sandbox) -> None:
    """A job before it in the queue is planned for the nodes that hold the data: sinfo may still call them idle."""
    better = other_than_stock(sandbox)
    hold(sandbox, better)
    held = ",".join(sorted(better))
    blocker = ["sbatch", "--parsable", "-w", held, "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600"]
    job = int(sandbox.run(CTL, blocker).stdout)
    nodes_of(sandbox, job)
    late, recorded = wish(sandbox, "-N4", "--exclusive", "--deeplink-data=images")
    assert recorded.decision.kind is HintKind.NOTHING
    assert nodes_of(sandbox, late) == (EVEN | ODD) - better


def test_two_jobs_at_once_and_a_lost_race(sandbox: Sandbox) -> None:
    first, one = wish(sandbox, "-N4", "--exclusive")
    second, other = wish(sandbox, "-N4", "--exclusive")
    assert not set(one.decision.nodes) & set(other.decision.nodes)
    assert nodes_of(sandbox, first) | nodes_of(sandbox, second) == EVEN | ODD


def test_a_race_that_was_lost_is_mended(sandbox: Sandbox) -> None:
    """Between decision and submission another job takes the nodes: the watchdog takes them off the job."""
    better = other_than_stock(sandbox)
    hold(sandbox, better)
    thief = (
        "real=$(PATH=${PATH#*:} command -v sbatch)\n"
        f'case "$*" in *--test-only*) ;; *--nodelist*) "$real" -w {",".join(sorted(better))} -N4 --exclusive '
        '-o /dev/null --wrap "sleep 600" >/dev/null; for i in $(seq 200); do '
        '[ -n "$(squeue -h -t R)" ] && break; sleep 0.5; done;; esac\nexec "$real" "$@"\n'
    )
    folder = folder_of(sandbox)
    (folder / "sbatch").write_text(f"#!/bin/bash\n{thief}")
    (folder / "sbatch").chmod(0o755)
    argv = (
        f"PATH={folder}:$PATH exec {shlex.join(PATIENT_SBATCH)} --parsable -N4 --exclusive --deeplink-data=images"
        " -o /dev/null"
    )
    done = sandbox.run(CTL, ["bash", "-c", f"{argv} --wrap 'sleep 600'"], env=WITHOUT_PLANNER)
    assert done.code == 0, done.stderr
    job = int(done.stdout)
    assert nodes_of(sandbox, job) == (EVEN | ODD) - better
    lines = decision.read(decision.job_folder(sandbox.home / ".local/state/deeplink", job))
    assert lines[0].decision.kind is HintKind.NODES
    assert set(lines[0].decision.nodes) == better


def test_the_ranks_of_a_placed_job_are_where_it_was_predicted(sandbox: Sandbox) -> None:
    """On one leaf: no hop of the ring crosses."""
    program = "env DEEPLINK_PLAN=off deeplink sbatch"
    job = submit(sandbox, "-N4 --exclusive", "exec deeplink run -- {train} 4", program=program)
    job.await_end()
    (started,) = job.events("attempt-started")
    (recorded,) = decision.read(decision.job_folder(sandbox.home / ".local/state/deeplink", job.id))
    assert set(started["nodes"]) == set(recorded.decision.expected)
    assert started["ring_crossings"] == recorded.decision.candidates[0].crossings == 0
    assert len({leaf for _, leaf in job.placed(f"{job.id}.0.0")}) == 1
