"""This process's claim on a folder of checkpoints, made once, and whether a newer claim has come since."""

from __future__ import annotations

import errno
import logging
import stat
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.background import BlockingIo
from deeplink.checkpoints.claims import (
    APART_GAP,
    NO_CLAIM,
    Claim,
    Claims,
    entries,
    fresh_names,
    highest,
    in_order,
    is_fenced,
    is_newer,
    survey,
)
from deeplink.checkpoints.found import (
    FULL,
    FolderGoneError,
    NothingWholeError,
    StorageSilentError,
    StorageUnreadableError,
)
from deeplink.checkpoints.manifest import CheckpointWriteError, no_folder
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import FencedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from deeplink.checkpoints.agents import JobAgents
    from deeplink.core.clock import Clock
    from deeplink.core.types import Attempt

log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_TRIES = 1000
PATIENCE_S: Final = 5.0
"""How long the shared folder may take to answer a small question before it counts as frozen."""
STILL_S: Final = 120.0
"""How long it may stand still while this process looks for what to go on from: storage is frozen for less."""
BRING_S: Final = 900.0
"""The same while this node's newest checkpoint is copied there: syncing it is one long question."""
RETRY_S: Final = 60.0
"""How long an error of its storage is tried again: a ticket is renewed, a server comes back."""
_PAUSE_S: Final = 1.0
_NO_FOLDER: Final = {errno.EEXIST, errno.ENOTDIR}


