"""Telling the story: pack, train, lose a node, recover, and prove that no sample was lost or counted twice."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deeplink.core.publish import write_text
from deeplink.data import DeliveryDigest
from deeplink.demo.lesson import ExpectedDelivery, Lesson, has_torch, lesson, write_digits
from deeplink.demo.stage import PACK_NODES, LocalStage, SandboxStage, Stage, demo_failed
from deeplink.scheduler.journal.journal import Journal, JournalError
from deeplink.scheduler.testbed.errors import SlurmMissingError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import Console

    from deeplink.core.clock import Clock
    from deeplink.scheduler.recovery.records import ProgressPoint

Event = dict[str, Any]

POLL_S = 0.2
JOB_BOUND_S = 900.0
KILL_AFTER = 0.4  # of the steps
RUNGS = {
    "relaunch": "first step: ranks relaunched inside the allocation, on the spare",
    "requeue": "third step: the node was taken from Slurm, which started the job again",
    "": "none",
}


@dataclass(slots=True)
class JobFolderReader:
    """Reads what a job's state folder says, as it grows."""

    folder: Path
    events: list[Event] = field(default_factory=list)
    _offset: int = 0

    def poll(self) -> list[Event]:
        """Return the events that were written since the last call; also kept in `events`."""
        try:
            with (self.folder / "events.jsonl").open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]  # the last line may still be being written
        self._offset += len(whole)
        fresh = [json.loads(line) for line in whole.splitlines()]
        self.events += fresh
        return fresh

    def newest_point(self) -> ProgressPoint | None:
        """Return the newest report of the training loop; None before the first."""
        try:
            with Journal(self.folder / "journal.sqlite", read_only=True) as journal:
                points = journal.points(int(self.folder.name))
        except JournalError:
            return None
        return max(points, key=lambda point: (point.attempt, point.step), default=None)

    def named(self, name: str) -> list[Event]:
        """Return the events of one name, oldest first."""
        return [event for event in self.events if event["event"] == name]


