"""A folder of checkpoints.

step-0000000120.a3      the checkpoint of step 120 by the holder of claim 3; saved once more: step-0000000120.a3-1
claims/                 who holds the folder (deeplink.checkpoints.claims)
.draft-*                unfinished
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink import vitals
from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.claims import NO_CLAIM, Claim, Claims
from deeplink.checkpoints.entries import Entry, abandoned_drafts, entries, entry_name, superfluous, survey
from deeplink.checkpoints.manifest import CheckpointDamagedError, CheckpointWriteError, Manifest
from deeplink.clock import Clock, SystemClock
from deeplink.errors import DeepLinkError
from deeplink.publish import DRAFT_PREFIX, published_folder
from deeplink.types import Attempt, FencedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

log = logging.getLogger(__name__)

_MOST_TRIES = 1000


class CheckpointExistsError(DeepLinkError):
    """Two processes saved the same step at the same time."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} was saved by another process just now", remedy="Save on one rank only (rank 0).")
        self.path = path


class ReadOnlyError(DeepLinkError):
    """A save through checkpoints that were opened for reading."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder} was opened with readonly=True", remedy="Open it without, to save.")
        self.folder = folder


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint that does not count, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        path: the folder with the files that were saved.
        step: the step it was saved at.
        attempt: who saved it; None for a process outside of a job.
        meta: what was given to `save`, as JSON gives it back.
        skipped: newer or older ones that do not count, and why.
    """

    path: Path
    step: int
    attempt: Attempt | None
    meta: dict[str, Any]
    skipped: tuple[Skipped, ...] = ()


