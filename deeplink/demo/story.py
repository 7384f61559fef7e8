"""Telling the story: pack, train, lose a node, recover, and prove that no sample was lost or counted twice."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deeplink.cache.catalog import Catalog
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import published_folder, write_text
from deeplink.data import DeliveryDigest
from deeplink.demo.stage import PACK_NODES, LocalStage, SandboxStage, Stage, demo_failed
from deeplink.scheduler.jobs.job_folder import EVENTS, Tail, in_order
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
    _tail: Tail = field(default_factory=lambda: Tail(Path(), keep=bool))

    def poll(self) -> list[Event]:
        """Return the events that were written since the last call; also kept in `events`."""
        self._tail.path = self.folder / EVENTS
        fresh = in_order(self._tail.more())
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


BIG = 20_000  # images; beyond it two epochs teach enough
LIGHT_EPOCHS = 4  # for one with torch: its steps take so little that a node would die after the last of them
TEST_EVERY = 5  # each fifth of scikit-learn's digits is for testing: 1,437 to train on, 360 to test with


def _unfit(folder: Path, problem: str) -> DeepLinkError:
    remedy = "Give a folder of image files as {train,test}/<class>/<file>, or <class>/<file>."
    return DeepLinkError(f"{folder}: {problem}", remedy=remedy, exit_code=2)


def has_torch() -> bool:
    """Whether torch is installed."""
    return find_spec("torch") is not None


@dataclass(frozen=True, slots=True)
class Lesson:
    """Training data, and for how long to train on it."""

    source: Path
    name: str
    train_root: str
    test_root: str
    size: int
    epochs: int
    batch_size: int
    steps: int
    bytes: int

    def command(self) -> list[str]:
        """Return the training command, to be run in the user's home."""
        script = "deeplink.demo.train" if has_torch() else "deeplink.demo.train_light"
        argv = ["python", "-m", script, self.name, "--train-root", self.train_root]
        argv += ["--test-root", self.test_root, "--epochs", str(self.epochs), "--size", str(self.size)]
        argv += ["--batch-size", str(self.batch_size), "--checkpoint-every", str(max(10, self.steps // 30))]
        return [*argv, "--checkpoints", "checkpoints", "--result", "result.json"]


def lesson(source: Path, ranks: int) -> Lesson:
    """Return how to train on a folder of images."""
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - only the demo needs it

    if not source.is_dir():
        raise _unfit(source, "is no folder")
    split = (source / "train").is_dir()
    test_root = next((name for name in ("test", "val") if (source / name).is_dir()), "train") if split else ""
    root = source / "train" if split else source
    images = [path for path in root.rglob("*") if path.is_file() and path.parent != root]
    if not images:
        raise _unfit(source, "holds no <class>/<file>")
    known = Image.registered_extensions()
    for path in images:
        if path.suffix.lower() not in known:
            raise _unfit(source, f"{path.relative_to(source)} is no image")
    try:
        with Image.open(images[0]) as image:
            size = min(28, *image.size)
    except UnidentifiedImageError as problem:
        raise _unfit(source, f"{images[0].name} is no image") from problem
    epochs = 2 if len(images) > BIG else max(2, min(40, 24_000 // len(images)))
    epochs *= 1 if has_torch() else LIGHT_EPOCHS
    batch_size = 32 if len(images) > BIG else 16
    steps = epochs * -(-len(images) // (batch_size * ranks))
    total = sum(path.stat().st_size for path in images)
    train_root = "train" if split else ""
    name = re.sub(r"[^a-z0-9]+", "-", source.name.lower()).strip("-") or "images"
    return Lesson(source, name, train_root, test_root, size, epochs, batch_size, steps, total)


@dataclass(frozen=True, slots=True)
class ExpectedDelivery:
    """The delivery that the index promises: row numbers (int64) and checksums (uint64), one per sample."""

    rows: np.ndarray
    checksums: np.ndarray

    @classmethod
    def of(cls, catalog: Path, plan: Lesson) -> ExpectedDelivery:
        """Return it for the part of the dataset that was trained on, from the index alone."""
        index = Catalog(catalog).open(plan.name)
        rows = index.rows_below(plan.train_root)
        return cls(np.arange(rows.start, rows.stop), np.asarray(index.checksums[rows.start : rows.stop]))


def write_digits(folder: Path, progress: Progress | None = None) -> int:
    """Write scikit-learn's digits, 1,797 PNG files of 8 x 8 pixels, to `folder/{train,test}/<digit>/<number>.png`.

    Returns how many. The folder appears whole or not at all; one that is there already is taken as it is.
    """
    if folder.exists():
        return sum(1 for _ in folder.rglob("*.png"))
    from PIL import Image  # noqa: PLC0415 - only the demo needs the imaging library and scikit-learn
    from sklearn.datasets import load_digits  # noqa: PLC0415

    digits = load_digits()
    # The data set stores 17 grey levels, 0 to 16; a PNG has 256.
    pixels = (digits.images * (255 / 16)).round().astype("uint8")
    task = progress.add_task("writing image files", total=len(pixels)) if progress else None
    with published_folder(folder) as draft:
        for number, (image, digit) in enumerate(zip(pixels, digits.target, strict=True)):
            split = "test" if number % TEST_EVERY == 0 else "train"
            home = draft / split / str(digit)
            home.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(home / f"{number:04d}.png")
            if progress and task is not None:
                progress.advance(task)
    return len(pixels)
