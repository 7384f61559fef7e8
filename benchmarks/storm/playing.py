"""Plays one case on a cluster of its own: the job, the faults in their time, and what is left afterwards."""

from __future__ import annotations

import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from benchmarks.storm.case import ALL, BATCH, CTL, FIRST, LAST, LEAF, RIGHTS, SPARE
from benchmarks.storm.dataset import DATASET, EPOCHS, packed
from benchmarks.storm.invariants import ENDS_S, HELD_S, CaseFacts, Injected, fed_wrongly, fences
from benchmarks.watchdog.facts import newest_step
from benchmarks.watchdog.playing import late_output, late_saves
from benchmarks.watchdog.stand import Stand, StandError, until, wait
from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.slurm.parse import JobAddress
from deeplink.scheduler.slurm.states import HELD, JobState
from deeplink.scheduler.testbed.lab.faults import FAULTS
from deeplink.scheduler.testbed.lab.laboratory import How
from deeplink.scheduler.testbed.lab.scene import FaultTarget, environment, processes_on
from deeplink.scheduler.testbed.processes import arguments
from deeplink.scheduler.testbed.shape import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.storm.case import Injection, StormCase
    from deeplink.data.digest import DeliveryDigest
    from deeplink.scheduler.slurm.parse import JobRow

BESIDE = 2
"""Nodes that no job has at the beginning: a requeued one can go there."""
STARTS_S = 90.0
CRED_EXPIRE_S = 20
"""Slurm holds a requeued job for so long (120 s by default, which every case would wait for)."""
JOB_NAME = "storm \x1b[2J\x1b]0;gone\x07 %j caf\udce9 \u202e\nJobId=1 JobState=COMPLETED"
"""As sbatch takes it: whoever tells of the job meets it."""
NEIGHBOUR_S = 7200
LOOK_S = 0.25


