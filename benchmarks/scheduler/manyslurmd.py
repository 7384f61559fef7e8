"""One real slurmctld and a real slurmd for each of many nodes, all in namespaces of their own on this machine.

As root. Everything runs below `unshare --pid --kill-child`: however the caller ends, the kernel ends all of it.
"""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.nodeset import fold
from deeplink.scheduler.topology.graph import natural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

GPUS = 8
# Should the caller be killed, unshare goes with it, and all that is inside.
_UNSHARE = (
    "setpriv",
    "--pdeathsig=KILL",
    "unshare",
    "--net",
    "--mount",
    "--uts",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)
_START_S = 240.0


class Names(StrEnum):
    """How nodes hang on leaves."""

    DEALT = "dealt"
    """Names are dealt over the leaves of a spine, one each in turn."""
    FOLLOW = "follow"
    """Names follow the leaves."""
    UNEVEN = "uneven"
    """Leaves of one node to dozens, some below two switches and some right below the core; names anyhow."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Nodes `e0` and on, on leaves of `per_leaf`, `leaves` of these below a spine; or uneven."""

    nodes: int = 1024
    names: Names = Names.DEALT
    per_leaf: int = 16
    leaves: int = 8

    def path(self, number: int) -> tuple[str, ...]:
        """Return the switches above a node, root first."""
        if self.names is Names.UNEVEN:
            leaf = min(int(random.Random(number).expovariate(0.25)), 13)  # noqa: S311 - a tree, no secret
            above = ("core",) if leaf % 4 == 0 else ("core", f"pod{leaf % 2}", f"spine{leaf % 2}{leaf % 3}")
            return (*above, f"leaf{leaf}")
        spine, place = divmod(number, self.per_leaf * self.leaves)
        leaf = place % self.leaves if self.names is Names.DEALT else place // self.per_leaf
        return ("core", f"spine{spine}", f"leaf{spine * self.leaves + leaf}")

    def conf(self) -> str:
        """Return the topology.conf: each switch after those below it, by name."""
        hanging: dict[str, list[str]] = {}
        below: dict[str, dict[str, None]] = {}
        deepest = 0
        for number in range(self.nodes):
            path = self.path(number)
            deepest = max(deepest, len(path))
            hanging.setdefault(path[-1], []).append(f"e{number}")
            for upper, lower in pairwise(path):
                below.setdefault(upper, {})[lower] = None
        lines = [f"SwitchName={leaf} Nodes={fold(hanging[leaf])}" for leaf in sorted(hanging, key=natural)]
        lines += [
            f"SwitchName={upper} Switches={fold(below[upper])}"
            for upper in sorted(
                below, key=lambda name: (name == "core", not name.startswith("spine"), natural(name))
            )
        ]
        return "\n".join(lines) + "\n"


def in_namespaces(argv: Sequence[str], timeout_s: float) -> int:
    """Run a command as the first process of namespaces of its own, and return its exit status."""
    with subprocess.Popen([*_UNSHARE, *argv]) as process:
        try:
            return process.wait(timeout_s)
        finally:
            process.kill()  # and with it, by --kill-child, everything inside


@contextmanager
def slurm_of(shape: Shape, folder: Path) -> Iterator[None]:
    """Start all daemons (40 s for 1,024 nodes) and give control when all nodes are idle; inside `in_namespaces`.

    Raises:
        TimeoutError: they were not in time.
    """
    _network(folder)
    conf = _configured(shape, folder)
    os.environ["SLURM_CONF"] = str(conf)
    munge = folder / "munge"
    files = ["key-file=key", "socket=s", "pid-file=pid", "log-file=log", "seed-file=seed"]
    told = [f"--{name}={munge / file}" for name, _, file in (one.partition("=") for one in files)]
    _run(["munged", "--force", *told])
    _run(["slurmctld", "-c", "-f", str(conf)])
    until(lambda: "UP" in said(["scontrol", "ping"]), 30.0, "slurmctld")
    for number in range(shape.nodes):
        _run(["slurmd", "-N", f"e{number}", "-f", str(conf)])
    wait_idle(shape)
    yield


def wait_idle(shape: Shape) -> None:
    """Return when all nodes are idle."""
    until(
        lambda: said(["sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D"]) == str(shape.nodes),
        _START_S,
        "nodes",
    )


def said(argv: Sequence[str]) -> str:
    """Return what a command says, on either channel, whether it worked or not."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout + done.stderr).strip()


def until(true: Callable[[], bool], most_s: float, what: str) -> None:
    """Wait until something is true.

    Raises:
        TimeoutError: it was not in time.
    """
    ends = time.monotonic() + most_s
    while not true():
        if time.monotonic() > ends:
            raise TimeoutError(what)
        time.sleep(0.1)


def _run(argv: Sequence[str]) -> None:
    subprocess.run(argv, check=True, timeout=90, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _network(folder: Path) -> None:
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.9.0.1 big\n", encoding="utf-8")
    # With nothing but lo, getaddrinfo fails even for 127.x: any other address cures it.
    for command in (
        "hostname big",
        f"mount --bind {hosts} /etc/hosts",
        "ip link set lo up",
        "ip link add v0 type veth peer name v1",
        "ip addr add 10.9.0.1/24 dev v0",
        "ip link set v0 up",
        "ip link set v1 up",
    ):
        _run(command.split())


def _configured(shape: Shape, folder: Path) -> Path:
    folder.chmod(0o755)
    for name in ("state", "log", "munge", "pid", "dev"):
        (folder / name).mkdir()
    key = folder / "munge" / "key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    for gpu in range(GPUS):
        _run(["mknod", str(folder / "dev" / f"g{gpu}"), "c", "1", "3"])
    files = {
        "slurm.conf": _slurm_conf(shape, folder),
        "topology.conf": shape.conf(),
        "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
        "gres.conf": f"Name=gpu File={folder}/dev/g[0-{GPUS - 1}]\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "slurm.conf"


def _slurm_conf(shape: Shape, folder: Path) -> str:
    step = shape.per_leaf
    nodes = [
        f"NodeName=e[{first}-{first + step - 1}] NodeHostname=big NodeAddr=127.0.0.1 "
        f"Port=[{27000 + first}-{27000 + first + step - 1}] CPUs=64 RealMemory=500000 Gres=gpu:{GPUS}"
        for first in range(0, shape.nodes, step)
    ]
    return f"""ClusterName=big
SlurmctldHost=big(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge/s
SlurmctldPort=26817
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/log/ctl.log
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
TopologyPlugin=topology/tree
GresTypes=gpu
SlurmdTimeout=600
SlurmdParameters=config_overrides
SlurmdPidFile={folder}/pid/%n
SlurmdLogFile={folder}/log/%n
MessageTimeout=60
ReturnToService=2
SchedulerParameters=bf_interval=5
MpiDefault=none
TreeWidth=1000
{chr(10).join(nodes)}
PartitionName=main Nodes=ALL Default=YES State=UP OverSubscribe=EXCLUSIVE
PartitionName=shared Nodes=ALL State=UP OverSubscribe=NO
"""
