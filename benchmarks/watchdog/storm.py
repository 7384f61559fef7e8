"""An hour of random faults on a real Slurm with three jobs running, and what must hold at the end.

    python -m benchmarks.watchdog.storm [--minutes 60] [--seed 7] [--write-docs]

Eight nodes, three jobs of an ordinary user that read a packed dataset in short epochs, save and resume; one has a
spare. A job that ends is checked and followed by another. Faults come as the seed says (`strikes.py`), and hiccups
between them; a fault that takes something away that jobs need waits until all is well again: never more at once
than can be survived. At the end all is healed, and the jobs may finish. Then: every job finished, or is held for
the right reason; every epoch was fed each sample exactly once (the delivery digest); no checkpoint of a fenced
attempt appeared after the fence; every fault has exactly one incident, a hiccup at most one, and every incident a
fault. Exit code 1 when something of that does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
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
from benchmarks.watchdog.aftermath import Aftermath, fed_wrongly, fenced_saves, page
from benchmarks.watchdog.facts import newest_step
from benchmarks.watchdog.scenarios import EIGHT, Rights
from benchmarks.watchdog.stand import Stand, StandError, sweep, until
from benchmarks.watchdog.strikes import KINDRED, Kindred, Strike, Struck, complaints, strikes
from deeplink.data.digest import DeliveryDigest
from deeplink.errors import DeepLinkError
from deeplink.publish import write_text
from deeplink.scheduler.sandbox.lab.laboratory import How
from deeplink.scheduler.sandbox.shape import CTL
from deeplink.scheduler.slurm.states import HELD, JobState
from deeplink.scheduler.watch.records import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from benchmarks.watchdog.facts import Told

PAGE, KEPT = TOP / "docs" / "storm.md", BENCH / "storm"
DATASET, FILES, FILE_BYTES = "storm", 600, 700
EPOCHS = 24
WARM = 40
"""Steps a job has made before a fault hits it: a launcher knows by then how long its steps take."""
EARLY = 400
"""Steps of a job, of some 900, before which it has surely half a minute left."""
REST_S = 60.0
"""So long a node is left alone after it was lost: lost again in the same minute it may be the same incident."""
LONE_APART_S = 12.0
"""From the end of a fault that the watchdog alone tells of to the next such: it looks again by then."""
APART_S = 15.0
"""From one fault that takes something away to the next: so long it may take until anybody sees it."""
AFTER_S = 8.0
"""From its end to the next: an agent that was silent is heard by then."""
WELL_S = 150.0
"""So long a strike waits until all is well; then it is left out, and that is told."""
FINISH_S = 600.0
SAVED_S = 10.0
"""So long every job has to run before slurmctld may be killed: it saves what it knows every 5 s."""
PACK_S = 120.0


@dataclass(frozen=True, slots=True)
class Slot:
    """What runs, one job after another."""

    name: str
    nodes: int
    spares: int


SLOTS = (Slot("a", 3, 1), Slot("b", 2, 0), Slot("c", 2, 0))


@dataclass(slots=True)
class Run:
    """One job of a slot, and how it ended."""

    slot: Slot
    stand: Stand
    began: float
    ended: str = ""
    problems: list[str] = field(default_factory=list)


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
            row = run.stand.row()
            if row is None:
                continue
            if row.state.final:
                run.ended = row.state.value
                self._check(run)
            elif row.state is JobState.PENDING and row.reason.startswith(HELD):
                run.ended = f"held ({row.reason})"
                self._check(run)
                with suppress(DeepLinkError):
                    run.stand.slurm.cancel(run.stand.job)
        taken = {run.slot.name for run in self.running()}
        for slot in SLOTS if more else ():
            if slot.name not in taken and self._answers():
                self._submit(slot)

    def _answers(self) -> bool:
        frozen = {"controller-down", "controller-frozen", "storage-frozen"}
        return not any(one.strike.fault in frozen for one in self._open)

    def _submit(self, slot: Slot) -> None:
        self._tried += 1  # one that Slurm refused has its folder, too
        stand = self.stand.another(f"job{self._tried}")
        options = f"-N{slot.nodes} --exclusive --no-kill --requeue --job-name=storm-{slot.name}"
        train = stand.train("--dataset", DATASET, "--epochs", str(EPOCHS), "--batch", "8")
        command = f"exec deeplink run --nproc-per-node 1 --spares {slot.spares} -- {train}"
        try:
            stand.submit(options, command, watched=True)
        except DeepLinkError as problem:
            self.remarks.append(f"a job could not be submitted: {problem}")
            return
        self.runs.append(Run(slot, stand, time.time()))
        self.say(f"job {stand.job} of slot {slot.name} submitted")

    def _check(self, run: Run) -> None:
        job = f"job {run.stand.job} (slot {run.slot.name})"
        hit = (*self.struck, *self._open)
        told_to = any(one.strike.fault == "rank-exit" and one.job == run.stand.job for one in hit)
        if run.ended == "COMPLETED":
            run.problems += [f"{job}: {what}" for what in fed_wrongly(run.stand.folder, self.expected)]
        elif not (told_to and "held" in run.ended):
            run.problems.append(f"{job} ended as {run.ended}, neither finished nor held for a reason of its own")
        run.problems += [f"{job}: a fenced attempt saved {name}" for name in fenced_saves(run.stand)]
        self.problems += run.problems
        attempts = len({line.attempt for line in run.stand.lines()})
        took = time.time() - run.began
        self.say(
            f"{job}: {run.ended} after {took:.0f} s, {attempts} attempts; {'; '.join(run.problems) or 'well'}"
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
        run, target, how = self._aim(strike, chance)
        began = time.time()
        try:
            self.stand.lab.inject(strike.fault, target, how)
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

    def _aim(self, strike: Strike, chance: random.Random) -> tuple[Run | None, str, How]:
        """Return whom it hits, where, and how."""
        running = [run for run in self.running() if newest_step(run.stand.lines()) >= WARM]
        run = chance.choice(running) if running else None
        if run and strike.fault == "slurmd-killed":  # seen by the job's own agents, which are to be there still
            run = min(running, key=lambda one: newest_step(one.stand.lines()))
        if strike.fault in {"controller-down", "controller-frozen", "watchdog-killed"}:
            return run, CTL, How()
        if strike.fault in {"storage-frozen", "agents-silent"} or run is None:
            return run, "", How()
        lines = run.stand.lines()
        newest = max(line.attempt for line in lines)
        nodes = {line.rank: line.node for line in lines if line.attempt == newest}
        rested = {
            one.target
            for one in (*self.struck, *self._open)
            if time.time() < max(one.over_unix, one.hit_unix) + REST_S
        }
        rank = chance.choice(sorted(rank for rank, node in nodes.items() if node not in rested) or sorted(nodes))
        if strike.fault == "rank-exit":
            return run, str(run.stand.folder), How(rank=rank)
        return run, nodes[rank], How(rank=rank if "rank" in strike.fault else None, share=0.6)

    def tend(self, *, now: bool = False) -> None:
        """Undo the faults whose time is over, or all of them."""
        for one in list(self._open):
            if not now and time.time() < one.over_unix:
                continue
            target = "" if one.strike.fault in {"storage-frozen", "agents-silent"} else one.target
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
        if kindred.lone and any(
            KINDRED[one.strike.fault].lone and not one.missed and time.time() < one.over_unix + LONE_APART_S
            for one in (*self.struck, *self._open)
        ):
            return "another that the watchdog alone tells of is in effect, or was just now"
        told = [run for run in self.running() if run.slot.nodes > 2]  # noqa: PLR2004 - the others miss one agent at most
        if kindred.early and not any(newest_step(run.stand.lines()) < EARLY for run in told):
            return "the job that is to tell of it may end soon"
        return self._ill() if kindred.taking else ""

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
        taken = [one for one in (*self.struck, *self._open) if KINDRED[one.strike.fault].taking and not one.missed]
        lasting = [one.strike.fault for one in taken if one in self._open]
        if lasting:
            return f"{', '.join(lasting)} in effect"
        if taken and time.time() < max(max(one.began_unix + APART_S, one.over_unix + AFTER_S) for one in taken):
            return f"{taken[-1].strike.fault} came just now"
        out = [node for node in self.stand.nodes() if node.drained or node.down or not node.responding]
        sick = [str(node.name) for node in out if f"-{Kind.NODE_SICK}-" in node.reason]
        if sick and not any(KINDRED[one.strike.fault].brief for one in self._open):
            self._resume(sick)  # without a standing agent nobody else says that they are well
        if out:
            return f"nodes out of service: {', '.join(f'{node.name} ({node.reason})' for node in out)}"
        now = time.time()
        still = [
            run.stand.job
            for run in self.running()
            if not any(line.what == "step" and line.unix > now - 5.0 for line in run.stand.lines()[-40:])
        ]
        if still:
            return f"jobs without a step for 5 s: {', '.join(map(str, still))}"
        cold = [run.stand.job for run in self.running() if newest_step(run.stand.lines()) < WARM]
        if cold:
            return f"jobs that have only begun: {', '.join(map(str, cold))}"
        return "" if len(self.running()) == len(SLOTS) else "a job is missing"

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


def prepare(stand: Stand, say: Callable[[str], None]) -> DeliveryDigest:
    """Pack the dataset onto the nodes' disks, and return what each job is to be fed.

    Raises:
        StandError: it cannot be packed.
    """
    cluster = stand.cluster
    store = f'store = "{cluster.ssd_in_jobs}/deeplink"\n'
    make = f"""
