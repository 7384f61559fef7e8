"""Folders of jobs as launchers leave them, for tests."""

from __future__ import annotations

import json
from pathlib import Path

from deeplink.core.finding import Finding, Severity
from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.jobs.job_folder import EVENTS, JOURNAL
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Beat, Incident, NodeRecord, Phase, ProgressPoint


def launched(
    state: Path,
    job: int,
    now: float,
    *,
    steps: int = 5,
    phase: Phase = Phase.RUNNING,
    restart: int = 0,
    incidents: tuple[Incident, ...] = (),
    silent: str = "",
    sick: str = "",
) -> Path:
    """Leave what a launcher on n1 and n0 with the spare n2 leaves, heard just now; return the folder."""
    folder = state / "jobs" / str(job)
    folder.mkdir(parents=True, exist_ok=True)
    attempt = Attempt(job, restart, 0)
    nodes = (NodeName("n1"), NodeName("n0"))
    beats = [
        NodeRecord(
            name=NodeName(name),
            topology_address=f"core.leaf{number % 2}.{name}",
            seen_unix=now,
            silent_s=7.0 if name == silent else 0.1,
            job=job,
            health=(Finding(check="disk", severity=Severity.WARNING, text="slow"),) if name == sick else (),
        )
        for number, name in enumerate(("n0", "n1", "n2"))
    ]
    points = tuple(
        ProgressPoint(
            attempt=attempt, step=step, unix=now - steps + step, metrics={"loss": 1 / step, "samples": 8.0 * step}
        )
        for step in range(1, steps + 1)
    )
    with Journal(folder / JOURNAL, shared_file_system=True) as journal:
        journal.record_beat(
            Beat(
                attempt=attempt,
                phase=phase,
                user="eve",
                job_name="tr ü",
                nodes=nodes,
                spares=(NodeName("n2"),),
                world_size=4,
                node_beats=tuple(beats),
                progress=points,
                incidents=incidents,
                ring_crossings=2,
                ring_crossings_stock=2,
            ),
            now,
        )
    event(folder, "job-started", now - 9, job=job, restart=restart, nodes=["n0", "n1", "n2"])
    event(folder, "attempt-started", now - 8, attempt=str(attempt), nodes=list(nodes), spares=["n2"], world_size=4,
          ranks=[4 // len(nodes)] * len(nodes),
          ring_crossings=2)  # fmt: skip
    return folder


def event(folder: Path, name: str, unix: float, **facts: object) -> None:
    """Add an event, as a launcher does."""
    with (folder / EVENTS).open("a") as file:
        file.write(f"{json.dumps({'event': name, 'unix': unix, 'monotonic': 0.0, **facts})}\n")
