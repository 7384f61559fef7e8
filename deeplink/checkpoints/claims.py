"""Claims on a folder of checkpoints: the newest may add to it, and says which checkpoints count.

    claims/claim-0000000003/claim.json
    step-0000000120.a3                      of step 120, by the holder of claim 3

Locks do not hold on every shared file system. An attempt claims the folder before its first use, with the next
number. A claim appears by renaming a folder: that is atomic and fails when the name is taken (rename(2):
ENOTEMPTY), on network file systems too; it is the one thing asked of the file system, and publishing a checkpoint
needs it anyway. The newest claim holds the folder. It lists the checkpoints it recognises, so that what an older
attempt manages to publish afterwards counts for nothing.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.manifest import CheckpointDamagedError
from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import DRAFT_PREFIX, published_folder
from deeplink.core.types import Attempt, AttemptFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

log = logging.getLogger(__name__)

FORMAT: Final = 1
ALIVE_S: Final = 60.0
"""A lease of the usual length holds three signs at least."""
APART_GAP: Final = 100
"""Claims that the shared folder does not know yet are so far above those known: it may know of a few more."""
DAMAGED_PREFIX: Final = ".damaged-"
"""Names of checkpoints that are known to be damaged begin so; nothing removes them."""
_FILE, _ALIVE = "claim.json", "alive"
_CLAIM = re.compile(r"claim-(\d{10,})")
_NAME = re.compile(r"step-(\d{10,})\.a(\d+)(?:-(\d+))?")
_DRAFT = re.compile(re.escape(DRAFT_PREFIX) + r"step-\d{10,}\.a(\d+)(?:-\d+)?-[0-9a-f]+")
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST}
_FENCED: Final = "published by a fenced attempt"
_GONE: Final = "claim {} counts it, and it is not there any more"


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
    """Who holds the folder, and what they found in it."""

    number: int  # one more than the claim before; 0 stands for no claim at all
    attempt: Attempt | None  # None for a process outside of a job
    holder: str  # unique to the process that made the claim
    recognised: tuple[str, ...]  # checkpoints, newest first: that was read and found whole, the others looked at
    skipped: tuple[tuple[str, str], ...]  # name and reason of those that do not count
    created_unix: float  # by the holder's clock


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
    if not rising:
        return []
    newest = rising[-1]
    for claim in rising:
        newest = claim if is_newer(claim, newest) else newest
    rising.remove(newest)
    return [*rising, newest]


def claim_text(claim: Claim) -> str:
    """Return a claim as claim.json has it."""
    return json.dumps({"format": FORMAT, **asdict(claim), "attempt": str(claim.attempt or "")})


def wire_claim(claim: Claim) -> str:
    """Return a claim as the wire has it; empty for none."""
    return claim_text(claim) if claim.number else ""


def claim_of(text: str) -> Claim:
    """Read what `claim_text` wrote."""
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


def _numbers(names: Iterable[str]) -> list[int]:
    return [int(found[1]) for found in map(_CLAIM.fullmatch, names) if found]


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
        return sorted(_numbers(names))

    def newest_number(self) -> int:
        """Return the newest claim's number as the server has it, 0 for none."""
        return max(_numbers(fresh_names(self.folder)), default=0)

    def read(self, number: int) -> Claim:
        """Return a claim."""
        path = self.path(number) / _FILE
        try:
            claim = claim_of(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError) as problem:
            raise ClaimDamagedError(path, str(problem)) from problem
        if claim.number != number:
            raise ClaimDamagedError(path, "it is of another number")
        return claim

    def leave_sign(self, number: int) -> None:
        """Leave a sign that the ranks of a claim are at work. Without it they may be taken for gone, no more."""
        with suppress(OSError):
            (self.path(number) / _ALIVE).touch()

    def remove_sign(self, number: int) -> None:
        """Remove the sign: they have ended."""
        with suppress(OSError):
            (self.path(number) / _ALIVE).unlink(missing_ok=True)

    def is_alive(self, number: int) -> bool:
        """Tell whether the ranks of a claim left a sign within `ALIVE_S`, by the file system's clock alone."""
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
        """Return the newest claim; NO_CLAIM where there is none."""
        numbers = self.numbers()
        return self.read(numbers[-1]) if numbers else NO_CLAIM

    def all(self) -> list[Claim]:
        """Return every claim, oldest first."""
        return [self.read(number) for number in self.numbers()]

    def publish(self, claim: Claim) -> bool:
        """Make a claim appear; False when its number was taken first."""
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


# -- the checkpoints of a folder


def fenced(entry: CheckpointName) -> str:
    """Return why a checkpoint does not count that appeared after the next attempt had claimed."""
    return f"{_FENCED} (claim {entry.claim})"


def is_fenced(reason: str) -> bool:
    """Tell whether `fenced` gave this reason; any other says that a checkpoint is damaged or absent."""
    return reason.startswith(_FENCED)


