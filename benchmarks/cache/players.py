"""The sides' processes, as the harness sees them."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, cast

from benchmarks.cache.child import side_named

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from benchmarks.cache.sides.base import Side

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".venv-bench" / "bin" / "python"
DEADLINE_S = 180.0


class UnmeasuredError(Exception):
    """A side cannot do what was asked; its row is missing, and this says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one request came to.

    Attributes:
        seconds: wall clock.
        cpu_s: of the side's process and its workers, in user and kernel.
        samples: how many were read.
        digest: over their bytes (`order.consume`), or the sum of their lengths.
        by_calls: bytes that went through read calls.
        from_disk: bytes that the kernel fetched from disk for this process.
        longest_s: the longest that a step waited for its batch.
        failed: batches that could not be read.
        why: the first of them could not.
        from_source: samples that came from the source.
    """

    seconds: float = 0.0
    cpu_s: float = 0.0
    samples: int = 0
    digest: int = 0
    by_calls: int = 0
    from_disk: int = 0
    longest_s: float = 0.0
    failed: int = 0
    why: str = ""
    from_source: int = 0

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds


class Player:
    """One side in a process of its own.

    Args:
        where: module and class of the side, as in `ours.Ours`.
        log: what it writes to standard error goes there.
        command: starts the side's process, wherever that is, in place of a child of our own.

    Raises:
        UnmeasuredError: the peers' virtual environment is not there.
    """

    def __init__(self, where: str, log: Path, command: Sequence[str] | None = None) -> None:
        self.side: Side = side_named(where)
        self.name = self.side.name
        if command is None:
            python = str(PEERS) if self.side.is_peer else sys.executable
            if not Path(python).exists():
                raise UnmeasuredError("the peers' virtual environment is missing: make bench-cache makes it")
            command = [python, "-m", "benchmarks.cache.child", where]
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
            )
        self._to, self._from = cast("IO[bytes]", self._process.stdin), cast("IO[bytes]", self._process.stdout)

    @property
    def pid(self) -> int:
        """Of the side's process."""
        return self._process.pid

    def ask(self, do: str, *, deadline_s: float = DEADLINE_S, **request: Any) -> Answer:
        """Have it do something, and wait.

        Raises:
            UnmeasuredError: it cannot, has ended, or takes longer than the deadline.
        """
        self.tell(do, **request)
        return self.hear(deadline_s)

    def tell(self, do: str, **request: Any) -> None:
        """Have it do something; `hear` must follow.

        Raises:
            UnmeasuredError: it has ended.
        """
        try:
            self._to.write(json.dumps({"do": do, **request}).encode() + b"\n")
            self._to.flush()
        except BrokenPipeError:
            raise UnmeasuredError(self._last_words("ended")) from None

    def hear(self, deadline_s: float = DEADLINE_S) -> Answer:
        """Wait for the answer to what it was told. Raises as `ask` does."""
        if not select.select([self._from], [], [], deadline_s)[0]:
            raise UnmeasuredError(f"no answer within {deadline_s:g} s")
        line = self._from.readline()
        if not line:
            raise UnmeasuredError(self._last_words("ended"))
        found = json.loads(line)
        if "error" in found:
            raise UnmeasuredError(found["error"])
        return Answer(**found)

    def _last_words(self, what: str) -> str:
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"its process {what}: {said[-1] if said else 'it said nothing'}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """End the process: it ends by itself at the end of its input, or is killed."""
        with contextlib.suppress(BrokenPipeError):  # a request that it died before taking is still to be written
            self._to.close()
        self._from.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
