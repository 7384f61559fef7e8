"""Events from outside: a signal to end, preemption, the time limit, the job started elsewhere; pure.

Slurm tells a job little (measured, 22.05.8). At the time limit and by scancel everything gets SIGTERM, the batch
script too. In a preemption with GraceTime the steps get SIGTERM, agents and ranks alike, and the batch script gets
none. So when something was ended that we did not end, Slurm is asked why.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.scheduler.launch.deadline import DeadlineAction
from deeplink.scheduler.launch.job_status import OVER_S
from deeplink.scheduler.launch.verdict import AttemptVerdict, NextMove
from deeplink.scheduler.watch.records import IncidentKind

if TYPE_CHECKING:
    from deeplink.scheduler.launch.job_status import JobStatus

WORD_S = 5.0
"""How long Slurm's word is waited for once ranks have ended; without it they are judged by what else is known."""
TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalEvents:
    """What is known of what comes from outside.

    Attributes:
        told: the signal that told us to end; empty while none did.
        code: exit code of the ranks; None while they run.
        agents_gone: all agents have ended, and we did not end them.
        cut_off: most nodes were silent at once, or all but our own, and Slurm has not said since whose the job is.
        standing: Slurm's answer to a question asked since any of this began; None while there is none.
        asked_for_s: since then.
        now: what the time limit asks for.
        gained: whether a newer step than before this run was reported.
        requeueable: whether Slurm may start the job again.
    """

    told: str = ""
    code: int | None = None
    agents_gone: bool = False
    cut_off: bool = False
    standing: JobStatus | None = None
    asked_for_s: float = 0.0
    now: DeadlineAction = DeadlineAction.NOTHING
    gained: bool = False
    requeueable: bool = False

    @property
    def was_ended(self) -> bool:
        """Whether something was ended that we did not end."""
        return bool(self.told or self.agents_gone or self.code == TERMINATED)

    @property
    def wants_word(self) -> bool:
        """Whether Slurm is to be asked."""
        return self.cut_off or self.was_ended


def look_outside(seen: ExternalEvents) -> AttemptVerdict | None:
    """Return what is to be done for a reason from outside; None where there is none."""
    word = seen.standing
    if word is not None and not word.ours and not seen.told:
        because = (
            "the job has been started again elsewhere, by Slurm's word: what is here has no business any more"
        )
        return AttemptVerdict(move=NextMove.SUPERSEDED, because=because)
    waits = word is None and seen.asked_for_s < WORD_S
    if seen.told:
        return _about_told(seen, waits=waits)
    if seen.was_ended:
        return _about_ended(seen, waits=waits)
    if seen.now is DeadlineAction.END and seen.code is None and seen.requeueable and seen.gained:
        because = "the time limit is near"
        return AttemptVerdict(move=NextMove.REQUEUE, because=because, kind=IncidentKind.TIME_LIMIT)
    return None


def _about_told(seen: ExternalEvents, *, waits: bool) -> AttemptVerdict | None:
    if seen.code is None:
        return None  # the ranks have their time
    if waits:
        return AttemptVerdict(move=NextMove.WAIT, because="told to end; asking Slurm why")
    kind, why = _why(seen.standing)
    because = f"ended after {seen.told}{why}"
    if kind is not None and seen.requeueable and (seen.gained or kind is IncidentKind.PREEMPTED):
        return AttemptVerdict(move=NextMove.REQUEUE, because=because, kind=kind, code=seen.code)
    if not seen.code:
        return AttemptVerdict(move=NextMove.SUCCEEDED, because=because)
    return AttemptVerdict(move=NextMove.FAILED, because=because, code=seen.code, kind=kind)


def _about_ended(seen: ExternalEvents, *, waits: bool) -> AttemptVerdict | None:
    if waits:
        return AttemptVerdict(move=NextMove.WAIT, because="something ended them; asking Slurm why")
    kind, why = _why(seen.standing)
    if kind is None and (seen.standing is None or seen.standing.runs):
        return None  # not Slurm's doing
    if seen.code is None:
        return AttemptVerdict(
            move=NextMove.WAIT, because=f"the agents were ended{why}; waiting for the ranks to end"
        )
    because = f"the ranks were ended{why}"
    if kind is not None and seen.requeueable and (seen.gained or kind is IncidentKind.PREEMPTED):
        return AttemptVerdict(move=NextMove.REQUEUE, because=because, kind=kind, code=seen.code)
    move = NextMove.FAILED if seen.code else NextMove.SUCCEEDED
    return AttemptVerdict(move=move, because=because, code=seen.code, kind=kind)


def _why(word: JobStatus | None) -> tuple[IncidentKind | None, str]:
    if word is None:
        return None, ""
    if not word.ours:
        return None, ": Slurm starts the job again"
    if word.preempting:
        return IncidentKind.PREEMPTED, ": another job is to have the nodes"
    if word.left_s is not None and word.left_s <= OVER_S:
        return IncidentKind.TIME_LIMIT, ": the time limit"
    if not word.runs:
        return None, f": by Slurm ({word.word})"
    return None, ""
