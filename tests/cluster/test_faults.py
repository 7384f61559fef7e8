"""Members that are cut off: machines with SSDs of their own, whose cable is taken out while a training reads.

A dead process on a machine that lives answers at once that nobody listens; a cut-off machine does not answer.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from deeplink.core.config import Config
from deeplink.core.types import Member, NodeName, format_members
from deeplink.rpc import tokens
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL
from tests.cache.agents import small_files, write_tree
from tests.faults.processes import ROOT, Lines, Loop, Record, let_go, ready, survived, task_of
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
MEMBERS = ("n0", "n1", "n2", "n3")
READER = "n4"
PORT = 7419


@dataclass(frozen=True)
class Far:
    """Agents on machines of their own, and a machine that reads from them."""

    cluster: Sandbox
    folder: Path
    files: Mapping[str, bytes]
    config: Config
    pids: Mapping[str, int]

    @contextmanager
    def reading(self) -> Iterator[Loop]:
        """Run a reading loop on the reader's machine."""
        task = task_of(self.config, self.files)
        log = self.folder / "reading.log"
        with log.open("wb") as errors:
            popen = self.cluster.spawn(
                READER,
                [sys.executable, "-m", "tests.faults.reading", str(task.write(self.folder / "task.json"))],
                root=True,
                env={"PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        try:
            yield ready(Loop(popen, log))
        finally:
            let_go(popen)

    def signal(self, node: str, number: int) -> None:
        """Send a signal to a member's agent: to what serves, and to what keeps its sockets."""
        pid = self.pids[node]
        self.cluster.run(node, ["sh", "-c", f"kill -{number} {pid} $(pgrep -P {pid})"], root=True)

    def received(self) -> int:
        """Return the bytes that came to the reader's machine over its cable."""
        lines = self.cluster.run(READER, ["cat", "/proc/net/dev"]).stdout.splitlines()
        return sum(int(line.split(":")[1].split()[0]) for line in lines if ":" in line and "lo:" not in line)


@pytest.fixture(scope="module")
def far(sandbox: Sandbox) -> Iterator[Far]:
    """Four members that hold three copies of each shard, and no source."""
    files = small_files(400)
    folder = sandbox.home / f"faults-{os.getpid()}"
    source = write_tree(folder / "source", files)
    token = tokens.new_token()
    tokens.write_token(folder / "token", token)
    members = [Member(NodeName(node), f"{sandbox.shape.address(node)}:{PORT}") for node in MEMBERS]
    config = Config(
        catalog=folder / "catalog",
        store=Path("/local/ssd/faults-reader"),
        state=folder / "state",
        node=READER,
        replicas=3,
        shard_bytes=200_000,
        members=format_members(tuple(members)),
        token_file=folder / "token",
    )
    env = {
        "DEEPLINK_CATALOG": str(config.catalog),
        "DEEPLINK_STATE": str(config.state),
        "DEEPLINK_STORE": str(folder / "store"),  # root's: in the user's home no user could write to it
        "DEEPLINK_MEMBERS": config.members,
        "DEEPLINK_TOKEN_FILE": str(config.token_file),
        "DEEPLINK_REPLICAS": str(config.replicas),
        "DEEPLINK_SHARD_BYTES": str(config.shard_bytes),
        "PYTHONPATH": str(ROOT),
    }
    with ExitStack() as stack:
        stack.callback(until, lambda: _is_gone(folder))
        pids = {str(member.name): _agent(stack, sandbox, member, folder, env) for member in members}
        command = [sys.executable, "-m", "deeplink", "pack", str(source), "digits"]
        packed = sandbox.run(CTL, command, root=True, env=env, timeout_s=LIMIT_S)
        assert packed.code == 0, packed.stderr
        source.rename(source.with_name("moved"))
        yield Far(sandbox, folder, files, config, pids)


def _is_gone(folder: Path) -> bool:
    """Remove a folder into which agents that were told to end may write for a moment."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def _agent(stack: ExitStack, sandbox: Sandbox, member: Member, folder: Path, env: Mapping[str, str]) -> int:
    log = folder / f"{member.name}.log"
    command = ["node", "--name", member.name, "--bind", member.address, "--store", "/local/ssd/faults-member"]
    with log.open("wb") as errors:
        popen = sandbox.spawn(
            member.name,
            [sys.executable, "-m", "deeplink", *command],
            root=True,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    stack.callback(let_go, popen)
    pid: int = Lines(popen, log.read_text).next()["pid"]
    return pid


def test_a_member_is_cut_off_and_comes_back(far: Far, record: Record) -> None:
    crossed = far.received()
    with far.reading() as loop:
        far.cluster.cut("n0")
        try:
            loop.await_epochs(2)
        finally:
            far.cluster.heal("n0")
        loop.await_epochs(1)
        stats = survived(loop, record)
    assert stats["source_samples"] == 0
    assert "member n0" in loop.log()
    assert far.received() - crossed > stats["peer_bytes"]


def test_one_member_is_cut_off_and_another_freezes(far: Far, record: Record) -> None:
    with far.reading() as loop:
        far.cluster.cut("n1")
        try:
            far.signal("n2", signal.SIGSTOP)
            loop.await_epochs(2)
        finally:
            far.signal("n2", signal.SIGCONT)
            far.cluster.heal("n1")
        loop.await_epochs(1)
        stats = survived(loop, record)
    assert stats["source_samples"] == 0


@pytest.fixture
def record(record_property: Record) -> Record:
    return record_property