@dataclass(slots=True)
class CaseRun:
    """A case under way.

    Attributes:
        waiting: faults that are to come.
        open: those in effect.
        over: those that are over, and those that did not come.
        allocated: the job's nodes in each of its runs, by Slurm's count of restarts.
        row: the job as Slurm told it last.
    """

    case: StormCase
    stand: Stand
    say: Callable[[str], None]
    waiting: list[Injection]
    open: list[Injected] = field(default_factory=list)
    over: list[Injected] = field(default_factory=list)
    allocated: dict[int, frozenset[str]] = field(default_factory=dict)
    row: JobRow | None = None
    _reached: dict[int, float] = field(default_factory=dict)

    def submit(self) -> None:
        """Submit the job."""
        job = self.case.job
        gpus = self.stand.cluster.shape.gpus
        options = f"-N{job.ranks + job.spares} --exclusive --gres=gpu:{gpus} --no-kill --requeue"
        options += f" --job-name={shlex.quote(JOB_NAME)}"
        train = self.stand.train("--dataset", DATASET, "--epochs", str(EPOCHS), "--batch", str(12 // job.ranks))
        train += " --child" if job.children else ""
        command = f"exec deeplink run --nproc-per-node 1 --spares {job.spares} -- {train}"
        if job.array:
            # The task that starts last has the array's own id as its raw id: the one that trains.
            options += " --array=0-1"
            command = f'test "$SLURM_ARRAY_TASK_ID" = 1 || exec sleep {NEIGHBOUR_S}\n{command}'
        self.stand.submit(options, command, watched=job.watch != "none")
        self._reached[0] = time.time()

    def take(self, row: JobRow | None) -> None:
        """Take notice of how the job is; None when Slurm did not answer."""
        self.row = row or self.row
        if row is not None and row.nodes:
            self.allocated[row.restarts] = frozenset(map(str, row.nodes))

    # -- faults

    def tend(self) -> None:
        """Do the faults whose time has come, and undo those whose time is over."""
        now = time.time()
        for over in [one for one in self.open if one.over_unix <= now]:
            self._undo(over)
        for due in [one for one in self.waiting if self._due(one, now)]:
            self.waiting.remove(due)
            self._inject(due)

    def give_up(self, why: str) -> None:
        """Leave out what has not come yet, and undo what is in effect."""
        self.over += [Injected(injection=one, missed=why) for one in self.waiting]
        self.waiting.clear()
        for one in list(self.open):
            self._undo(one)

    def _due(self, one: Injection, now: float) -> bool:
        if one.step not in self._reached and newest_step(self.stand.lines()) >= one.step:
            self._reached[one.step] = now
        return now >= self._reached.get(one.step, now + 1) + one.wait_s

    def _inject(self, one: Injection) -> None:
        began = time.time()
        try:
            target, how = self._aim(one)
            target = self.stand.lab.inject(one.what, target, how).target
        except DeepLinkError as problem:
            if not (one.step or newest_step(self.stand.lines())):
                self.waiting.append(one)  # nothing is there yet that it could hit: once it is
                return
            self.over.append(Injected(injection=one, began_unix=began, missed=str(problem)))
            self.say(f"{one} left out: {problem}")
            return
        hit = time.time()
        over = began + one.hold_s if one.hold_s else hit
        self.open.append(Injected(injection=one, target=target, began_unix=began, hit_unix=hit, over_unix=over))
        self.say(f"{one.what} {target.rpartition('/')[2]} at step {newest_step(self.stand.lines())}")

    def _undo(self, one: Injected) -> None:
        self.open.remove(one)
        try:
            self.stand.lab.undo(one.injection.what, one.target)
        except DeepLinkError as problem:
            self.say(f"{one.injection.what} could not be undone: {problem}")
            self.stand.lab.heal()
        self.over.append(replace(one, over_unix=time.time()))

    def _aim(self, one: Injection) -> tuple[str, How]:
        """Return what a fault hits now.

        Raises:
            StandError: there is none such.
        """
        kind = FAULTS[one.what].target
        if kind is FaultTarget.FOLDER:
            folder = self.stand.folder
            return (str(folder), How()) if one.what == "rank-exit" else (str(folder / "checkpoints"), How())
        if one.place in {CTL, ALL}:
            return (CTL if one.place == CTL else ""), How()
        node = self._node(one.place)
        return (self.stand.cluster.shape.above(node) if one.place == LEAF else node), How(share=0.6)

    def _node(self, place: str) -> str:
        ranks, row = self._ranks(), self.row
        nodes = sorted(self.allocated.get(max(self.allocated, default=0), ()))
        spares = [node for node in nodes if node not in ranks.values()] if ranks else []
        found = {
            BATCH: row.batch_host if row else None,
            FIRST: ranks[min(ranks)] if ranks else next(iter(nodes), None),
            LAST: ranks[max(ranks)] if ranks else next(reversed(nodes), None),
            SPARE: next(reversed(spares), None),
        }[LAST if place == LEAF else place]
        if found is None:
            raise StandError(f"there is no {place} now")
        return str(found)

    def _ranks(self) -> dict[int, str]:
        lines = self.stand.lines()
        newest = max((line.attempt for line in lines), default=None)
        return {line.rank: line.node for line in lines if line.attempt == newest}

    # -- the end

    def last(self) -> float:
        """Let all happen; return when the job had ended or was held, 0 where it has not in time."""
        deadline = time.time() + STARTS_S + ENDS_S
        # A controller that does not answer is waited for: the faults that are to come are not.
        with ThreadPoolExecutor(1) as asking:
            asked = asking.submit(self.stand.row)

            def done() -> bool:
                nonlocal asked, deadline
                wait(LOOK_S)
                self.tend()
                if self.open:
                    deadline = time.time() + ENDS_S
                if asked.done():
                    self.take(asked.result())
                    asked = asking.submit(self.stand.row)
                return self.ended or time.time() > deadline

            until(done, 10 * ENDS_S)
        return time.time() if self.ended else 0.0

    @property
    def ended(self) -> bool:
        """Whether the job has ended, or is held."""
        row = self.row
        return row is not None and (
            row.state.final or (row.state is JobState.PENDING and row.reason.startswith(HELD))
        )

    def facts(self, ended: float, expected: DeliveryDigest) -> CaseFacts:
        """Return what is left; the cluster is healed for it."""
        row = self.row
        self.give_up("the job had ended by then")
        self.stand.lab.heal()
        left = self._left() if ended else ()
        beside, jobs = self._beside(), self._jobs()
        watched = "watchdog" if self.case.job.watch != "none" else "launcher"
        gpus_s = self.stand.all_gpus()
        return CaseFacts(
            injected=tuple(sorted(self.over, key=lambda one: one.began_unix)),
            state=row.state.value if row else "",
            reason=row.reason if row else "",
            ended_unix=ended,
            restarts=row.restarts if row else 0,
            lines=self.stand.lines(),
            fed=tuple(fed_wrongly(self.stand.folder, expected)),
            late=tuple(self._late()),
            incidents=tuple(told for told in self.stand.incidents() if told.by == watched),
            allocated=self.allocated,
            jobs=jobs,
            beside=beside,
            left=left,
            gpus_s=gpus_s,
            escapes=tuple(
                who
                for who, text in (("the watchdog's log", self.stand.said()), ("the job's", self.stand.output()))
                if "\x1b" in text
            ),
        )

    def _late(self) -> Iterator[str]:
        for old, fence in fences(self.stand.lines()):
            yield from (f"{old} saved {name} after its fence" for name in late_saves(self.stand, old, fence))
            if count := late_output(self.stand.output(), old):
                yield f"{count} lines of {old} are in the output after a newer attempt's first"
            if count := self.stand.late_points(old, fence):
                yield f"{count} metrics of {old} are on record after its fence"

    def _left(self) -> tuple[str, ...]:
        """Return what lives on of the job for too long after its end."""
        found: list[str] = []

        def gone() -> bool:
            found[:] = self._processes()
            return not found

        until(gone, HELD_S)
        return tuple(found)

    def _processes(self) -> list[str]:
        job = str(self.stand.job)
        return [
            f"{' '.join(arguments(who.pid))[:120]} on {node}"
            for node in self.stand.cluster.nodes
            for who in processes_on(self.stand.cluster, node)
            if environment(who.pid).get("SLURM_JOB_ID") == job
        ]

    def _jobs(self) -> tuple[str, ...]:
        done = self.stand.cluster.run(CTL, ["squeue", "-h", "-t", "all", "-o", "%F"])
        before = set(map(str, range(1, self.stand.job)))  # the one that packed
        return tuple(sorted(set(done.stdout.split()) - before))

    def _beside(self) -> str:
        if not self.case.job.array:
            return ""
        address = JobAddress.of_label(f"{self.stand.job}_0")
        try:
            row = self.stand.slurm.job(address)
        except DeepLinkError as problem:
            return f"of {address} nothing is known: {problem}"
        with suppress(DeepLinkError):
            self.stand.slurm.cancel(address)
        if row.state is JobState.RUNNING and not row.restarts:
            return ""
        return f"{address} is {row.state.value} ({row.reason}), restarted {row.restarts} times"


def play(case: StormCase, say: Callable[[str], None], keep: Callable[[CaseRun], None]) -> CaseFacts:
    """Play a case on a cluster of its own, and return what it left; `keep` may look at it before all is gone.

    Raises:
        StandError: the cluster, the dataset or the watchdog does not come up.
    """
    shape = Shape.of(case.job.nodes + BESIDE)
    with Stand.up(shape, freezable=True, cred_expire_s=CRED_EXPIRE_S) as stand:
        expected = packed(stand)
        stand.watch(RIGHTS[case.job.watch], "--resume")
        if case.job.standing:
            stand.attend()
        run = CaseRun(case, stand.another("job"), say, list(case.injections))
        run.submit()
        try:
            facts = run.facts(run.last(), expected)
        finally:
            keep(run)
        return facts
