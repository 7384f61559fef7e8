"""Which checkpoints are in a folder, which of them count under a claim, and which are no longer needed."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.manifest import CheckpointDamagedError
from deeplink.publish import DRAFT_PREFIX

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.checkpoints.claims import Claim

_NAME = re.compile(r"step-(\d{10,})\.a(\d+)(?:-(\d+))?")
FENCED: Final = "published by a fenced attempt (claim {})"
_DRAFT = re.compile(re.escape(DRAFT_PREFIX) + r"step-\d{10,}\.a(\d+)(?:-\d+)?-[0-9a-f]+")


def entry_name(step: int, claim: Claim, serial: int) -> str:
    """Return the name of the checkpoint of `step`; `serial` counts repeated saves of one step from 0."""
    return f"step-{step:010d}.a{claim.number}" + (f"-{serial}" if serial else "")


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """A checkpoint's name, read; the later trajectory sorts higher, in it the later step.

    >>> Entry.parse("step-0000000120.a3-1")
    Entry(claim=3, step=120, serial=1, name='step-0000000120.a3-1')
    """

    claim: int
    step: int
    serial: int
    name: str

    @classmethod
    def parse(cls, name: str) -> Entry | None:
        """Return what a name says; None if it is not a checkpoint's."""
        found = _NAME.fullmatch(name)
        return cls(int(found[2]), int(found[1]), int(found[3] or 0), name) if found else None

    def is_own(self, claim: Claim) -> bool:
        """Tell whether the holder of `claim` published it; without any claim the folder is a copy, all counts."""
        return claim.number in {self.claim, 0}

    def counts(self, claim: Claim) -> bool:
        """Tell whether it is part of the trajectory that `claim` stands for."""
        return self.is_own(claim) or self.name in claim.recognised


def entries(folder: Path) -> list[Entry]:
    """Return every checkpoint in `folder`, whole or not, newest first; none if it is not there."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names are wanted
    except FileNotFoundError:
        return []
    return sorted(filter(None, map(Entry.parse, names)), reverse=True)


def abandoned_drafts(folder: Path, claim: Claim) -> list[Path]:
    """Return the unfinished saves of those who held the folder before `claim`."""
    found = ((path, _DRAFT.fullmatch(path.name)) for path in folder.iterdir())
    return [path for path, draft in found if draft and int(draft[1]) < claim.number]


class Check(Protocol):
    """Raises CheckpointDamagedError unless a checkpoint is whole."""

    def __call__(self, path: Path, /, *, contents: bool) -> object:
        """With `contents` checksums count too, else only that every file is there in its size."""
        ...


@dataclass(frozen=True, slots=True)
class Survey:
    """Names that count, newest first, and names that do not, each with the reason."""

    recognised: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]


def survey(folder: Path, newest: Claim, check: Check) -> Survey:
    """Return what whoever claims the folder after `newest` goes on from.

    Candidates are read newest first until one is whole; those before it are looked at only.
    """
    recognised: list[str] = []
    skipped: list[tuple[str, str]] = []
    for entry in entries(folder):
        if not entry.counts(newest):
            skipped.append((entry.name, FENCED.format(entry.claim)))
            continue
        try:
            check(folder / entry.name, contents=not recognised)
        except CheckpointDamagedError as damaged:
            skipped.append((entry.name, damaged.reason))
        else:
            recognised.append(entry.name)
    return Survey(tuple(recognised), tuple(skipped))


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


def superfluous(folder: Path, claim: Claim, retention: Retention) -> list[str]:
    """Return the names that the holder of `claim` may remove, once a save has succeeded.

    These are what fenced attempts published, what is older than the newest `keep` whole ones, earlier saves of one
    step. Damaged ones among the newest stay, for a look; older ones have only use where they are whole. Those that
    could not be looked at are not known to be damaged.
    """
    doomed: list[str] = []
    whole: set[tuple[int, int]] = set()
    for entry in entries(folder):
        if not entry.counts(claim):
            doomed.extend([entry.name] if entry.claim < claim.number else [])
        elif (entry.claim, entry.step) in whole:
            doomed.append(entry.name)
        elif len(whole) < retention.keep or retention.always(entry.step):
            is_whole = looks_whole(folder / entry.name)
            if is_whole:
                whole.add((entry.claim, entry.step))
            elif is_whole is False and len(whole) >= retention.keep:
                doomed.append(entry.name)
        else:
            doomed.append(entry.name)
    return doomed


def looks_whole(path: Path) -> bool | None:
    """Tell whether every file is there in its size; None where the storage does not let itself be looked at."""
    try:
        manifests.check_part(path, contents=False)
    except CheckpointDamagedError as damaged:
        return None if isinstance(damaged.__cause__, OSError) else False
    return True