class FolderOwnership:
    """The hold of one process on a folder. One thread claims it; then several threads may use it."""

    def __init__(self, folder: Path, attempt: Attempt | None, clock: Clock, *, from_scratch: bool = False) -> None:
        self.folder, self.attempt = folder, attempt
        self.claims = Claims(folder)
        self.claim: Claim | None = None  # this process's, or that of its attempt's other rank
        self.holder = uuid.uuid4().hex  # of the process; outside of a job also of the ranks that save together
        self.before_claiming: Callable[[Claim], None] = lambda _newest: None  # with the newest claim
        self.after_claiming: Callable[[Claim], None] = lambda _claim: None  # with the claim that is held
        self.agreed: Callable[[], Claim | None] = lambda: None  # None where the ranks meet in the folder
        self.agents: JobAgents | None = None
        self.shared = BlockingIo(folder, PATIENCE_S)
        self.is_apart = False  # the claim was made without the folder, and is not there yet
        self._is_silent = False
        self._looking = BlockingIo(folder, STILL_S)  # of its own: what is asked meanwhile goes to `shared`
        self._clock = clock
        self.from_scratch = from_scratch
        self.suspected: set[Path] = set()  # a look found them damaged, here or where the claim was made
        self._checked: set[Path] = set()
        self._looked: tuple[str, ...] | None = None

    def claimed(self) -> Claim:
        """Return this attempt's claim, made now if there is none yet."""
        if self.claim is None and (agreed := self.agreed()) is not None:
            self._held_with(agreed)
        if self.claim is None:
            found, newest = self.patiently(self._found_here)
            if found is None:
                self.patiently(lambda: self.before_claiming(newest), BRING_S)
            made = self.patiently(self._found_or_made)
            if self._looked is not None and made.recognised[:1] != self._looked:
                # The other job went on since: the ranks of this one may stand at different steps.
                raise FencedError(self.attempt, None, str(self.folder))
            self._held_with(made)
        if self.claim is None:
            raise RuntimeError("no claim was made")
        return self.claim

    def _held_with(self, claim: Claim) -> None:
        self.claim = claim
        self.suspected |= {self.folder / name for name, reason in claim.skipped if not is_fenced(reason)}
        self.after_claiming(claim)

    def _found_here(self) -> tuple[Claim | None, Claim]:
        is_first = self.attempt is None or (self.attempt.restart, self.attempt.relaunch) == (0, 0)
        if not is_first and not manifests.is_there(self.folder):
            log.warning("%s is not there, and is made: is its storage mounted on this node?", self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        claims = self.claims.all()
        return self.own_claim(claims), claims[-1] if claims else NO_CLAIM

    def patiently(self, look: Callable[[], T], still_s: float | None = None) -> T:
        """Return what `look` finds in the folder, which may be long; but not while nothing is heard of it."""
        return self.retried(lambda: self._asked(look, still_s))

    def _asked(self, look: Callable[[], T], still_s: float | None) -> T:
        try:
            return self._looking.ask(look, still_s)
        except TimeoutError as silent:
            if silent.errno is not None:  # the storage's own word
                raise
            raise StorageSilentError(self.folder, still_s or self._looking.patience_s) from silent

    def retried(self, look: Callable[[], T], for_s: float | None = None) -> T:
        """Return what `look` finds; an error of the storage is no answer, and is tried again for `RETRY_S`."""
        for_s = RETRY_S if for_s is None else for_s
        until: float | None = None
        while True:
            try:
                return look()
            except OSError as problem:
                if problem.errno in FULL:  # waiting makes no room
                    raise CheckpointWriteError(self.folder, problem) from problem
                if problem.errno in _NO_FOLDER and _is_no_folder(self.folder):  # nor a folder of a file
                    raise no_folder(self.folder) from problem
                if until is None:
                    until = self._clock.monotonic() + for_s
                    log.warning("%s: tried again for %g s: %s", self.folder, for_s, problem)
                if self._clock.monotonic() >= until:
                    if isinstance(problem, DeepLinkError):
                        raise
                    raise StorageUnreadableError(self.folder, problem, for_s) from problem
            self._clock.sleep(_PAUSE_S)

    def stir(self, _size: int = 0) -> None:
        """Note that a look goes on: so many bytes were read."""
        self._looking.stir()

    def is_claimed(self) -> bool:
        """Tell whether this attempt has claimed the folder, by whichever rank."""
        return self.claim is not None or self.own_claim(self.claims.all()) is not None

    def refuse_if_fenced(self) -> None:
        """Return if this attempt holds the folder, claiming it first if need be."""
        claim, is_apart = self.claimed(), self.is_apart  # as it is before the look: another thread may publish now
        newest = self.claims.newest_number()
        if newest < claim.number:
            self._make_up_for(claim, is_apart=is_apart)
            newest = self.claims.newest_number()
        if newest != claim.number:
            holder = self.claims.read(newest)
            if holder.attempt is None or holder.attempt != self.attempt:
                raise FencedError(self.attempt, holder.attempt, str(self.folder))
            self.claim = holder  # another rank of ours had to claim once more
        self.is_apart = False

    def _make_up_for(self, claim: Claim, *, is_apart: bool) -> None:
        """Put a claim into the folder that was made while the folder did not answer.

        Any other was there. With agents, who refuse older attempts meanwhile, it is put back.
        """
        if not is_apart:
            gone = next((one for one in (self.folder, self.claims.folder) if not manifests.is_there(one)), None)
            gone = gone or self.claims.path(claim.number)
            if self.agents is None or gone == self.folder:
                raise FolderGoneError(gone, self.folder)
            log.warning("%s is not there any more, and is made again: leave `claims` alone", gone)
        self.folder.mkdir(parents=True, exist_ok=True)
        claims = self.claims.all()
        self.own_claim(claims)
        newest = claims[-1] if claims else NO_CLAIM
        is_of_job = newest.attempt and self.attempt and newest.attempt.job == self.attempt.job
        if newest.number > claim.number - APART_GAP and not is_of_job:
            raise FencedError(self.attempt, newest.attempt, str(self.folder))
        self.claims.publish(claim)

    def refuse_if_known_fenced(self) -> bool:
        """Return whether anyone said that this attempt holds the folder: the agent here, or the folder in time."""
        claim = self.claimed()
        is_known = self.agents is not None and self.agents.refuse_if_fenced(claim)
        try:
            self.shared.ask(self.refuse_if_fenced)
        except OSError as problem:
            if not self._is_silent:  # once per silence
                self._is_silent = True
                log.warning("whether a newer attempt has begun is not known from the shared folder: %s", problem)
            return is_known
        self._is_silent = False
        return True

    def newer_claim(self) -> Claim | None:
        """Return the newest claim that stands above this attempt's, in the folder or as the agent here knows.

        None where there is none, or neither says: that a newer attempt has begun is known before it has claimed.
        """
        known: list[Claim | None] = []
        with suppress(OSError, DeepLinkError):
            known.append(self.shared.ask(self.claims.newest))
        if self.agents is not None:
            with suppress(OSError, DeepLinkError):
                known.append(self.agents.hold().claim)
        own = self.claim or NO_CLAIM
        newer = [claim for claim in known if claim is not None and is_newer(claim, own)]
        return in_order(newer)[-1] if newer else None

    def running_other(self) -> Claim | None:
        """Return the claim of another job whose ranks are at work on the folder: they end when it is claimed."""
        if self.claim is not None or self.attempt is None:
            return None
        newest = self.claims.newest()
        is_other = newest.attempt is not None and newest.attempt.job != self.attempt.job
        if not is_other or not self.claims.is_alive(newest.number):
            return None
        log.warning(
            "%s is only looked at: attempt %s runs on it. A save takes it over", self.folder, newest.attempt
        )
        return newest

    def looked(self, claim: Claim, name: str | None) -> None:
        """Note what an attempt goes on from that has only looked: when it claims, that must be the newest."""
        if self.attempt is not None and self.claim is None and claim.number:
            self._looked = (name,) if name else ()

    def _found_or_made(self) -> Claim:
        void, after = 0, NO_CLAIM
        for _ in range(_MOST_TRIES):
            claims = self.claims.all()
            found = self.own_claim(claims)
            if found is not None and found.number != void:
                return found
            newest = claims[-1] if claims else NO_CLAIM
            if found is None:
                after = newest
            made = self._proposal(newest.number + 1, after)
            if not self.claims.publish(made):
                continue
            if not made.recognised or made.recognised[0] in fresh_names(self.folder):
                return made
            # Who held the folder saved once more before our claim appeared, and removed what we go on from
            # (`tidy`). Claimed again, what it saved counts.
            void = made.number
        raise FencedError(self.attempt, None, str(self.folder))

    def own_claim(self, claims: Sequence[Claim]) -> Claim | None:
        """Return the claim that a rank of this attempt has made already; None where it has to be made."""
        if not claims:
            return None
        newest = claims[-1]
        if newest.holder == self.holder:
            return newest
        if self.attempt is None:
            return None
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

    def _proposal(self, number: int, after: Claim) -> Claim:
        """Return the claim to make: of what `after` left, what it recognises, what it skips and why."""
        recognised, skipped = survey(self.folder, after, self.check_once)
        self.refuse_if_nothing_is_whole(recognised, skipped)
        return Claim(
            number=max(number, 1 + highest(entries(self.folder))),
            attempt=self.attempt,
            holder=self.holder,
            recognised=recognised,
            skipped=skipped,
            created_unix=self._clock.unix(),
        )

    def refuse_if_nothing_is_whole(self, whole: Sequence[str], passed: Iterable[tuple[str, str]]) -> None:
        """Return if there is something to go on from, or nothing to lose, or training may begin at zero."""
        found = [(name, reason) for name, reason in passed if not is_fenced(reason)]
        if whole or not found:
            return
        if not self.from_scratch:
            raise NothingWholeError(self.folder, found)
        log.warning("training begins at zero, as from_scratch=True says: nothing in %s is whole", self.folder)

    def check_once(self, path: Path, *, contents: bool) -> None:
        """Check a checkpoint; a full check is done once, however often the claim has to be proposed."""
        if path not in self._checked:
            manifests.check(path, contents=contents, read=self.stir)
            if contents:
                self._checked.add(path)


def _is_no_folder(path: Path) -> bool:
    """Tell whether something else than a folder stands at the path, or above it."""
    for one in (path, *path.parents):
        with suppress(OSError):
            if not stat.S_ISDIR(one.stat().st_mode):
                return True
    return False
