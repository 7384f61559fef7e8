"""Which checkpoints are in a folder, which of them count under a claim, and which are no longer needed."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.manifest import CheckpointDamagedError
from deeplink.publish import DRAFT_PREFIX

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from deeplink.checkpoints.claims import Claim

log = logging.getLogger(__name__)

DAMAGED_PREFIX: Final = ".damaged-"
"""What is known to be damaged is kept under such a name; nothing removes it."""
_NAME = re.compile(r"step-(\d{10,})\.a(\d+)(?:-(\d+))?")
_FENCED: Final = "published by a fenced attempt"
_GONE: Final = "claim {} counts it, and it is not there any more"
_DRAFT = re.compile(re.escape(DRAFT_PREFIX) + r"step-\d{10,}\.a(\d+)(?:-\d+)?-[0-9a-f]+")


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


class WholenessCheck(Protocol):
    """Raises CheckpointDamagedError where a checkpoint is not whole, OSError where that cannot be told."""

    def __call__(self, path: Path, /, *, contents: bool) -> object:
        """With `contents` checksums count too, else only that every file is there in its size."""
        ...


@dataclass(frozen=True, slots=True)
class FolderSurvey:
    """Names that count, newest first, and names that do not, each with the reason."""

    recognised: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]


def survey(folder: Path, newest: Claim, check: WholenessCheck) -> FolderSurvey:
    """Return what whoever claims the folder after `newest` goes on from.

    Candidates are read newest first until one is whole; those before it are looked at only, and count unless that
    shows damage.

    Raises:
        OSError: what may be the newest whole one cannot be read.
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
    return FolderSurvey(tuple(recognised), (*skipped, *(() if recognised else gone(newest, there))))


def why_not(entry: CheckpointName, newest: Claim) -> str:
    """Return why a checkpoint does not count under `newest`: what its holder found, else that it came later."""
    return dict(newest.skipped).get(entry.name) or fenced(entry)


def gone(newest: Claim, there: Collection[CheckpointName]) -> list[tuple[str, str]]:
    """Return what counts under `newest` and is not there any more, with the reason."""
    names = {entry.name for entry in there}
    return [(name, _GONE.format(newest.number)) for name in newest.recognised if name not in names]


@dataclass(frozen=True, slots=True)
class Retention:
    """Which whole checkpoints stay.

    Attributes:
        keep: the newest so many.
        every: besides, those whose step is a multiple of it; none where it is 0.
    """

    keep: int = 3
    every: int = 0

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

    Args:
        folder: where.
        claim: what counts.
        retention: what stays.
        proved: a checkpoint that was written or read to its last byte just now.
        damaged: names of those that were read, and are damaged.
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