def entry_name(step: int, claim: Claim, serial: int) -> str:
    """Return the name of the checkpoint of `step`; `serial` counts repeated saves of one step from 0."""
    return f"step-{step:010d}.a{claim.number}" + (f"-{serial}" if serial else "")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """A checkpoint's name, read; the later trajectory sorts higher, in it the later step.

    >>> CheckpointName.parse("step-0000000120.a3-1")
    CheckpointName(claim=3, step=120, serial=1, name='step-0000000120.a3-1')
    """

    claim: int
    step: int
    serial: int
    name: str

    @classmethod
    def parse(cls, name: str) -> CheckpointName | None:
        """Return what a name says; None if it is not a checkpoint's."""
        found = _NAME.fullmatch(name)
        return cls(int(found[2]), int(found[1]), int(found[3] or 0), name) if found else None

    def is_own(self, claim: Claim) -> bool:
        """Tell whether the holder of `claim` published it; without any claim the folder is a copy, all counts."""
        return claim.number in {self.claim, 0}

    def counts(self, claim: Claim) -> bool:
        """Tell whether it is part of the trajectory that `claim` stands for."""
        return self.is_own(claim) or self.name in claim.recognised


def entries(folder: Path) -> list[CheckpointName]:
    """Return every checkpoint in `folder`, whole or not, newest first; none if it is not there."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names are wanted
    except FileNotFoundError:
        return []
    return sorted(filter(None, map(CheckpointName.parse, names)), reverse=True)


def highest(there: Iterable[CheckpointName]) -> int:
    """Return the highest claim that checkpoints are of; the next stands above it though `claims` was removed."""
    return max((entry.claim for entry in there), default=0)


def abandoned_drafts(folder: Path, claim: Claim) -> list[Path]:
    """Return the unfinished saves of those who held the folder before `claim`."""
    found = ((path, _DRAFT.fullmatch(path.name)) for path in folder.iterdir())
    return [path for path, draft in found if draft and int(draft[1]) < claim.number]


def survey(
    folder: Path, newest: Claim, check: Callable[..., object]
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return the names that the next claim after `newest` recognises, and those it skips with reasons.

    Candidates are read newest first until one is whole; those before it are looked at only, and count unless that
    shows damage.
    """
    recognised: list[str] = []
    skipped: list[tuple[str, str]] = []
    there = entries(folder)
    if there and not newest.number:
        log.warning("%s has no claims: it is a copy, or `claims` was removed. All checkpoints there count", folder)
    for entry in there:
        if not entry.counts(newest):
            skipped.append((entry.name, why_not(entry, newest)))
            continue
        try:
            check(folder / entry.name, contents=not recognised)
        except CheckpointDamagedError as damaged:
            skipped.append((entry.name, damaged.reason))
            continue
        except OSError as problem:
            if not recognised:
                raise
            log.warning("%s counts, though it cannot be looked at now: %s", entry.name, problem)
        recognised.append(entry.name)
    return tuple(recognised), (*skipped, *(() if recognised else gone(newest, there)))


def why_not(entry: CheckpointName, newest: Claim) -> str:
    """Return why a checkpoint does not count under `newest`: what its holder found, else that it came later."""
    return dict(newest.skipped).get(entry.name) or fenced(entry)


def gone(newest: Claim, there: Collection[CheckpointName]) -> list[tuple[str, str]]:
    """Return what counts under `newest` and is not there any more, with the reason."""
    names = {entry.name for entry in there}
    return [(name, _GONE.format(newest.number)) for name in newest.recognised if name not in names]


@dataclass(frozen=True, slots=True)
class Retention:
    """Which whole checkpoints stay."""

    keep: int = 3  # the newest so many
    every: int = 0  # besides, those whose step is a multiple of it; 0: none

    def __post_init__(self) -> None:
        if self.keep < 1 or self.every < 0:
            raise ValueError(f"keep must be 1 or more, and every 0 or more; got {self.keep} and {self.every}")

    def always(self, step: int) -> bool:
        """Tell whether the checkpoint of `step` stays however old it is."""
        return bool(self.every) and step % self.every == 0


@dataclass(frozen=True, slots=True)
class Surplus:
    """Names of checkpoints that are superseded, and of those that are damaged, newest first."""

    superseded: tuple[str, ...]
    damaged: tuple[str, ...]


def surplus(
    folder: Path, claim: Claim, retention: Retention, proved: str, damaged: Collection[str] = ()
) -> Surplus:
    """Return what the holder of `claim` needs no more.

    Superseded is what is older than `proved` and than the newest `keep` that look whole, and earlier saves of one
    step. What does not count is older than all that does. What cannot be looked at stays, and stands for nothing.
    """
    superseded: list[str] = []
    torn: list[str] = []
    whole: set[tuple[int, int]] = set()
    newest = CheckpointName.parse(proved)
    for entry in entries(folder):
        if claim.number and entry.claim > claim.number:
            continue
        is_whole = entry.name not in damaged and looks_whole(folder / entry.name)
        if is_whole is None:
            continue
        if not is_whole:
            torn.append(entry.name)
            continue
        is_again = (entry.claim, entry.step) in whole
        is_due = len(whole) >= retention.keep and not (entry.counts(claim) and retention.always(entry.step))
        if is_again or is_due:
            superseded.extend([entry.name] if newest is not None and entry < newest else [])
        elif entry.counts(claim):
            whole.add((entry.claim, entry.step))
    return Surplus(tuple(superseded), tuple(torn))


def looks_whole(path: Path) -> bool | None:
    """Tell whether every file is there in its size; None where the storage does not let itself be looked at."""
    try:
        manifests.check_part(path, contents=False)
    except CheckpointDamagedError:
        return False
    except OSError:
        return None
    return True