def share_of(placed: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Return how many shards each node holds, by node name.

    >>> share_of({"a": ("n0", "n1"), "b": ("n1",)})
    {'n0': 1, 'n1': 2}
    """
    return dict(sorted(Counter(node for nodes in placed.values() for node in nodes).items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFigures:
    """The figures of one demonstration, as `build/demo.json` holds them."""

    files: int  # files packed
    files_per_s: float  # packed per second, agents' start not counted
    ring_crossings: int  # leaf-to-leaf hops of the first attempt's rank ring
    ring_crossings_stock: int  # the same in Slurm's own order
    detect_s: float | None  # from the node's death to the verdict; None where none died
    resume_s: float | None  # from the node's death to the first training step of the next attempt
    attempts: int  # incarnations of the ranks
    steps_repeated: int  # steps done again because they came after the last checkpoint
    accuracy: float  # share of the test images the trained network gets right
    digest_equal: bool  # every sample of every epoch was counted exactly once
    wall_s: float  # the whole demonstration, without its set-up by make
    backend: str  # slurm, slurm-loopback or local

    def as_dict(self) -> dict[str, int | float | bool | str | None]:
        """Return the facts for JSON, times to the millisecond."""
        return {
            name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()
        }


@dataclass(frozen=True, slots=True)
class RecoveryFigures:
    """A node's death: seconds from it to the verdict and to the next attempt's first step; and what was done."""

    detect_s: float | None
    resume_s: float | None
    rung: str


def recovery(events: Sequence[Event], died_unix: float, node: str) -> RecoveryFigures:
    """Return what the launcher's events say about the death of `node` at `died_unix`."""
    after = [event for event in events if event["unix"] >= died_unix]
    detected = next((e["unix"] for e in after if e["event"] == "node-silent" and node in e["nodes"]), None)
    resumed = next(
        (e["unix"] for e in after if e["event"] == "first-step" and detected is not None and e["unix"] > detected),
        None,
    )
    climbed = next((e["event"] for e in after if e["event"] in {"relaunch", "requeue"}), "")
    detect_s, resume_s = (None if moment is None else moment - died_unix for moment in (detected, resumed))
    return RecoveryFigures(detect_s, resume_s, RUNGS[climbed])


@dataclass(slots=True)
class Story:
    """One telling of it."""

    clock: Clock
    console: Console
    data: Path | None
    keep: bool
    facts_file: Path
    name: str = "demo"
    backend: str = "auto"
    _died_unix: float = 0.0
    _victim: str = ""
    _began: float = field(default=0.0)

    def say(self, text: str) -> None:
        """Tell one thing, with the seconds that have passed."""
        self.console.print(f"[dim]{self.clock.monotonic() - self._began:6.1f} s[/]  {text}", soft_wrap=True)

    def chapter(self, title: str) -> None:
        """Begin the next part."""
        self.console.print(f"\n[bold cyan]{title}[/]")

    def tell(self, ranks: int) -> DemoFigures:
        """Run the story and return the figures; the sandbox is taken down unless it is to be kept."""
        self._began = self.clock.monotonic()
        self.chapter("1. Small files")
        plan = lesson(self._files(), ranks)
        self.chapter("2. A cluster")
        stage = self._stage(plan.source)
        try:
            packed = self._pack(stage, plan)
            events, ended = self._train(stage, plan)
            return self._conclude(stage, plan, packed, events, ended)
        finally:
            if self.keep:
                self._leave(stage)
            else:
                stage.close()
                self.say("everything is taken down")

    def _files(self) -> Path:
        if self.data is not None:
            return self.data.resolve()
        folder = Path("build/demo-data/digits").resolve()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _bar(self.console) as progress:
            count = write_digits(folder, progress)
        self.say(f"{count:,} small image files (scikit-learn's digits) in {os.path.relpath(folder)}")
        return folder

    def _stage(self, source: Path) -> Stage:
        stage: Stage
        if self.backend == "local":
            stage = LocalStage("asked for")
        else:
            try:
                stage = SandboxStage(self.name, source, loopback=self.backend == "loopback")
            except SlurmMissingError as missing:
                stage = LocalStage(str(missing))
        self.say(stage.says)
        return stage

    def _pack(self, stage: Stage, plan: Lesson) -> dict[str, Any]:
        self.chapter(f"3. Pack the files onto the SSDs of {PACK_NODES} nodes")
        packed = stage.pack(plan.source, plan.name, "--shard-size", str(max(16 << 10, plan.bytes // 12)))
        packed["files_per_s"] = packed["files"] / packed["seconds"]
        self.say(
            f"{packed['files']:,} files ({packed['bytes'] / 1e6:.1f} MB) in {packed['seconds']:.2f} s: "
            f"[bold]{packed['files_per_s']:,.0f} files/s[/], {packed['shards']} shards, two copies each"
        )
        for node, shards in share_of(packed["placed"]).items():
            self.say(f"  {node}: {shards} shards on its own SSD")
        return packed

    def _train(self, stage: Stage, plan: Lesson) -> tuple[list[Event], float]:
        self.chapter("4. Train, and lose a node")
        called = stage.submit(plan.command())
        if not has_torch():
            self.say("there is no torch here: a small network in numpy is trained")
        self.say(f"{called}: {plan.epochs} epochs, about {plan.steps} steps, on 4 nodes with 1 to spare")
        follower = JobFolderReader(stage.job_folder)
        deadline = self.clock.monotonic() + JOB_BOUND_S
        with _bar(self.console) as progress:
            task = progress.add_task("starting", total=plan.steps)
            while not stage.ended():
                if self.clock.monotonic() > deadline:
                    raise demo_failed(f"the job did not end within {JOB_BOUND_S:.0f} s", stage.output())
                follower.folder = stage.job_folder
                for event in follower.poll():
                    self._comment(event, stage)
                self._advance(progress, task, follower, stage, plan)
                self.clock.sleep(POLL_S)
        for event in follower.poll():
            self._comment(event, stage)
        if not any(event["event"] == "ended" and event["code"] == 0 for event in follower.events):
            raise demo_failed("the job failed", stage.output())
        if len(follower.named("attempt-started")) == 1:
            raise demo_failed("the training was over before a node could be lost", stage.output())
        return follower.events, self.clock.monotonic()

    def _advance(
        self, progress: Progress, task: Any, follower: JobFolderReader, stage: Stage, plan: Lesson
    ) -> None:
        point = follower.newest_point()
        if point is None:
            return
        loss = point.metrics.get("loss", float("nan"))
        progress.update(task, completed=point.step, description=f"training, loss {loss:.3f}")
        if not self._victim and point.step >= KILL_AFTER * plan.steps:
            # Not the first rank's node and not the batch host: the hardest cases are in tests/cluster.
            started = follower.named("attempt-started")[-1]
            self._victim = [node for node in started["nodes"] if node != min(started["nodes"])][-1]
            self._died_unix = self.clock.unix()
            how = stage.kill(self._victim)
            self.say(f"[bold red]{self._victim} is dead[/] at step {point.step}: {how}")

    def _comment(self, event: Event, stage: Stage) -> None:
        tell: dict[str, Callable[[], None]] = {
            "attempt-started": lambda: self._order(event, stage),
            "node-silent": lambda: self.say(
                f"[yellow]{', '.join(event['nodes'])} is silent[/] "
                f"(noticed {event['unix'] - self._died_unix:.1f} s after its death)"
            ),
            "relaunch": lambda: self.say("the launcher starts the ranks again without it"),
            "first-step": lambda: self.say(
                f"attempt {event['attempt']} trains: step {event['step']}"
                + (f", {event['steps_repeated']} steps are done again" if event["steps_repeated"] else "")
            ),
        }
        tell.get(event["event"], lambda: None)()

    def _order(self, event: Event, stage: Stage) -> None:
        resting = f"; {' '.join(event['spares'])} rests" if event["spares"] else ""
        self.say(f"attempt {event['attempt']}: ranks 0 to {event['world_size'] - 1} in this order{resting}")
        switches = groupby(event["nodes"], key=stage.leaf)
        line = "  |  ".join(f"{leaf or 'this machine'}: {' '.join(nodes)}" for leaf, nodes in switches)
        self.say(f"  {line}")
        if event["ring_crossings_stock"]:
            self.say(
                f"  their ring crosses between leaf switches [bold]{event['ring_crossings']}[/] times; "
                f"in Slurm's own order it would {event['ring_crossings_stock']} times"
            )

    def _conclude(
        self, stage: Stage, plan: Lesson, packed: dict[str, Any], events: list[Event], ended: float
    ) -> DemoFigures:
        self.chapter("5. What came out")
        result = json.loads((stage.home / "result.json").read_text())
        equal = self._audit(stage, plan, result)
        first = next(event for event in events if event["event"] == "attempt-started")
        healed = recovery(events, self._died_unix, self._victim)
        facts = DemoFigures(
            files=packed["files"],
            files_per_s=packed["files_per_s"],
            ring_crossings=first["ring_crossings"],
            ring_crossings_stock=first["ring_crossings_stock"],
            detect_s=healed.detect_s,
            resume_s=healed.resume_s,
            attempts=sum(event["event"] == "attempt-started" for event in events),
            steps_repeated=sum(e["steps_repeated"] for e in events if e["event"] == "first-step"),
            accuracy=result["accuracy"],
            digest_equal=equal,
            wall_s=ended - self._began,
            backend=stage.backend,
        )
        self.facts_file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.facts_file, json.dumps(facts.as_dict(), indent=2) + "\n")
        if healed.detect_s is not None and healed.resume_s is not None:
            self.say(
                f"{healed.rung}: noticed after {healed.detect_s:.1f} s, training after {healed.resume_s:.1f} s"
            )
        self.say(f"{facts.steps_repeated} steps were done again, those after the last checkpoint")
        tested = (
            "test images" if plan.test_root != plan.train_root else "training images (there is no test folder)"
        )
        self.say(f"accuracy on the {tested}: [bold]{facts.accuracy:.2%}[/]")
        self.say(f"figures in {os.path.relpath(self.facts_file)}")
        return facts

    def _audit(self, stage: Stage, plan: Lesson, result: dict[str, Any]) -> bool:
        delivered = DeliveryDigest()
        delivered.load_state_dict(result["digest"])
        expected = DeliveryDigest.expected(ExpectedDelivery.of(stage.catalog, plan), plan.epochs)
        equal = delivered.equal(expected)
        verdict = "[bold green]exactly once[/]" if equal else "[bold red]NOT exactly once[/]"
        self.say(
            f"every sample of all {plan.epochs} epochs counted {verdict} "
            "(digest of the bytes handed to finished steps, against the index)"
        )
        return equal

    def _leave(self, stage: Stage) -> None:
        self.chapter("Left standing")
        if stage.backend == "local":
            self.console.print(f"Files of the job: {stage.home}")
            return
        deeplink = os.path.relpath(Path(sys.executable).with_name("deeplink"))
        for line in (
            f"{deeplink} sandbox exec --name {self.name} ctl bash        # the login node",
            f"{deeplink} sandbox exec --name {self.name} ctl deeplink incidents",
            f"{deeplink} sandbox status --name {self.name}",
            f"{deeplink} sandbox down --name {self.name}                 # take it all down",
        ):
            self.console.print(f"  {line}", highlight=False)


def _bar(console: Console) -> Progress:
    columns = (TextColumn("          {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)
