"""Run a command, and fail when it leaves a process, a network namespace of a sandbox, or a mount behind.

python tests/nothing_left.py COMMAND [ARGUMENT...]

Processes are known by a variable that their environment inherited; those that stay are named and ended.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MARK = "DEEPLINK_TEST_RUN"
PATIENCE_S = 10.0
NETNS = Path("/run/netns")
"""The first `ip netns` of a machine makes it a mount point, for all that come after."""


@dataclass(frozen=True, slots=True)
class Traces:
    """What a command can leave on the machine."""

    processes: dict[int, str]
    namespaces: frozenset[str]
    mounts: frozenset[str]

    def minus(self, before: Traces) -> Traces:
        """Return what was not there before."""
        return Traces(self.processes, self.namespaces - before.namespaces, self.mounts - before.mounts)

    def lines(self) -> list[str]:
        """Return one line for each trace."""
        return [
            *(f"process {pid}: {name}" for pid, name in sorted(self.processes.items())),
            *(f"network namespace {name}" for name in sorted(self.namespaces)),
            *(f"mount {path}" for path in sorted(self.mounts)),
        ]


def _marked(mark: str) -> dict[int, str]:
    found: dict[int, str] = {}
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to look at
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(folder.name)] = words.decode(errors="replace").strip()
    return found


def traces(mark: str) -> Traces:
    """Return what is there now: processes with this mark, sandboxes' namespaces, mount points."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()]
    return Traces(
        processes=_marked(mark),
        namespaces=frozenset(path.name for path in NETNS.glob("dl*")),
        mounts=frozenset(mounts) - {str(NETNS)},
    )


def main(argv: list[str]) -> int:
    """Run `argv` and return its exit code, or 1 when it was 0 and something stayed behind."""
    mark = secrets.token_hex(8)
    before = traces(mark)
    with subprocess.Popen(argv, env={**os.environ, MARK: mark}) as command:
        while True:
            try:
                code = command.wait()
                break
            except KeyboardInterrupt:  # it has it too, and says what it has to say
                continue
    left = traces(mark).minus(before)
    deadline = time.monotonic() + PATIENCE_S
    while left.lines() and time.monotonic() < deadline:
        time.sleep(0.2)
        left = traces(mark).minus(before)
    if not left.lines():
        return code
    sys.stderr.write("\n  ".join(["\nleft behind:", *left.lines()]) + "\n")
    for pid in left.processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return code or 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
