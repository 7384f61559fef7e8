"""Jobs of the launcher's cluster tests: submitting them, waiting for them, reading what they left."""

from __future__ import annotations

import json
import secrets
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deeplink.scheduler.recovery.recovery_steps import NEXT_SECOND_S
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.parse import JobRow
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL
from tests.waiting import LIMIT_S, until

RANK_SCRIPT = Path(__file__).parent / "light_rank.py"


@dataclass(frozen=True)
class Job:
    cluster: Sandbox
    id: int
    folder: Path

    def row(self) -> JobRow:
        return Slurm(self.cluster.runner()).job(self.id)

    def output(self) -> str:
        path = self.folder / "out"
        return path.read_text() if path.exists() else ""

    def events(self, name: str = "") -> list[dict[str, Any]]:
        path = self.cluster.home / ".local/state/deeplink/jobs" / str(self.id) / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        return [event for event in found if not name or event["event"] == name]

    def await_event(self, name: str, bound_s: float = LIMIT_S, count: int = 1) -> dict[str, Any]:
        until(lambda: len(self.events(name)) >= count, bound_s, self.told)
        return self.events(name)[count - 1]

    def await_end(self, bound_s: float = 3 * LIMIT_S) -> JobRow:
        until(lambda: self.row().state.final, bound_s, self.told)
        return self.row()

    def let_end(self) -> JobRow:
        """Have ranks end that would else go on: a fault must not come when they are done already."""
        (self.folder / "end").touch()
        return self.await_end()

    def start_again(self, *changes: str) -> None:
        """Have a requeued job begin now, and not when Slurm's hold ends; `changes` are made to it as root."""
        # Not in the second of its last run's end, in which slurmd starts nothing of the job. And Slurm sets the
        # hold once more when it is done with that run: until then it is asked again.
        time.sleep(NEXT_SECOND_S)
        until(lambda: self._begins_now(changes), LIMIT_S, self.told)

    def _begins_now(self, changes: tuple[str, ...]) -> bool:
        argv = ["scontrol", "update", f"jobid={self.id}", "StartTime=now", *changes]
        self.cluster.run(CTL, argv, root=bool(changes))
        return self.row().state is not JobState.PENDING

    def told(self) -> str:
        return f"job {self.id}: {self.output()}\n{self.events()}"

    def placed(self, attempt: str) -> list[tuple[str, str]]:
        """Return node and leaf of each rank of an attempt, as the ranks wrote them, in rank order."""
        found = [path.read_text().split() for path in self.folder.glob(f"{attempt}.rank*")]
        return [(node, leaf) for node, leaf, _ in sorted(found, key=lambda words: int(words[2]))]


def steps_of(slurm: Slurm, job: int) -> set[str]:
    """Return the names of a running job's steps."""
    return {*slurm.run(["squeue", "-h", "--steps", "-j", str(job), "-o", "%j"]).split()}


def folder_of(cluster: Sandbox) -> Path:
    folder = cluster.home / f"t-{secrets.token_hex(4)}"
    folder.mkdir()
    shutil.copy(RANK_SCRIPT, folder / "train.py")
    for path in (folder, folder / "train.py"):
        shutil.chown(path, cluster.user.uid, cluster.user.gid)
    return folder


def submit(
    cluster: Sandbox, options: str, script: str, *, folder: Path | None = None, program: str = "sbatch"
) -> Job:
    """Submit a script; `{train}` in it is the light rank's command, to be followed by the number of steps."""
    folder = folder or folder_of(cluster)
    train = shlex.join([sys.executable, str(folder / "train.py"), str(folder)])
    file = folder / "job.sh"
    file.write_text(f"#!/bin/bash\n{script.replace('{train}', train)}\n")
    argv = [*shlex.split(program), *shlex.split(options), "--parsable", f"--output={folder}/out", str(file)]
    done = cluster.run(CTL, argv)
    assert done.code == 0, done.stderr
    return Job(cluster, int(done.stdout.strip()), folder)
