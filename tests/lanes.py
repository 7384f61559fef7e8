"""Run pytest three times: the quick tests first, then at once the slow ones and those that drive a cluster.

python tests/lanes.py [ARGUMENT OF PYTEST...]

The quick tests have the machine for themselves: many race threads against clocks. Their output is shown as it
comes, the others' when both have ended. Fails when a lane does.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

NO_TESTS = 5
"""What pytest exits with when nothing was chosen: fine for a lane, not for all."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Tests that run in one pytest: which ones, and how many at once.

    Attributes:
        where: what to collect, or to leave out: collecting all takes each process some 15 s of a core.
    """

    name: str
    marker: str
    at_once: int
    where: tuple[str, ...]

    def command(self, arguments: list[str]) -> list[str]:
        """Return pytest's argument list. A cache of its own for each lane: they write at the same time.

        The tests of one file stay in one process: what they share, a sandbox or a trained model, is made once.
        """
        return [
            *(sys.executable, "-m", "pytest", "-m", self.marker, "-o", f"cache_dir=.pytest_cache/{self.name}"),
            *("--durations=20", "--durations-min=5"),
            *(("-n", str(self.at_once), "--dist", "loadfile") if self.at_once > 1 else ()),
            *arguments,
            *self.where,
        ]


def _files_with_slow_tests() -> tuple[str, ...]:
    files = sorted(path for path in Path("tests").rglob("test_*.py") if not path.is_relative_to(CLUSTER))
    return tuple(str(path) for path in files if "mark.slow" in path.read_text(encoding="utf-8"))


CLUSTER = "tests/cluster"
LANES = (
    Lane("quick", "not slow and not cluster", 3, (f"--ignore={CLUSTER}",)),
    Lane("slow", "slow and not cluster", 2, _files_with_slow_tests()),
    Lane("cluster", "cluster", 3, (CLUSTER,)),
)


def main(argv: list[str]) -> int:
    """Return 0, or what pytest exited with where a lane failed."""
    began = time.monotonic()
    quick, *others = LANES
    codes = [_begin(quick, argv, None).wait()]
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in others]
        running = [_begin(lane, argv, output) for lane, output in zip(others, kept, strict=True)]
        codes += [pytest.wait() for pytest in running]
        for lane, output in zip(others, kept, strict=True):
            output.seek(0)
            sys.stdout.write(f"\n{lane.name}:\n{output.read()}")
    print(f"three lanes: {time.monotonic() - began:.0f} s")  # noqa: T201
    bad = [code for code in codes if code not in {0, NO_TESTS}]
    return bad[0] if bad else min(codes)


def _begin(lane: Lane, argv: list[str], output: IO[str] | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(lane.command(argv), stdout=output, stderr=subprocess.STDOUT if output else None)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # every lane has it too
        sys.exit(130)
