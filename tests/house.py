"""Prints how large the product is, and how many of its modules four tasks pass through: `make house`.

python -m tests.house [--json] [--modules]

Counts lines of every module but the generated ones. A task passes through a module when one of its functions is
called, in any thread of this process; readers and the members they read from run in one process here.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.cache.packer import pack
from deeplink.data.dataset import Dataset
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.recovery.records import Phase
from tests.cache.agents import Agents, config_below, small_files, write_tree
from tests.scheduler.watch.test_actor import Bench, Cluster, lose

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

ROOT = Path(__file__).parent.parent
PARTS = ("deeplink", "cache", "scheduler")
LIMIT_S = 60.0
_SERVED: list[Agents] = []
"""Members of this process serve until it ends."""
GENERATED = ROOT / "deeplink" / "v1"
BEFORE_AND_GOAL = {  # at the commit before the rebuild, counted as here; and what the rebuild was to reach
    "modules": (652, 300),
    "lines": (97_002, 72_000),
    "public class names used twice or more": (95, 0),
    "error classes": (223, 90),
    "files at the root of deeplink/": (64, 3),
    "modules of a local pack": (37, 20),
    "modules of a local warm read of one item": (12, 8),
    "modules of a remote batch": (33, 14),
    "modules of a lost node until the requeue": (51, 22),
    "calls from a lost node to the requeue": (4_010, 2_500),
}


def modules() -> list[Path]:
    """Return the files of all modules that are written by hand."""
    found = []
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            links = any(folder.is_symlink() for folder in path.parents)
            if not links and GENERATED not in path.parents:
                found.append(path)
    return found


def static() -> dict[str, int]:
    """Return the figures that are read from the source."""
    files, lines, names, errors = modules(), 0, Counter[str](), 0
    for path in files:
        text = path.read_text()
        lines += len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                errors += node.name.endswith("Error")
                names[node.name] += not node.name.startswith("_")
    return {
        "modules": len(files),
        "lines": lines,
        "public class names used twice or more": sum(count > 1 for count in names.values()),
        "error classes": errors,
        "files at the root of deeplink/": sum(path.parent == ROOT / "deeplink" for path in files),
    }


@dataclass
class Passed:
    """What was called while something was done."""

    calls: int = 0
    files: dict[str, int] = field(default_factory=dict)


class Profile:
    """Counts calls of the product's functions, in all threads that begin after it."""

    def __init__(self) -> None:
        self._passed: Passed | None = None
        self._names: dict[str, str] = {}
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)

    def _module(self, filename: str) -> str:
        path = Path(filename).resolve()
        ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PARTS
        return str(path.relative_to(ROOT)) if ours and GENERATED not in path.parents else ""

    def _hook(self, frame: FrameType, event: str, _: Any) -> None:
        passed = self._passed
        if passed is None or event != "call":
            return
        filename = frame.f_code.co_filename
        name = self._names.get(filename)
        if name is None:
            name = self._names[filename] = self._module(filename)
        if name:
            passed.calls += 1
            passed.files[name] = passed.files.get(name, 0) + 1

    @contextmanager
    def counted(self) -> Iterator[Passed]:
        """Count what is called inside."""
        self._passed = Passed()
        sys.setprofile(self._hook)  # some library may have taken it off
        try:
            yield self._passed
        finally:
            self._passed = None


def flows(profile: Profile, root: Path) -> dict[str, Passed]:
    """Return what each task passed through."""
    source = write_tree(root / "files", small_files())
    config = config_below(root)
    found = {}
    with profile.counted() as found["local pack"]:
        pack(str(source), "small", config=config)
    local = Dataset("small", config=config)
    local[0]
    with profile.counted() as found["local warm read of one item"]:
        local[0]
    # Members have a process of their own: what they do is not counted.
    with ProcessPoolExecutor(1, get_context("spawn")) as elsewhere:
        members = elsewhere.submit(_serve, root / "members").result(LIMIT_S)
        settings = members.config()
        pack(str(source), "small", config=settings, members=members.members, token=members.token)
        remote = Dataset("small", config=settings)
        remote.__getitems__([0, 1])
        with profile.counted() as found["remote batch"]:
            remote.__getitems__([2, 3, 4, 5])
    with Journal(root / "journal.sqlite") as journal:
        found["lost node until the requeue"] = _lost(profile, journal)
    return found


def _serve(root: Path) -> Agents:
    members = Agents(root)
    for name in ("n0", "n1"):
        members.start(name)
    _SERVED.append(members)
    return Agents(root, members.token, members=members.members)


def _lost(profile: Profile, journal: Journal) -> Passed:
    bench = Bench(Cluster(), journal)
    for _ in range(2):
        bench.beat(Phase.RUNNING)
        bench.daemon.tick()
        bench.clock.sleep(0.6)
    lose(bench, "n1")
    with profile.counted() as passed:
        while "scontrol requeue 17" not in bench.cluster.asked:
            bench.turn(1, silent="n1")
    return passed


def main(argv: Sequence[str]) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        prog="make house", description="Sizes of the product, and what tasks pass through."
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--modules", action="store_true", help="the modules of each task, with their calls")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        passed = flows(Profile(), Path(folder))
    figures: dict[str, Any] = static()
    for name, one in passed.items():
        figures[f"modules of a {name}"] = len(one.files)
    figures["calls from a lost node to the requeue"] = passed["lost node until the requeue"].calls
    if options.modules:
        figures["passed"] = {name: one.files for name, one in passed.items()}
    text = json.dumps(figures, indent=1) if options.json else "\n".join(_lines(figures))
    sys.stdout.write(text + "\n")
    return 0


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    yield f"{'now':>8} {'before':>8} {'goal':>8}"
    for name, figure in figures.items():
        if name != "passed":
            before, goal = BEFORE_AND_GOAL[name]
            yield f"{figure:8,} {before:8,} {goal:8,}  {name}"
            continue
        for task, files in figure.items():
            yield from ("", task, *(f"{calls:8,}  {module}" for module, calls in files.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