mkdir -p .config/deeplink source && cat > .config/deeplink/config.toml
for i in $(seq {FILES}); do head -c {FILE_BYTES} /dev/urandom > source/$i.bin; done
"""
    cluster.run(CTL, ["bash", "-c", make], stdin=store, timeout_s=60)
    argv = ["salloc", "--quiet", "-N8", "--exclusive", "deeplink", "pack", str(cluster.home / "source"), DATASET]
    done = cluster.run(CTL, [*argv, "--shard-size", "65536"], timeout_s=PACK_S)
    if done.code:
        raise StandError(f"packing: {done.stderr[-2000:]}")
    tell = f"""
import json, numpy, deeplink.data.digest as d
from deeplink.cache.reader import Reader
index = Reader.open({DATASET!r}).index
class All: rows = numpy.arange(len(index), dtype=numpy.int64); checksums = index.checksums
print(json.dumps(d.DeliveryDigest.expected(All, {EPOCHS}).state_dict()))
"""
    told = cluster.run(CTL, [sys.executable, "-c", tell], timeout_s=60)
    if told.code:
        raise StandError(f"the digest to expect: {told.stderr[-2000:]}")
    expected = DeliveryDigest()
    expected.load_state_dict(json.loads(told.stdout))
    say(f"{FILES} samples packed onto 8 nodes")
    return expected


def weather(
    minutes: float, seed: int, say: Callable[[str], None], only: Collection[str] = KINDRED
) -> tuple[Storm, tuple[Told, ...]]:
    """Let a storm pass, and return it with the incidents that are on record.

    Where something does not hold, what watchdog and jobs said is kept in `KEPT`: the cluster is gone by then.
    """
    with Stand.up(EIGHT, freezable=True) as stand:
        expected = prepare(stand, say)
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
    """Leave in `folder`, made anew, what the watchdog, the jobs and Slurm's daemons said, and every incident."""
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
