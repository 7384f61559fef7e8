"""A test stand: a cluster of its own, a watchdog, one job, and what there is to read of them."""

from __future__ import annotations

import math
import os
import re
import secrets
import shlex
import shutil
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.watchdog.facts import Line, Told, read_logs
from benchmarks.watchdog.scenarios import EVERY, PAUSE_S, SLURMD_TIMEOUT_S, Rights
from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.slurm.client import JobVanishedError, Slurm
from deeplink.scheduler.slurm.parse import JobAddress
from deeplink.scheduler.testbed.cluster import Options, Sandbox
from deeplink.scheduler.testbed.lab.laboratory import Laboratory
from deeplink.scheduler.testbed.lifecycle import layout_of
from deeplink.scheduler.testbed.namespaced import daemon_command
from deeplink.scheduler.testbed.shape import CTL, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from deeplink.scheduler.recovery.records import ActionRecord
    from deeplink.scheduler.slurm.parse import JobRow, NodeRow

PORT = 7412
AGENT_PORT = 7411
RANK = Path(__file__).parent / "rank.py"
LONG = 1_000_000
"""Steps of a job that is not to end by itself."""
PAUSE = 0.05
TOLD_TO_END = "told to end"
_NAME = re.compile(r"w-(\d+)-[0-9a-f]{4}")
_ended = threading.Event()


class StandError(DeepLinkError):
    """The stand itself does not work: nothing can be measured on it."""


def end_all() -> None:
    """Let every stand of this process, in whatever thread, give up what it waits for and be taken down."""
    _ended.set()


def wait(seconds: float) -> None:
    """Wait for so long.

    Raises:
        StandError: `end_all` was called.
    """
    until(lambda: False, seconds)


def sweep() -> list[str]:
    """Take down the stands of programs that were killed, and return their names."""
    left = [
        name for name in Sandbox.names() if (of := _NAME.fullmatch(name)) and not Path(f"/proc/{of[1]}").exists()
    ]
    for name in left:
        Sandbox.clear(name)
    return left


def until(question: Callable[[], bool], bound_s: float) -> bool:
    """Return whether something became true in time.

    Raises:
        StandError: `end_all` was called.
    """
    deadline = time.monotonic() + bound_s
    while not question():
        if time.monotonic() > deadline:
            return False
        if _ended.wait(PAUSE):
            raise StandError(TOLD_TO_END)
    return True


