"""What is known of a cluster at one moment: one question to Slurm, and the fabric from a file kept beside."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deeplink.errors import DeepLinkError
from deeplink.publish import write_unsynced
from deeplink.scheduler.wish import state
from deeplink.scheduler.wish.columns import ARGUMENTS
from deeplink.scheduler.wish.site import CompiledError, KnownFabric, Ties

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deeplink.clock import Clock
    from deeplink.scheduler.slurm.command import Runner
    from deeplink.scheduler.wish.state import ClusterState

ANSWER_S = 3.0
"""How long slurmctld may take to answer here: a wish is not worth more, and sbatch itself waits longer."""
SWITCHES_KEPT_S = 600.0
"""So old may be what Slurm said of its switches; they change when an administrator moves a cable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a survey comes from.

    Attributes:
        run: runs Slurm's commands.
        clock: for the age of what is kept.
        folder: where it is kept.
        cluster: tells this cluster's files from another one's in the same home (SLURM_CONF, say).
        topology: the site's own description of its fabric; None for Slurm's.
        compiled: reads that description.
        switches: asks Slurm for its switches.
    """

    run: Runner
    clock: Clock
    folder: Path
    cluster: str
    topology: Path | None
    compiled: Callable[[Path], Ties]
    switches: Callable[[], Ties]


def survey(sources: Sources) -> tuple[ClusterState, KnownFabric]:
    """Return the cluster's nodes and its fabric.

    Raises:
        CommandError, CommandTimeoutError, CommandMissingError: Slurm did not tell its nodes.
        SurveyTextError, UnknownStateError: what it told cannot be read.
    """
    switches = _Switches(sources)
    switches.renew_if_old()
    now = state.parse(sources.run(ARGUMENTS, timeout_s=ANSWER_S))
    slurm, said = switches.result(now)
    notes = [said] if said else []
    ties, trouble = _site(sources, slurm)
    return now, KnownFabric(ties, slurm.fabric, (*notes, *trouble))


def _key(text: str) -> str:
    return "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in text)[-100:]


def _kept(path: Path) -> dict[str, Any]:
    """Return what a file of ours holds; nothing where there is none, or not a whole one."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(path: Path, document: dict[str, Any]) -> None:
    with suppress(OSError):  # it is asked for again next time
        write_unsynced(path, json.dumps(document).encode())


class _Switches:
    """What Slurm knows of its switches: from the file, asked for beside the survey where that is old."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._path = sources.folder / f"switches-{_key(sources.cluster)}.json"
        self._ties: Ties | None = None
        self._problem = ""
        self._asking: threading.Thread | None = None
        kept = _kept(self._path)
        age = sources.clock.unix() - kept.get("unix", 0.0) if isinstance(kept.get("unix"), float) else -1.0
        self._old = not 0.0 <= age < SWITCHES_KEPT_S
        with suppress(CompiledError, KeyError):
            self._ties = Ties.parse(kept["ties"])

    def renew_if_old(self) -> None:
        if self._old or self._ties is None:
            self._asking = threading.Thread(target=self._ask, daemon=True)
            self._asking.start()

    def _ask(self) -> None:
        try:
            ties = self._sources.switches()
        except DeepLinkError as problem:
            self._problem = f"Slurm's switches are not known: {problem}"
            return
        self._ties = ties
        _keep(self._path, {"unix": self._sources.clock.unix(), "ties": ties.document()})

    def result(self, now: ClusterState) -> tuple[Ties, str]:
        if self._asking is not None:
            self._asking.join(ANSWER_S + 1.0)  # what it waits for is bounded itself
        elif (
            self._ties is not None
            and self._ties.fabric.paths
            and now.nodes.keys() - self._ties.fabric.paths.keys()
        ):
            self._ask()  # there are nodes that were not there then
        return self._ties or Ties(), self._problem


def _site(sources: Sources, slurm: Ties) -> tuple[Ties, list[str]]:
    """Return the ties that placement weighs by, and what went wrong on the way."""
    if sources.topology is None:
        return slurm, []
    try:
        status = sources.topology.stat()
    except OSError as problem:
        return slurm, [f"{sources.topology}: {problem.strerror or problem}; Slurm's switches are used"]
    stamp = [str(sources.topology), status.st_mtime_ns, status.st_size, status.st_ino]
    path = sources.folder / f"topology-{_key(str(sources.topology))}.json"
    kept = _kept(path)
    if kept.get("stamp") == stamp:
        with suppress(CompiledError, KeyError):
            return Ties.parse(kept["ties"]), []
    try:
        ties = sources.compiled(sources.topology)
    except DeepLinkError as problem:
        return slurm, [f"{sources.topology}: {problem}; Slurm's switches are used"]
    if not ties.fabric.paths:
        return slurm, [f"{sources.topology}: no node hangs on a switch there; Slurm's switches are used"]
    _keep(path, {"stamp": stamp, "ties": ties.document()})
    return ties, []
