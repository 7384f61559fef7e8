"""Names a process so that another one can tell later whether it has ended; its number alone is used again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Self

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class ProcessIdentity(NamedTuple):
    """One process of this machine or of another one."""

    pid: int
    started: int  # in the kernel's ticks since boot; 0: not known
    namespace: str  # of process numbers; empty: not known. The first one's name is the same on all machines
    boot: str = ""  # names its machine's boot; empty: it was one of this machine

    @classmethod
    def own(cls) -> Self:
        """Return this process's."""
        return cls(os.getpid(), started_ticks("self") or 0, _namespace(), boot_id())

    def has_ended(self) -> bool:
        """Tell whether it is known to have ended: only of those whose numbers mean something here."""
        is_of_here = bool(self.started and self.namespace) and self.namespace == _namespace()
        return is_of_here and self.boot in {"", boot_id()} and started_ticks(self.pid) not in {self.started, None}


def boot_id() -> str:
    """Return what names this boot of the machine; empty where the kernel does not say."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def started_ticks(pid: int | str) -> int | None:
    """Return when a process was started, in the kernel's ticks since boot.

    0 where there is none of this number, None where that is not known.
    """
    try:
        # The program's name, in parentheses, may hold anything (proc(5), /proc/pid/stat).
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except (OSError, ValueError, IndexError):
        return None


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