class Checkpoints:
    """Saves and finds checkpoints in one folder.

    Nothing is read or written until the first `latest` or `save`. An attempt of a job then claims the folder, once
    for all its ranks; from there on saves of older attempts are refused, and what they publish all the same is
    ignored. Within one job an older attempt cannot claim after a newer one; between jobs the latest claim wins.

    A process outside of a job (no `attempt`, no DEEPLINK_ATTEMPT) is an attempt of its own, which claims when it
    first saves; its `latest` claims nothing, so looking at a running job's checkpoints does not disturb it. From
    within a job, open with `readonly=True` to look at those of another.

    Not thread-safe. Save on one rank; every rank may call `latest`: all of an attempt get the same answer before
    its first save.

    Args:
        folder: made at the first save; shared storage if the job can run elsewhere next time.
        attempt: who saves; DEEPLINK_ATTEMPT of the environment when None.
        keep: whole checkpoints kept; older ones are removed after a save.
        readonly: claim nothing, refuse to save.
        clock: for the time written into manifests.

    Raises:
        AttemptFormatError: DEEPLINK_ATTEMPT is malformed.
        ValueError: keep is under 1.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        attempt: Attempt | None = None,
        keep: int = 3,
        readonly: bool = False,
        clock: Clock | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be 1 or more, got {keep}")
        named = os.environ.get("DEEPLINK_ATTEMPT", "")
        self.folder, self.keep, self.readonly = Path(folder), keep, readonly
        self.attempt = attempt or (Attempt.parse(named) if named else None)
        self.skipped: tuple[Skipped, ...] = ()
        self._clock = clock or SystemClock()
        self._claims = Claims(self.folder)
        self._holder = uuid.uuid4().hex
        self._claim: Claim | None = None
        self._checked: set[Path] = set()
        self._saved: int | None = None

    # -- looking

    def latest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, sizes and checksums verified; None when there is none.

        What does not count is logged, and told in `.skipped` of the checkpoint and of this object.

        Raises:
            FencedError: a newer attempt has claimed the folder.
            CheckpointDamagedError: the checkpoint that this attempt's ranks agreed on was damaged since.
            ClaimDamagedError: a claim cannot be read.
        """
        if self.attempt is None or self.readonly:
            claim = self._claim or self._newest_claim()
        else:
            claim = self._claimed()
            self._refuse_if_fenced()
        own = [entry for entry in entries(self.folder) if entry.is_own(claim)]
        skipped = [Skipped(self.folder / name, reason) for name, reason in claim.skipped]
        chosen = self._newest_whole(own, claim, skipped)
        self._say(skipped)
        if chosen is None:
            return None
        path, manifest = chosen
        return Checkpoint(
            path=path,
            step=manifest.step,
            attempt=Attempt.parse(manifest.attempt) if manifest.attempt else None,
            meta=manifest.meta,
            skipped=self.skipped,
        )

    def _newest_whole(
        self, own: Sequence[Entry], claim: Claim, skipped: list[Skipped]
    ) -> tuple[Path, Manifest] | None:
        if not own and claim.recognised and self._claim is not None:
            # Verified by the rank that claimed: all ranks go on from this one, or none does.
            path = self.folder / claim.recognised[0]
            return path, manifests.check(path, contents=False)
        for name in [*(entry.name for entry in own), *claim.recognised]:
            path = self.folder / name
            try:
                return path, manifests.check(path, contents=True)
            except CheckpointDamagedError as problem:
                skipped.append(Skipped(path, problem.reason))
        return None

    def _say(self, skipped: Sequence[Skipped]) -> None:
        for item in skipped:
            if item not in self.skipped:
                log.warning("checkpoint %s skipped: %s", item.path, item.reason)
        self.skipped = tuple(skipped)

    # -- claiming

    def _newest_claim(self) -> Claim:
        numbers = self._claims.numbers()
        return self._claims.read(numbers[-1]) if numbers else NO_CLAIM

    def _claimed(self) -> Claim:
        """Return this attempt's claim, made now if there is none yet.

        Raises:
            FencedError: a newer attempt of this job, or another job since, has claimed the folder.
        """
        if self._claim is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for _ in range(_MOST_TRIES):
                claims = self._claims.all()
                found = self._own_claim(claims)
                made = found or self._proposal(claims[-1] if claims else NO_CLAIM)
                if found or self._claims.publish(made):
                    self._claim = made
                    return made
            raise FencedError(self.attempt, None, str(self.folder))
        return self._claim

    def _own_claim(self, claims: Sequence[Claim]) -> Claim | None:
        """Return the claim that a rank of this attempt has made already."""
        if self.attempt is None or not claims:
            return None
        newest = claims[-1]
        later = [
            claim.attempt
            for claim in claims
            if claim.attempt and claim.attempt.job == self.attempt.job and claim.attempt > self.attempt
        ]
        if later:
            raise FencedError(self.attempt, max(later), str(self.folder))
        if newest.attempt == self.attempt:
            return newest
        if any(claim.attempt == self.attempt for claim in claims):
            raise FencedError(self.attempt, newest.attempt, str(self.folder))
        return None

    def _proposal(self, newest: Claim) -> Claim:
        """Return the claim to make after `newest`: what it recognises, what it skips and why."""
        found = survey(self.folder, newest, self._check_once)
        return Claim(
            number=newest.number + 1,
            attempt=self.attempt,
            holder=self._holder,
            recognised=found.recognised,
            skipped=found.skipped,
            created_unix=self._clock.unix(),
        )

    def _check_once(self, path: Path, *, contents: bool) -> None:
        """Check a checkpoint; a full check is done once, however often the claim has to be proposed."""
        if path not in self._checked:
            manifests.check(path, contents=contents)
            if contents:
                self._checked.add(path)

    def _refuse_if_fenced(self) -> None:
        claim = self._claimed()
        newest = self._claims.newest_number()
        if newest != claim.number:
            raise FencedError(
                self.attempt, self._claims.read(newest).attempt if newest else None, str(self.folder)
            )

    # -- saving

    @contextmanager
    def save(self, *, step: int, meta: dict[str, Any] | None = None) -> Iterator[Path]:
        """Give an empty folder to write files into; after the block it is a checkpoint, whole, or not there.

        All is on stable storage when the block has ended; that takes as long as the storage takes. Afterwards
        older checkpoints are removed but for the newest `keep` whole ones.

        Args:
            step: number of optimizer steps done since training began.
            meta: small facts to carry along, as JSON: the sampler's state, the digest's.

        Raises:
            FencedError: a newer attempt has claimed the folder; nothing was published.
            CheckpointWriteError: the storage refused; nothing of the checkpoint is left.
            CheckpointExistsError: another process saved this step at the same time.
            MetaError: meta is not JSON.
            ValueError: the block left something that is neither file nor folder, or a file named manifest.json.
            ReadOnlyError: opened for reading.
        """
        if self.readonly:
            raise ReadOnlyError(self.folder)
        if step < 0:
            raise ValueError(f"step {step}")
        kept_meta = manifests.checked_meta(meta)
        final = self.folder
        in_body = False
        try:
            claim = self._claimed()
            self._refuse_if_fenced()
            final = self._free_path(step, claim)
            with published_folder(final, check=self._refuse_if_fenced) as draft:
                in_body = True
                yield draft
                in_body = False
                self._seal(draft, step, claim, kept_meta)
        except OSError as problem:
            if self._claim is not None:
                self._refuse_if_fenced()  # a newer attempt removes our drafts: then this is the reason
            if in_body:
                raise
            if final != self.folder and final.exists():
                raise CheckpointExistsError(final) from problem
            raise CheckpointWriteError(self.folder, problem) from problem
        self._tell(step)
        self._prune(claim)

    def _tell(self, step: int) -> None:
        """Let the next report of training say that a checkpoint is there."""
        told = {vitals.CHECKPOINT_STEP: float(step), vitals.CHECKPOINT_UNIX: self._clock.unix()}
        if self._saved is not None and step > self._saved:
            told[vitals.CHECKPOINT_EVERY] = float(step - self._saved)
        self._saved = step
        vitals.of_process.note(**told)

    def _free_path(self, step: int, claim: Claim) -> Path:
        serials = [
            entry.serial for entry in entries(self.folder) if (entry.claim, entry.step) == (claim.number, step)
        ]
        return self.folder / entry_name(step, claim, max(serials) + 1 if serials else 0)

    def _seal(self, draft: Path, step: int, claim: Claim, meta: dict[str, Any]) -> None:
        manifest = Manifest(
            step=step,
            attempt=str(self.attempt or ""),
            claim=claim.number,
            created_unix=self._clock.unix(),
            files=manifests.list_files(draft),
            meta=meta,
        )
        manifests.write_manifest(draft, manifest)

    # -- tidying

    def _prune(self, claim: Claim) -> None:
        """Remove what is no longer needed. Trouble with that is logged: the save itself has succeeded."""
        try:
            for name in superfluous(self.folder, claim, self.keep):
                # Gone under its own name at once: half removed it would look like a torn save.
                trash = self.folder / f"{DRAFT_PREFIX}{name}-{uuid.uuid4().hex[:12]}"
                (self.folder / name).rename(trash)
                shutil.rmtree(trash)
            for draft in abandoned_drafts(self.folder, claim):
                shutil.rmtree(draft)
        except OSError as problem:
            log.warning("old checkpoints in %s are not all removed: %s", self.folder, problem)
