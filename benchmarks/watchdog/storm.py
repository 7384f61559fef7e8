"""An hour of random faults on a real Slurm with three jobs running, and what must hold at the end.

    python -m benchmarks.watchdog.storm [--minutes 60] [--seed 7] [--write-docs]

Twelve nodes, three jobs of an ordinary user that read a packed dataset in short epochs, save and resume. One has
two spares, one is a task of an array whose other task sleeps beside it, and all have names that no terminal should
see (`slots.py`). A job that ends is checked and followed by another. Faults come as the seed says (`strikes.py`),
and hiccups between them; a fault that takes something away that jobs need waits until all is well (`gate.py`):
never more at once than can be survived. At the end all is healed, and the jobs may finish. Then: every job
finished, or is held for the right reason; every epoch was fed each sample exactly once (the delivery digest); no
checkpoint of a fenced attempt appeared after the fence; no rank was put on a drained node while a spare was left;
the task beside was not touched; no log has a raw escape; every fault has exactly one incident, a hiccup at most
one, and every incident a fault. Exit code 1 when something of that does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.frame import TOP
from benchmarks.program import unwind_when_told
from benchmarks.rows import BENCH
from benchmarks.watchdog import gate
from benchmarks.watchdog.aftermath import Aftermath, page
from benchmarks.watchdog.aim import OF_ALL, aim
from benchmarks.watchdog.dataset import packed
from benchmarks.watchdog.scenarios import Rights
from benchmarks.watchdog.slots import SLOTS, Run, Slot
from benchmarks.watchdog.stand import Stand, sweep, until
from benchmarks.watchdog.strikes import KINDRED, Kindred, Strike, Struck, complaints, strikes
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import write_text
from deeplink.scheduler.recovery.records import IncidentKind
from deeplink.scheduler.slurm.states import HELD, JobState
from deeplink.scheduler.testbed.shape import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from benchmarks.watchdog.facts import Told
    from deeplink.data.digest import DeliveryDigest

PAGE, KEPT = TOP / "docs" / "storm.md", BENCH / "storm"
TWELVE = Shape(leaves=2, nodes_per_leaf=6)
WELL_S = 150.0
"""So long a strike waits until all is well; then it is left out, and that is told."""
FINISH_S = 600.0
SAVED_S = 10.0
"""So long every job has to run before slurmctld may be killed: it saves what it knows every 5 s."""


@dataclass(slots=True)
class Storm:
    """A storm under way.

    Attributes:
        ends: when no more faults are to come, monotonic.
        problems: what does not hold.
        remarks: what happened besides.
    """

    stand: Stand
    say: Callable[[str], None]
    expected: DeliveryDigest
    ends: float
    runs: list[Run] = field(default_factory=list)
    struck: list[Struck] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    _open: list[Struck] = field(default_factory=list)
    _tried: int = 0
    _unsaved_at: float = field(default_factory=time.monotonic)

    # -- jobs

    def running(self) -> list[Run]:
        """Return the jobs that have not ended."""
        return [run for run in self.runs if not run.ended]

    def follow(self, *, more: bool) -> None:
        """Check jobs that have ended, and start the next ones in their places."""
        for run in self.running():
            row = run.row()
            if row is None:
                continue
            if row.state.final:
                self._end(run, row.state.value)
            elif row.state is JobState.PENDING and row.reason.startswith(HELD):
                self._end(run, f"held ({row.reason})")
                with suppress(DeepLinkError):
                    run.stand.slurm.cancel(row.address)
        taken = {run.slot.name for run in self.running()}
        for slot in SLOTS if more else ():
            if slot.name not in taken and self._answers():
                self._submit(slot)

    def _answers(self) -> bool:
        frozen = {"controller-down", "controller-frozen", "storage-frozen"}
        return not any(one.strike.fault in frozen for one in self._open)

    def _submit(self, slot: Slot) -> None:
        self._tried += 1  # one that Slurm refused has its folder, too
        try:
            run = Run.started(slot, self.stand.another(f"job{self._tried}"))
        except DeepLinkError as problem:
            self.remarks.append(f"a job could not be submitted: {problem}")
            return
        self.runs.append(run)
        self.say(f"{run.told} submitted")

    def _end(self, run: Run, how: str) -> None:
        run.end(how, self.expected, (*self.struck, *self._open))
        self.problems += [f"{run.told}: {problem}" for problem in run.problems]
        attempts = len({line.attempt for line in run.stand.lines()})
        took = time.time() - run.began
        self.say(
            f"{run.told}: {run.ended} after {took:.0f} s, {attempts} attempts; {'; '.join(run.problems) or 'well'}"
        )

    # -- faults

    def strike(self, strike: Strike) -> None:
        """Let a fault come, when all is well if it is one that waits for that."""
        kindred = KINDRED[strike.fault]
        if not until(lambda: not self._obstacle(kindred), WELL_S):
            why = f"not within {WELL_S:.0f} s: {self._obstacle(kindred)}"
            self._miss(strike, why)
            self.problems.append(f"before {strike.fault} at {strike.at_s:.0f} s: {why}")
            self._mend()
            return
        self._unsaved_at = time.monotonic()
        if kindred.saved and not until(self._is_saved, WELL_S):
            self._miss(strike, f"not all jobs ran for {SAVED_S:.0f} s")
            return
        if time.monotonic() > self.ends:
            self._miss(strike, "the storm was over by then")
            return
        if any(one.strike.fault == strike.fault for one in self._open):
            self._miss(strike, "the same is in effect still")
            return
        chance = random.Random(strike.pick)  # noqa: S311 - no secret
        run, target, how = aim(strike, chance, self.running(), (*self.struck, *self._open))
        began = time.time()
        try:
            target = self.stand.lab.inject(strike.fault, target, how).target
        except DeepLinkError as problem:
            self._miss(strike, str(problem))
            return
        hit, over = time.time(), began + strike.hold_s
        job = run.stand.job if run and target and kindred.taking else 0
        one = Struck(strike=strike, target=target, job=job, began_unix=began, hit_unix=hit, over_unix=over)
        self._open.append(one)
        self.say(
            f"{strike.fault} {target.rpartition('/')[2]} for {strike.hold_s:g} s"
            + (f" (job {job})" if job else "")
        )

    def _miss(self, strike: Strike, why: str) -> None:
        now = time.time()
        self.struck.append(
            Struck(strike=strike, target="", job=0, began_unix=now, hit_unix=now, over_unix=now, missed=why)
        )
        self.say(f"{strike.fault} left out: {why}")

    def tend(self, *, now: bool = False) -> None:
        """Undo the faults whose time is over, or all of them."""
        for one in list(self._open):
            if not now and time.time() < one.over_unix:
                continue
            target = "" if one.strike.fault in OF_ALL else one.target
            try:
                self.stand.lab.undo(one.strike.fault, target)
            except DeepLinkError as problem:
                self.problems.append(f"{one.strike.fault} {one.target} could not be undone: {problem}")
            self._open.remove(one)
            self.struck.append(dataclasses.replace(one, over_unix=time.time()))

    def _obstacle(self, kindred: Kindred) -> str:
        """Look after what is under way; return why a fault of this kind is not to come yet, empty when it may."""
        self.tend()
        self.follow(more=True)
        early = gate.too_early(kindred, self.struck, self._open, self.running())
        return early or (self._ill() if kindred.taking else "")

    def _is_saved(self) -> bool:
        """Whether every job runs, and has for so long that Slurm has saved it."""
        self.tend()
        self.follow(more=True)
        rows = [run.stand.row() for run in self.running()]
        runs = bool(rows) and all(row is not None and row.state is JobState.RUNNING for row in rows)
        if not runs:
            self._unsaved_at = time.monotonic()
        return runs and time.monotonic() - self._unsaved_at >= SAVED_S

    def _ill(self) -> str:
        out = gate.out_of_service(self.stand.nodes(), self._open)
        why = gate.ill(self.struck, self._open, self.running(), out)
        sick = [str(node.name) for node in out if f"-{IncidentKind.NODE_SICK}-" in node.reason]
        if sick and not any(KINDRED[one.strike.fault].brief for one in self._open):
            self._resume(sick)  # without a standing agent nobody else says that they are well
        return why

    def _mend(self) -> None:
        """Do what an administrator would when the watchdog did not."""
        self.tend(now=True)
        self.stand.lab.heal()
        out = [str(node.name) for node in self.stand.nodes() if node.drained or node.down]
        if out:
            self._resume(out)

    def _resume(self, nodes: Sequence[str]) -> None:
        self.remarks.append(f"resumed by hand: {', '.join(sorted(nodes))}")
        self.stand.resume(nodes)

    # -- the end

    def finish(self) -> None:
        """Let the faults have their time, heal all, and let the jobs come to their ends."""

        def over() -> bool:
            self.tend()
            self.follow(more=False)
            return not self._open

        until(over, max(kindred.hold_s[1] for kindred in KINDRED.values()))
        self.tend(now=True)
        self.stand.lab.heal()

        def done() -> bool:
            self.follow(more=False)
            return not self.running()

        until(done, FINISH_S / 2)
        if self.running():
            self.remarks.append(f"not finished {FINISH_S / 2:.0f} s after the end: {self._ill()}")
            self._mend()
            until(done, FINISH_S / 2)
        for run in self.running():
            row = run.stand.row()
            said = f"{row.state.value} ({row.reason})" if row else "gone"
            self.problems.append(f"job {run.stand.job} has not finished: {said}")
        if "\x1b" in self.stand.said():
            self.problems.append("the watchdog's log has an escape of a job's name")
        self.struck.sort(key=lambda one: one.began_unix)
        last_unix = {
            run.stand.job: max((line.unix for line in run.stand.lines()), default=run.began)
            for run in self.runs
            if run.ended == "COMPLETED"
        }
        self.problems += complaints(self.struck, self.stand.incidents(), last_unix)

    def aftermath(self) -> Aftermath:
        """Return what came of it."""
        ended = [run.ended or "not finished" for run in self.runs]
        return Aftermath(struck=self.struck, ended=ended, problems=self.problems, remarks=self.remarks)


def weather(
    minutes: float, seed: int, say: Callable[[str], None], only: Collection[str] = KINDRED
) -> tuple[Storm, tuple[Told, ...]]:
    """Let a storm pass, and return it with the incidents that are on record.

    Where something does not hold, what watchdog and jobs said is kept in `KEPT`: the cluster is gone by then.
    """
    with Stand.up(TWELVE, freezable=True) as stand:
        expected = packed(stand, say)
        stand.watch(Rights.OPERATOR, "--resume")
        began = time.monotonic()
        storm = Storm(stand, say, expected, ends=began + minutes * 60)
        coming = list(strikes(minutes * 60, seed, only=only))
        while (now := time.monotonic()) < storm.ends:
            storm.follow(more=True)
            storm.tend()
            if coming and coming[0].at_s <= now - began:
                storm.strike(coming.pop(0))
            time.sleep(0.3)
        storm.remarks += [f"no time was left for {len(coming)} faults"] if coming else []
        storm.finish()
        if storm.problems:
            keep(storm, KEPT)
        return storm, stand.incidents()


def keep(storm: Storm, folder: Path) -> None:
    """Leave in `folder`, made again, what the watchdog, the jobs and Slurm's daemons said, and every incident."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "watchdog").write_text(storm.stand.said(), encoding="utf-8")
    for run in storm.runs:
        (folder / f"job{run.stand.job}").write_text(run.stand.output(), encoding="utf-8")
    told = [f"{one.detected_unix:.1f} {one}\n" for one in storm.stand.incidents()]
    (folder / "incidents").write_text("".join(told), encoding="utf-8")
    struck = [f"{one.began_unix:.1f} {one}\n" for one in storm.struck]
    (folder / "faults").write_text("".join(struck), encoding="utf-8")
    shutil.copytree(storm.stand.cluster.layout.log, folder / "slurm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; 1 when something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", metavar="FAULT,...", default=",".join(sorted(KINDRED)), help="(%(default)s)")
    parser.add_argument("--write-docs", action="store_true", help="write docs/storm.md besides")
    asked = parser.parse_args(arguments)
    only = frozenset(asked.only.split(","))
    if unknown := sorted(only - set(KINDRED)):
        parser.error(f"--only: no such fault: {', '.join(unknown)}; there are {', '.join(sorted(KINDRED))}")
    if asked.write_docs and only != set(KINDRED):
        parser.error("--write-docs: the page is of all faults, without --only")
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {line}", flush=True)

    sweep()
    storm, incidents = weather(asked.minutes, asked.seed, say, only)
    text = page(asked.minutes, asked.seed, storm.aftermath(), incidents)
    BENCH.mkdir(parents=True, exist_ok=True)
    write_text(BENCH / "storm.md", text)
    print(text)
    if asked.write_docs:
        write_text(PAGE, text)
    return 1 if storm.problems else 0


if __name__ == "__main__":
    unwind_when_told()
    sys.exit(main())
