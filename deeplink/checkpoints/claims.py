"""Who may add to a folder of checkpoints, decided without locks: they do not hold on every shared file system.

    claims/claim-0000000003/claim.json

An attempt claims the folder before its first use, with the next number. A claim appears by renaming a folder: that
is atomic and fails when the name is taken (rename(2): ENOTEMPTY), on network file systems too; it is the one thing
asked of the file system, and publishing a checkpoint needs it anyway. The newest claim holds the folder. It lists
the checkpoints it recognises, so that whatever an older attempt manages to publish afterwards counts for nothing.
"""

from __future__ import annotations

import errno
import json
import os
import re
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from deeplink.errors import DeepLinkError
from deeplink.publish import DRAFT_PREFIX, published_folder
from deeplink.types import Attempt, AttemptFormatError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FORMAT: Final = 1
_NAME = re.compile(r"claim-(\d{10,})")
_FILE, _ALIVE = "claim.json", "alive"
ALIVE_S: Final = 60.0
"""A lease of the usual length holds three signs at least."""
APART_GAP: Final = 100
"""Claims that the shared folder does not know yet are so far above those known: it may know of a few more."""
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST}


class ClaimDamagedError(DeepLinkError):
    """A claim cannot be read, so who holds the folder is not known."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(
            f"claim {path}: {problem}",
            remedy="If the storage is in order and no job runs on this folder, remove that claim and start again.",
        )
        self.path, self.problem = path, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Who holds the folder, and what they found in it.

    Attributes:
        number: one more than the claim before; 0 stands for no claim at all.
        attempt: who; None for a process outside of a job.
        holder: unique to the process that made the claim.
        recognised: names of checkpoints, newest first; the first was read and found whole, the others looked at.
        skipped: name and reason of those that do not count.
        created_unix: when, by the holder's clock.
    """

    number: int
    attempt: Attempt | None
    holder: str
    recognised: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    created_unix: float


NO_CLAIM = Claim(number=0, attempt=None, holder="", recognised=(), skipped=(), created_unix=0.0)


def is_newer(one: Claim, other: Claim) -> bool:
    """Tell whether a claim stands above another: of one job the later attempt's, else the higher number's.

    Numbers alone would do where all claims lie in one folder. One that was made while the shared folder did not
    answer may have a higher number than a later attempt's.
    """
    if one.attempt and other.attempt and one.attempt.job == other.attempt.job and one.attempt != other.attempt:
        return one.attempt > other.attempt
    return one.number > other.number


def in_order(claims: Iterable[Claim]) -> list[Claim]:
    """Return claims with the newest last, the others by number."""
    rising = sorted(claims, key=lambda claim: claim.number)
    if rising:
        newest = rising[-1]
        for claim in rising:
            newest = claim if is_newer(claim, newest) else newest
        rising.remove(newest)
        rising.append(newest)
    return rising


def claim_text(claim: Claim) -> str:
    """Return a claim as claim.json has it."""
    return json.dumps({"format": FORMAT, **asdict(claim), "attempt": str(claim.attempt or "")})


def claim_of(text: str) -> Claim:
    """Read what `claim_text` wrote.

    Raises:
        ValueError: it is no claim, or of another format.
    """
    try:
        facts: dict[str, Any] = json.loads(text)
        if facts.pop("format") != FORMAT:
            raise ValueError("a claim of another format")
        return Claim(
            number=int(facts["number"]),
            attempt=Attempt.parse(facts["attempt"]) if facts["attempt"] else None,
            holder=facts["holder"],
            recognised=_names(facts["recognised"]),
            skipped=tuple((name, reason) for name, reason in facts["skipped"]),
            created_unix=facts["created_unix"],
        )
    except (TypeError, KeyError, AttributeError, AttemptFormatError) as problem:
        raise ValueError(str(problem)) from problem


def _names(listed: list[str]) -> tuple[str, ...]:
    # They are joined to folders, and claims come from other nodes, too.
    for name in listed:
        if "/" in name or name in {"", ".", ".."}:
            raise ValueError(f"{name!r} is no checkpoint's name")
    return tuple(listed)


