"""Nodes with two networks, of which the first, the one Slurm's names stand for, leads nowhere."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL, Shape
from tests.cluster.jobs import folder_of, submit

pytestmark = [pytest.mark.cluster]

# Not all of the environment: srun takes 1,024 bytes of one rank's line, and then of another's.
SHOW = """\
import json, os
told = ("RANK", "MASTER_ADDR", "DEEPLINK_AGENT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
print(json.dumps({name: os.environ[name] for name in told}))
"""


def dead_end(cluster: Sandbox) -> None:
    """Give each node a cable to nowhere, and let its name stand for the address there."""
    names = ""
    for number, node in enumerate(cluster.nodes):
        ip = f"10.99.0.{number + 1}"
        names += f"{ip} {node}\n"
        for words in (
            "ip link add dead0 type veth peer name dead1",
            f"ip addr add {ip}/24 dev dead0",
            "ip link set dead0 up",
            "ip link set dead1 up",
        ):
            done = cluster.run(node, shlex.split(words), root=True)
            assert done.code == 0, done
    hosts = cluster.layout.etc / "hosts"
    kept = [line for line in hosts.read_text().splitlines() if line.split()[-1] not in cluster.nodes]
    hosts.write_text("\n".join(kept) + "\n" + names)
    for machine in (CTL, *cluster.nodes):
        done = cluster.run(machine, ["mount", "--bind", str(hosts), "/etc/hosts"], root=True)
        assert done.code == 0, done


def shown(path: Path) -> list[dict[str, str]]:
    found = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    return sorted(found, key=lambda env: int(env["RANK"]))


def test_the_network_that_answers_is_chosen_and_what_was_asked_for_wins(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    cluster = fresh_sandbox(Shape.of(2))
    dead_end(cluster)
    by_name = (
        "from deeplink.rpc.resolving import primary_address; print(primary_address({'SLURMD_NODENAME': 'n0'}))"
    )
    assert "dead0" in cluster.run(cluster.nodes[0], ["python", "-c", by_name]).stdout
    folder = folder_of(cluster)
    ours, say = "deeplink run --nproc-per-node 1", f"python -c {shlex.quote(SHOW)}"
    script = f"""\
{ours} -- {say} >{folder}/chosen
NCCL_SOCKET_IFNAME=mine {ours} --interface 10.77.0.0/16 -- {say} >{folder}/asked
{ours} --interface ib0 -- {say}
echo code=$?
"""
    job = submit(cluster, "-N2", script, folder=folder)
    assert job.await_end().state is JobState.COMPLETED, job.told()
    first, second = shown(folder / "chosen")
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == "10.77.0.10"
    assert (first["GLOO_SOCKET_IFNAME"], first["NCCL_SOCKET_IFNAME"]) == ("eth0", "=eth0")
    assert second["DEEPLINK_AGENT"].startswith("10.77.0.11:")
    assert [event["network"] for event in job.events("network")] == ["10.77.0.0/24", "10.77.0.0/16"]
    assert [event["speed_mbps"] for event in job.events("network")] == [0, 0], "a veth's speed is invented"
    asked = shown(folder / "asked")
    assert {(env["NCCL_SOCKET_IFNAME"], env["TP_SOCKET_IFNAME"]) for env in asked} == {("mine", "eth0")}
    assert "code=2" in job.output()
    assert "dead0 (10.99.0." in job.output(), "it says what there is"
