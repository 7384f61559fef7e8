"""Does what operators ask for: the watchdog's own actor for it, in the loop's thread, with intents in the journal.

A request is written down before its first command, and what it depends on is read again right before that: where
something has changed since the operator agreed, nothing is done. A watchdog that was killed in between finishes on
return what it can see was not done, and never does a thing twice.
"""

from __future__ import annotations

import json
import shlex
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Attempt
from deeplink.scheduler.journal.journal import JournalError
from deeplink.scheduler.journal.operations import OperationRecord
from deeplink.scheduler.recovery.evidence import Remedy
from deeplink.scheduler.recovery.records import ActionRecord
from deeplink.scheduler.slurm.command import CommandError, CommandTimeoutError
from deeplink.scheduler.slurm.parse import JobAddress
from deeplink.scheduler.watch.operator_plan import ACKNOWLEDGEMENTS, GONE, PAUSES, runnable, standing
from deeplink.scheduler.watch.operator_requests import (
    OF_DATASETS,
    OF_INCIDENTS,
    WATCHDOG,
    OperationError,
    OperatorPlan,
    OperatorRequest,
    OperatorVerb,
    changes,
    check_request,
    reason_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from deeplink.core.metrics import WatchMetrics
    from deeplink.scheduler.watch.operator_plan import OperatorPlanner

WAIT_S = 10.0  # how long a caller waits for the end of what he asked for
MOST_OPEN = 32  # requests under way at once
MOST_A_MINUTE = 30  # that one user, or one console for all, may ask for
SETTLE_S = 15.0  # a command that shows no effect for so long has none
LONGEST_S = 120.0  # a request that Slurm does not answer to is given up after so long
LONGEST_REQUEUE_S = 660.0  # the actor's own bound on a restart, and a little
LONGEST_MOVE_S = 6 * 3_600.0  # warming and evicting
DONE, REFUSED, FAILED = "done", "refused", "failed"
_ENDED = ("CANCELLED", "COMPLETING", GONE)


class TooManyOperationsError(DeepLinkError):
    """More is asked for than is done at once, or than one person may ask for in a minute."""


def _has_effect(plan: OperatorPlan, reason: str) -> bool:
    """Whether what is seen now is what the request was for."""
    facts = json.loads(plan.saw)
    match plan.request.verb:
        case OperatorVerb.DRAIN:
            return bool(facts["state"] != "in service" and facts["reason"] == reason)
        case OperatorVerb.RESUME:
            return bool(facts["state"] == "in service")
        case OperatorVerb.RELEASE:
            return not facts.get("held")
        case OperatorVerb.CANCEL:
            return facts["state"] in _ENDED
        case _:
            return False


@dataclass(slots=True, kw_only=True)
class OperatorActor:
    """Runs the commands that operators ask for. `submit` is for any thread, `work` for the loop's alone."""

    planner: OperatorPlanner
    metrics: WatchMetrics
    say: Callable[[str], None]
    wake: Callable[[], None]  # has the loop come round now
    _open: dict[str, OperationRecord] = field(default_factory=dict)
    _ended: threading.Condition = field(default_factory=threading.Condition)
    _asked: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))
    _sent: dict[str, float] = field(default_factory=dict)
    _taken_up: set[str] = field(default_factory=set)
    _mover: threading.Thread | None = None
    _begun: bool = False
    _closing: bool = False
    _paused: str = ""

    # Any thread.

    @property
    def paused(self) -> str:
        """By whom, and why, the watchdog begins nothing of its own; empty while it is not paused."""
        return self._paused

    def submit(
        self,
        name: str,
        request: OperatorRequest,
        saw: str,
        person: str,
        *,
        via: str = "",
        wait_s: float = WAIT_S,
    ) -> OperationRecord:
        """Have a request done, once for each name of it; return how it stands after `wait_s` at the latest."""
        known = self.planner.log.of(check_request(name))
        if known is None:
            if not request.why:
                raise OperationError("why? The reason is written down with what is done")
            self._count(via or person)  # who is proved: a name can be made up
            plan = self.planner.plan(request, person)
            known = self._begin(name, plan, saw, person, via)
        elif (known.verb, known.nodes, known.person) != (request.verb, request.nodes, person) or (
            request.verb not in OF_INCIDENTS and known.target != request.target  # those are known by several names
        ):
            raise OperationError(f"request {name} was something else", remedy="Make a new id for each request.")
        with self._ended:
            self._ended.wait_for(lambda: name not in self._open, wait_s if known.is_open else 0.0)
        return self.planner.log.of(name) or known

    def _count(self, person: str) -> None:
        with self._ended:
            now = self.planner.clock.monotonic()
            for name, when in list(self._asked.items()):
                while when and now - when[0] >= 60.0:  # noqa: PLR2004 - a minute
                    when.popleft()
                if not when:
                    del self._asked[name]
            asked = self._asked[person]
            if len(asked) >= MOST_A_MINUTE:
                raise TooManyOperationsError(f"{person} has asked for {MOST_A_MINUTE} actions in a minute")
            asked.append(now)

    def _begin(self, name: str, plan: OperatorPlan, saw: str, person: str, via: str) -> OperationRecord:
        request = plan.request
        record = OperationRecord(
            request=name,
            verb=request.verb,
            target=request.target,
            nodes=request.nodes,
            why=request.why,
            force=request.force,
            person=person,
            via=via,
            saw=saw,
            commands=tuple(map(shlex.join, plan.commands)),
            asked_unix=self.planner.clock.unix(),
        )
        with self._ended:
            if len(self._open) >= MOST_OPEN:
                raise TooManyOperationsError(f"{MOST_OPEN} actions are under way")
            known = self.planner.log.of(name)
            if known is None:
                known = self.planner.log.begin(record)
                self._open[name] = record
        self.wake()
        return known

    # The loop's thread.

    def work(self) -> bool:
        """Take every request as far as it goes now; return whether any is left."""
        self.take_up()
        for record in list(self._open.values()):
            try:
                self._advance(record)
            except JournalError:
                raise  # nothing is done that cannot be written down
            except CommandTimeoutError as problem:  # Slurm may answer yet
                if self.planner.clock.unix() - record.asked_unix > LONGEST_S:
                    self._end(record, FAILED, str(problem))
            except DeepLinkError as problem:
                self._end(record, FAILED, str(problem))
        return any(record.verb not in OF_DATASETS for record in self._open.values())

    def take_up(self) -> None:
        """Learn, once, whether we are paused, and what a watchdog before this one had not ended."""
        if self._begun:
            return
        with self._ended:
            before = {record.request: record for record in self.planner.log.unfinished()}
            self._taken_up = before.keys() - self._open.keys()
            self._open = {**before, **self._open}
        self._note_pause()
        self._begun = True

    def close(self) -> None:
        """End what runs still: whoever watches next goes on with it."""
        self._closing = True
        self.planner.run.close()

    def _advance(self, record: OperationRecord) -> None:
        verb = OperatorVerb(record.verb)
        if verb in OF_DATASETS:
            self._move(record)
        elif verb is OperatorVerb.REQUEUE and self.planner.journal.action(_key(record)):
            self._follow_restart(record)
        elif record.request in self._sent:
            self._await_effect(record)
        else:
            self._start(record)

    def _planned(self, record: OperationRecord) -> OperatorPlan:
        request = OperatorRequest(
            verb=OperatorVerb(record.verb),
            target=record.target,
            nodes=record.nodes,
            why=record.why,
            force=bool(record.force),
        )
        return self.planner.plan(request, record.person)

    def _checked(self, record: OperationRecord) -> OperatorPlan | None:
        """Return the plan as it is now; None, and the end is written, where it is not what was agreed to."""
        plan = self._planned(record)
        if record.request in self._taken_up and _has_effect(plan, reason_of(record.person, record.why)):
            self._end(record, DONE, "done before the watchdog was started again")
            return None
        if changed := changes(record.saw, plan.saw):
            self._end(record, REFUSED, f"something has changed since it was asked: {changed}")
        elif plan.refused:
            self._end(record, REFUSED, f"{plan.refused}. {plan.remedy}".strip())
        else:
            return plan
        return None

    def _start(self, record: OperationRecord) -> None:
        plan = self._checked(record)
        if plan is None:
            return
        if plan.request.verb is OperatorVerb.REQUEUE:
            self._restart(record)
            return
        if not plan.commands:
            self._end(record, DONE, f"{record.verb}, by {record.person}")
            return
        self._sent[record.request] = self.planner.clock.monotonic()
        try:
            for argv in plan.commands:
                self.planner.slurm.run(list(argv))
        except CommandError as refused:
            self._end(record, FAILED, f"Slurm refused: {refused.stderr.strip() or refused}")
        except CommandTimeoutError:
            pass  # it may have been heard: what is seen next tells
        else:
            self._await_effect(record)

    def _await_effect(self, record: OperationRecord) -> None:
        plan = self._planned(record)
        if _has_effect(plan, reason_of(record.person, record.why)):
            self._end(record, DONE, "Slurm shows it")
        elif self.planner.clock.monotonic() - self._sent[record.request] > SETTLE_S:
            self._end(record, FAILED, f"{SETTLE_S:.0f} s after the command Slurm still shows {plan.saw}")

    # A restart is the watchdog's own action, with all its care for nodes that do not answer.

    def _restart(self, record: OperationRecord) -> None:
        row = self.planner.slurm.job(JobAddress.of_label(record.target))
        known = self.planner.journal.job(row.id)
        newest = known.newest.attempt if known else Attempt(row.id, row.restarts, 0)
        action = ActionRecord(
            key=_key(record),
            incident=f"operator {record.person}",
            remedy=Remedy.RESTART,
            attempt=newest if newest.restart == row.restarts else Attempt(row.id, row.restarts, 0),
            node=None,
            reason=record.why,
            began_unix=self.planner.clock.unix(),
        )
        self.planner.journal.begin_action(action)

    def _follow_restart(self, record: OperationRecord) -> None:
        action = self.planner.journal.action(_key(record))
        if action and action.done_unix:
            gave_up = action.result.startswith("gave up")
            self._end(record, FAILED if gave_up else DONE, action.result)
        elif self.planner.clock.unix() - record.asked_unix > LONGEST_REQUEUE_S:
            self._end(record, FAILED, "not done in time")

    # Moving shards takes minutes: a thread of its own, one move at a time.

    def _move(self, record: OperationRecord) -> None:
        if self._mover is None or not self._mover.is_alive():
            self._mover = threading.Thread(target=partial(self._moved, record), name="operator-move", daemon=True)
            self._mover.start()

    def _moved(self, record: OperationRecord) -> None:
        try:
            # Both begin where they were: what a watchdog before us had begun is asked for again.
            if record.request not in self._taken_up and self._checked(record) is None:
                return
            argv = shlex.split(record.commands[0])
            done = self.planner.run(runnable(argv), timeout_s=LONGEST_MOVE_S)
        except JournalError as problem:
            self.say(f"operator {record.person}: {record.verb} {record.target}: {problem}")
            return
        except DeepLinkError as problem:
            outcome, result = FAILED, str(problem)
        else:
            if self._closing:
                return
            words = done.stdout.strip().splitlines()[-3:]  # one node may have failed, and others not
            words += done.stderr.strip().splitlines()[-3:] if done.code else []
            outcome, result = FAILED if done.code else DONE, "; ".join(words) or f"exited {done.code}"
        self._end(record, outcome, result[:2_000])
        self.wake()

    def _end(self, record: OperationRecord, outcome: str, result: str) -> None:
        now = self.planner.clock.unix()
        self.planner.log.end(record.request, outcome, result, now)
        if outcome == DONE and record.verb in ACKNOWLEDGEMENTS:
            word = "acknowledged" if record.verb == OperatorVerb.ACKNOWLEDGE else "opened again"
            self.planner.journal.record_moment(record.target, now, f"{word} by {record.person}: {record.why}")
        if record.verb in PAUSES:
            self._note_pause()
        with self._ended:
            self._open.pop(record.request, None)
            self._sent.pop(record.request, None)
            self._taken_up.discard(record.request)
            self._ended.notify_all()
        self.metrics.actions.labels(f"operator-{record.verb}", outcome).inc()
        self.say(f"operator {record.person}: {record.verb} {record.target} ({record.why}): {outcome}: {result}")

    def _note_pause(self) -> None:
        stands = standing(self.planner.log, PAUSES, WATCHDOG)
        self._paused = f"{stands.person}: {stands.why}" if stands else ""
        self.metrics.acting.set(self.planner.acts and not stands)


def _key(record: OperationRecord) -> str:
    return f"operator/{record.request}"