def fresh_names(folder: Path) -> list[str]:
    """Return what is in a folder as the server has it; nothing where there is no folder.

    A network file system may answer a listing from memory for half a minute. Making and removing a file asks the
    server, and what it answers makes the client drop what it remembered of the folder.

    Raises:
        OSError: the file system refuses.
    """
    probe = folder / f"{DRAFT_PREFIX}probe-{uuid.uuid4().hex}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileNotFoundError:
        return []
    probe.unlink(missing_ok=True)
    try:
        return [name for name in os.listdir(folder) if name != probe.name]  # noqa: PTH208 - names are wanted
    except FileNotFoundError:
        return []


class Claims:
    """The claims on one folder of checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "claims"

    def path(self, number: int) -> Path:
        """Return where a claim lies, if there is one of that number."""
        return self.folder / f"claim-{number:010d}"

    def numbers(self) -> list[int]:
        """Return the numbers of all claims, rising; empty when there is none."""
        try:
            names = os.listdir(self.folder)  # noqa: PTH208 - names are wanted
        except FileNotFoundError:
            return []
        return sorted(int(found[1]) for found in map(_NAME.fullmatch, names) if found)

    def newest_number(self) -> int:
        """Return the newest claim's number as the server has it, 0 for none.

        Raises:
            OSError: the file system refuses.
        """
        names = fresh_names(self.folder)
        return max((int(found[1]) for found in map(_NAME.fullmatch, names) if found), default=0)

    def read(self, number: int) -> Claim:
        """Return a claim.

        Raises:
            ClaimDamagedError: it is no claim, or is not there.
            OSError: the file system refuses.
        """
        path = self.path(number) / _FILE
        try:
            claim = claim_of(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError) as problem:
            raise ClaimDamagedError(path, str(problem)) from problem
        if claim.number != number:
            raise ClaimDamagedError(path, "it is of another number")
        return claim

    def beat(self, number: int) -> None:
        """Leave a sign that the ranks of a claim are at work. Without it they may be taken for gone, no more."""
        with suppress(OSError):
            (self.path(number) / _ALIVE).touch()

    def rest(self, number: int) -> None:
        """Take the sign away: they have ended."""
        with suppress(OSError):
            (self.path(number) / _ALIVE).unlink(missing_ok=True)

    def is_alive(self, number: int) -> bool:
        """Tell whether the ranks of a claim left a sign within `ALIVE_S`, by the clock of the file system alone.

        Raises:
            OSError: the file system refuses.
        """
        probe = self.path(number) / f"{DRAFT_PREFIX}probe-{uuid.uuid4().hex}"
        try:
            probe.touch()
            now = probe.stat().st_mtime
            return now - (self.path(number) / _ALIVE).stat().st_mtime < ALIVE_S
        except FileNotFoundError:
            return False
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)

    def newest(self) -> Claim:
        """Return the newest claim, whoever made it; NO_CLAIM where there is none.

        Raises:
            ClaimDamagedError, OSError: as `read`.
        """
        numbers = self.numbers()
        return self.read(numbers[-1]) if numbers else NO_CLAIM

    def all(self) -> list[Claim]:
        """Return every claim, oldest first."""
        return [self.read(number) for number in self.numbers()]

    def publish(self, claim: Claim) -> bool:
        """Make a claim appear; False when its number was taken first.

        Raises:
            OSError: the file system refuses.
        """
        self.folder.mkdir(exist_ok=True)
        try:
            with published_folder(self.path(claim.number)) as draft:
                (draft / _FILE).write_text(claim_text(claim), encoding="utf-8")
        except OSError as problem:
            # A network file system may repeat a rename whose answer was lost, and report that the name is taken.
            if claim.number in self.numbers() and self.read(claim.number).holder == claim.holder:
                return True
            if problem.errno in _TAKEN:
                return False
            raise
        return True