@dataclass(slots=True)
class Stand:
    """A cluster, a watchdog's folder, a job's folder."""

    cluster: Sandbox
    lab: Laboratory
    folder: Path
    job: int = 0

    @classmethod
    @contextmanager
    def up(cls, shape: Shape, *, freezable: bool = False, cred_expire_s: int = 0) -> Iterator[Stand]:
        """Bring one up; whatever happens, it is taken down.

        Args:
            shape: of the cluster.
            freezable: whether the homes are a file system of their own.
            cred_expire_s: for so long Slurm holds a requeued job; 0: for as long as by default.

        Raises:
            StandError: `end_all` was called.
        """
        if _ended.is_set():
            raise StandError(TOLD_TO_END)
        name = f"w-{os.getpid()}-{secrets.token_hex(2)}"
        socket = layout_of(name).munge_socket
        extra = (f"AuthInfo=socket={socket},cred_expire={cred_expire_s}",) if cred_expire_s else ()
        options = Options(slurmd_timeout=SLURMD_TIMEOUT_S, freezable=freezable, extra=extra)
        try:
            cluster = Sandbox.up(name, shape, options)
            yield cls(cluster, Laboratory(cluster), _folder(cluster, "run"))
        finally:
            Sandbox.clear(name)

    def another(self, name: str) -> Stand:
        """Return the same stand with a folder for another job."""
        return Stand(self.cluster, self.lab, _folder(self.cluster, name))

    @property
    def watch_folder(self) -> Path:
        """Where the watchdog keeps its things: on its own host's disk, not on the shared storage."""
        return self.cluster.layout.machine(CTL) / "watch"

    @property
    def slurm(self) -> Slurm:
        """Slurm's commands, on the login host."""
        return Slurm(self.cluster.runner())

    def watch(self, rights: Rights, *more: str) -> None:
        """Start `deeplink watch --act` with more options, and return once it watches.

        Raises:
            StandError: it does not.
        """
        if rights is Rights.NONE:
            return
        user = self.cluster.user
        self.watch_folder.mkdir()
        if rights is Rights.USER:
            shutil.chown(self.watch_folder, user.uid, user.gid)
        own = self.cluster.layout.own / "watch"  # as the machine sees it
        argv = [sys.executable, "-m", "deeplink", "-v", "watch", "--act", "--bind", self._address]
        argv += ["--journal", str(own / "journal.sqlite"), "--token-file", str(own / "token"), *more]
        with (self.watch_folder / "said").open("ab") as said:
            process = self.cluster.spawn(CTL, argv, root=rights is Rights.OPERATOR, stdout=said, stderr=said)
        process.returncode = 0  # it ends with the cluster
        if not until(lambda: "watching: " in self.said(), 20):
            raise StandError(f"the watchdog does not watch: {self.said()}")

    def attend(self) -> None:
        """Start a node agent as a system service on every node: as root, and allowed to start slurmd again.

        Raises:
            StandError: one does not come up.
        """
        own = self.cluster.layout.own
        logs = []
        for node in self.cluster.nodes:
            disks = self.cluster.layout.machine(node)
            restart = daemon_command(node, str(self.cluster.layout.slurm_conf), rebooted=False)
            env = {
                "DEEPLINK_WATCH": self._address,
                "DEEPLINK_STATE": str(own / "state"),
                "DEEPLINK_SLURMD_RESTART": shlex.join(restart),
            }
            argv = [sys.executable, "-m", "deeplink", "node", "--name", node, "--token-file", str(own / "token")]
            argv += [
                "--bind",
                f"{self.cluster.shape.address(node)}:{AGENT_PORT}",
                "--store",
                str(own / "standing"),
            ]
            logs.append(disks / "agent.log")
            with logs[-1].open("ab") as out:
                process = self.cluster.spawn(node, argv, root=True, env=env, stdout=out, stderr=out)
            process.returncode = 0  # it ends with the cluster
        if not until(lambda: all(b'"pid"' in log.read_bytes() for log in logs), 60):
            said = b"\n".join(log.read_bytes() for log in logs)
            raise StandError(f"the standing agents do not come up: {said.decode(errors='replace')[-2000:]}")

    @property
    def _address(self) -> str:
        return f"{self.cluster.shape.address(CTL)}:{PORT}"

    def said(self) -> str:
        """Return what the watchdog said."""
        with suppress(FileNotFoundError):
            return (self.watch_folder / "said").read_text(encoding="utf-8", errors="replace")
        return ""

    def submit(self, options: str, command: str, *, watched: bool) -> None:
        """Submit a job as the ordinary user.

        Raises:
            StandError: Slurm refuses it.
        """
        lines = ["#!/bin/bash"]
        if watched:
            lines += [f"export DEEPLINK_WATCH={self._address}"]
        script = self.folder / "job.sh"
        script.write_text("\n".join([*lines, command, ""]), encoding="utf-8")
        argv = ["sbatch", *shlex.split(options), "--parsable", "--open-mode=append"]
        done = self.cluster.run(CTL, [*argv, f"--output={self.folder}/out", str(script)])
        if done.code:
            raise StandError(f"sbatch: {done.stderr}")
        self.job = int(done.stdout)

    def train(self, *more: str, steps: int = LONG) -> str:
        """Return the command of one rank."""
        argv = [sys.executable, str(self.folder / "rank.py"), str(self.folder), str(steps)]
        return shlex.join([*argv, "--pause", f"{PAUSE_S:g}", "--every", str(EVERY), *more])

    # -- what there is to read

    def lines(self) -> tuple[Line, ...]:
        """Return the ranks' own logs."""
        return read_logs(self.folder)

    def output(self) -> str:
        """Return what the job wrote."""
        with suppress(FileNotFoundError):
            return (self.folder / "out").read_text(encoding="utf-8", errors="replace")
        return ""

    def row(self) -> JobRow | None:
        """Return the job as Slurm tells it; None when it does not answer, or has forgotten."""
        with suppress(JobVanishedError, DeepLinkError):
            return self.slurm.job(self.job)
        return None

    def nodes(self) -> list[NodeRow]:
        """Return the nodes as Slurm tells them; none when it does not answer."""
        with suppress(DeepLinkError):
            return self.slurm.nodes()
        return []

    def journals(self) -> dict[str, list[Path]]:
        """Return the journals there are, by who keeps them."""
        jobs = self.cluster.home / ".local/state/deeplink/jobs"
        found = {
            "watchdog": [self.watch_folder / "journal.sqlite"],
            "launcher": sorted(jobs.glob("*/journal.sqlite")),
        }
        return {by: [path for path in paths if path.exists()] for by, paths in found.items()}

    def incidents(self) -> tuple[Told, ...]:
        """Return every incident on record, by detection."""
        journals = self.journals()
        found = [told for by, paths in journals.items() for path in paths for told in _incidents(by, path)]
        for path in journals["watchdog"]:
            with suppress(DeepLinkError), Journal(path, read_only=True) as journal:
                found = [_as_known(told, journal) for told in found]
        return tuple(sorted(found, key=lambda told: told.detected_unix))

    def actions(self) -> tuple[ActionRecord, ...]:
        """Return what the watchdog began, once for each time: requests that were given up are begun again."""
        found: list[ActionRecord] = []
        for path in self.journals()["watchdog"]:
            with suppress(DeepLinkError), Journal(path, read_only=True) as journal:
                found += journal.actions()
        return tuple(found)

    def late_points(self, attempt: object, after_unix: float) -> int:
        """Return how many metrics of an attempt are on record of later than some moment."""
        count = 0
        for paths in self.journals().values():
            for path in paths:
                with suppress(DeepLinkError), Journal(path, read_only=True) as journal:
                    points = journal.points(self.job, after_unix=after_unix)
                    count += sum(1 for point in points if point.attempt == attempt)
        return count

    def resume(self, nodes: Iterable[str]) -> None:
        """Return nodes to service, as an administrator would."""
        argv = ["scontrol", "update", f"nodename={','.join(nodes)}", "state=resume"]
        self.cluster.run(CTL, argv, root=True)

    def all_gpus(self, bound_s: float = 40.0) -> float:
        """Return how long a job of every node's GPUs waits; inf where it does not begin.

        The cluster is whole again for it: whoever was drained is resumed, as an administrator would.
        """
        with suppress(DeepLinkError):
            self.slurm.cancel(JobAddress.of_label(str(self.job)))
        self.lab.heal()
        self.resume(self.cluster.nodes)
        until(lambda: set(self.cluster.states().values()) == {"idle"}, bound_s)
        count, gpus = len(self.cluster.nodes), self.cluster.shape.gpus
        began = time.monotonic()
        argv = ["srun", f"--nodes={count}", f"--gres=gpu:{gpus}", "--exclusive", "--immediate=30", "true"]
        with suppress(DeepLinkError):
            if self.cluster.run(CTL, argv, timeout_s=bound_s).code == 0:
                return time.monotonic() - began
        return math.inf


def _folder(cluster: Sandbox, name: str) -> Path:
    """Make a job's folder, with the ranks' program in it."""
    folder = cluster.home / name
    folder.mkdir()
    shutil.copy(RANK, folder / "rank.py")
    for path in (folder, folder / "rank.py"):
        shutil.chown(path, cluster.user.uid, cluster.user.gid)
    return folder


def _as_known(told: Told, journal: Journal) -> Told:
    """Return an incident under the id that the watchdog gave the fault it tells of."""
    known = journal.incident(told.id)
    return replace(told, id=known.id) if known else told


def _incidents(by: str, path: Path) -> list[Told]:
    try:
        with Journal(path, read_only=True) as journal:
            return [
                Told(
                    by=by,
                    id=one.id,
                    kind=str(one.kind),
                    node=one.node or "",
                    attempt=str(one.attempt or ""),
                    began_unix=one.began_unix,
                    detected_unix=one.detected_unix,
                    action=str(one.action),
                    outcome=one.outcome,
                    evidence=one.evidence,
                    stacks=sum(1 for stack in journal.stacks(one.id) if stack.source),
                )
                for one in journal.incidents(limit=1_000)
            ]
    except DeepLinkError:
        return []
