"""The newest whole checkpoint and its use, and the errors of `Checkpoints`."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.claims import entries
from deeplink.checkpoints.manifest import CheckpointDamagedError, Manifest, is_there
from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from deeplink.checkpoints.claims import Claim
    from deeplink.checkpoints.restore import ScatteredFiles
    from deeplink.core.types import Attempt

log = logging.getLogger(__name__)

STATE = "state.pt"
RANDOM = "random-{:05d}.pt"
EACH = "rank-{:05d}.pt"
SAMPLER = "sampler"
"""The part whose state is JSON, and goes into the manifest."""
SHARDED = ".metadata"
"""The file by which a checkpoint of torch.distributed.checkpoint is known."""
FULL = {errno.ENOSPC, errno.EDQUOT}


class StorageSilentError(DeepLinkError):
    """The folder of checkpoints did not answer, so what to go on from is not known."""

    def __init__(self, folder: Path, waited_s: float) -> None:
        super().__init__(
            f"{folder} did not answer for {waited_s:g} s",
            remedy="Is its storage in order (`ls` it on this node)? Start again when it answers.",
        )
        self.folder, self.waited_s = folder, waited_s


class StorageUnreadableError(DeepLinkError):
    """The storage of checkpoints gave errors for so long that what to go on from is not known."""

    def __init__(self, folder: Path, problem: OSError, tried_s: float) -> None:
        super().__init__(
            f"checkpoints in {folder} cannot be read: {problem} (tried for {tried_s:g} s)",
            remedy="Nothing was removed, and no checkpoint is known to be damaged. Is the storage in order on this"
            " node, and may you read it (an expired ticket)? Start again when it is. To go on without a checkpoint"
            " that stays unreadable, move it out of the folder.",
        )
        self.folder, self.problem, self.tried_s = folder, problem, tried_s


class FolderGoneError(DeepLinkError, OSError):
    """A folder that this process has claimed, or its claims, is not there any more."""

    def __init__(self, gone: Path, folder: Path) -> None:
        super().__init__(
            f"{gone} is not there any more",
            remedy=f"Is its storage mounted on this node? If {folder} was moved away, bring it back. If only"
            " its claims were removed, start the job again: it claims the folder again. Never remove `claims`:"
            " without them an older attempt cannot be told from a newer one.",
        )
        self.gone, self.folder = gone, folder


class NothingWholeError(DeepLinkError):
    """There are checkpoints, and none of them is whole."""

    def __init__(self, folder: Path, found: Iterable[tuple[str, str]]) -> None:
        self.folder, self.found = folder, tuple(found)
        named = "; ".join(f"{name}: {reason}" for name, reason in self.found[:5])
        more = f"; and {len(self.found) - 5} more" if len(self.found) > 5 else ""  # noqa: PLR2004
        super().__init__(
            f"nothing in {folder} is whole: {named}{more}",
            remedy="Nothing was removed. Bring one back (a backup, another node's disk), or begin at zero:"
            " Checkpoints(..., from_scratch=True) keeps what is there as .damaged-*.",
        )


class NotFiniteError(DeepLinkError):
    """A state holds NaN or infinity, and was not saved."""

    def __init__(self, step: int, tensors: Mapping[str, str]) -> None:
        named = ", ".join(f"{name} ({kind})" for name, kind in list(tensors.items())[:5])
        more = f" and {len(tensors) - 5} more" if len(tensors) > 5 else ""  # noqa: PLR2004
        super().__init__(
            f"step {step} is not saved: {named}{more}",
            remedy='Go back to the last checkpoint; finite="note" saves such a state and names its tensors.',
        )
        self.step, self.tensors = step, dict(tensors)


class UnreadableStateError(DeepLinkError):
    """A state holds a value that could be written, but not read again without executing what the file says."""

    def __init__(self, name: str, kind: type) -> None:
        super().__init__(
            f"{name} of the state is a {kind.__module__}.{kind.__qualname__}, which could not be loaded again",
            remedy="Give a number, text or tensor instead (float(x), torch.from_numpy(x)), or JSON in meta=."
            " A class that torch may read: torch.serialization.add_safe_globals.",
        )
        self.name, self.kind = name, kind


class ShardedStateError(DeepLinkError):
    """A state of which each rank has a part would be saved as if one had it all."""

    def __init__(self, name: str, spread: str, *, by: str = "") -> None:
        super().__init__(
            f"spread={spread!r} cannot save {name!r}: each rank has a part of its tensors" + (by and f" ({by})"),
            remedy=f"{by} is not supported: use torch's fully_shard, or its own files within `checkpoints.save`."
            if by
            else 'Every rank saves with spread="sharded"; `over` does so by itself.',
        )
        self.name, self.spread, self.by = name, spread, by


class NoModelError(DeepLinkError):
    """An optimizer is saved or loaded without the model whose parameters it has."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name!r} has parameters of no model among the parts",
            remedy="Name its model, too; make the optimizer after fully_shard or .to(), which replace parameters.",
        )
        self.name = name


class UnmatchedStatesError(DeepLinkError):
    """The states of ranks that save together are not parts of one state."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"the ranks' states do not make a whole: {problem}",
            remedy="Every rank saves the same parts, of the same model.",
        )
        self.problem = problem


class NoStateError(DeepLinkError):
    """A checkpoint does not hold what is asked of it."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"checkpoint {path}: {what}", remedy="Load it the way it was saved.")
        self.path, self.what = path, what


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
        nonfinite: tensors that hold NaN or infinity: name and `nan` or `inf`.
        world: the ranks that saved it together.
        origin: where it was found: this node's disk, the shared folder, another node's disk or copy; for people.
        parts: finds its files where they are spread over nodes; None where `path` has them all.
    """

    path: Path
    step: int
    attempt: Attempt | None
    meta: dict[str, Any]
    skipped: tuple[Skipped, ...] = ()
    nonfinite: Mapping[str, str]
    world: int = 1
    origin: str = ""
    parts: ScatteredFiles | None = None

    def _file(self, name: str) -> Path | None:
        """Return where one of its files lies, None if it has none of that name."""
        if self.parts is None:
            return self.path / name if is_there(self.path / name) else None
        return self.parts.find(name) if name in self.parts.names() else None

    def _state_file(self, rank: int) -> Path | None:
        return self._file(STATE) or self._file(EACH.format(rank))

    def load(self, *, rank: int = 0, map_location: Any = "cpu") -> Any:
        """Return the state that `save_state` was given, by name; of spread="each" that of `rank`.

        Raises:
            NoStateError: it was saved another way, or not by so many ranks.
            OSError: it cannot be read.
        """
        from deeplink.checkpoints import tensors  # noqa: PLC0415 - torch, only where states are loaded

        if (file := self._state_file(rank)) is not None:
            return tensors.read_state(file, map_location)
        if self._file(SHARDED) is not None:
            raise NoStateError(self.path, "it is sharded: `restore(model=..., ...)` loads it into its parts")
        raise NoStateError(self.path, f"there is no {STATE}, and no {EACH.format(rank)}")

    def restore(self, *, rank: int = 0, random: bool = True, map_location: Any = "cpu", **parts: Any) -> None:
        """Hand each part its state, by the names they were saved under, and set this rank's random numbers.

        Of a sharded checkpoint every rank must call it, at any number of ranks. DistributedDataParallel and
        torch.compile may be around a model, or not, here and where it was saved. Random numbers are set where this
        rank saved theirs, and left alone otherwise.

        Args:
            rank: this rank, where it matters.
            random: set the generators of random numbers.
            map_location: as torch.load has it.
            parts: what has `load_state_dict`; `sampler`, and what was saved as no part, is looked for in `meta`.

        Raises:
            NoStateError: it was saved another way, or a part has not what was saved of it.
            NoModelError: of a sharded checkpoint, an optimizer without its model.
            CheckpointError: a part has tensors on the meta device.
            KeyError, TypeError: a part has no state there, or takes none; nothing was handed out.
        """
        from deeplink.checkpoints import tensors  # noqa: PLC0415

        # What `save` was told besides may have a part's name, too ("model": "resnet50"): what was saved counts.
        rest = {name: part for name, part in parts.items() if name != SAMPLER or name not in self.meta}
        tensors.refuse_meta(rest)
        states = self.meta
        if rest and self._file(SHARDED) is not None:
            from deeplink.checkpoints import sharded  # noqa: PLC0415 - takes seconds, and only here

            find = None if self.parts is None else self.parts.find
            handed = sharded.restore(rest, self.path, find, otherwise=self.meta)
            parts = {name: part for name, part in parts.items() if name not in handed}
        elif rest.keys() - self.meta.keys() or (rest and self._state_file(rank)):
            if sharded_parts := [name for name, part in rest.items() if tensors.holds_shards(part)]:
                raise NoStateError(self.path, f"it is not sharded, and {', '.join(sharded_parts)} is")
            states = {**self.meta, **self.load(rank=rank, map_location=map_location)}
        tensors.put_back(parts, states)
        numbers = self._file(RANDOM.format(rank)) if random else None
        if numbers is not None:
            tensors.put_back_random_state(tensors.read_state(numbers))


def newest_whole(
    folders: Sequence[Path],
    claim: Claim,
    skipped: list[Skipped],
    *,
    agreed: Claim | None,
    read: Callable[[int], None] = lambda _size: None,
) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint that counts under `claim` and is whole, and what it says of itself."""
    own = sorted({entry for folder in folders for entry in entries(folder) if entry.is_own(claim)}, reverse=True)
    if not own and claim.recognised and agreed is not None:
        return _agreed(folders, claim.recognised[0], read)
    passed: list[Skipped] = []
    names = [*(entry.name for entry in own), *claim.recognised]
    found = next(filter(None, (_whole_of(name, folders, passed, read) for name in names)), None)
    skipped.extend(passed)
    return found


def _whole_of(
    name: str, folders: Sequence[Path], passed: list[Skipped], read: Callable[[int], None]
) -> tuple[Path, Manifest] | None:
    unread: OSError | None = None
    is_anywhere = False
    for path in (folder / name for folder in folders):
        try:
            if manifests.is_there(path):
                is_anywhere = True
                return path, manifests.check(path, contents=True, read=read)
        except CheckpointDamagedError as problem:
            passed.append(Skipped(path, problem.reason))
        except OSError as problem:
            unread = problem
    if unread is not None:
        raise unread
    if not is_anywhere:
        passed.append(Skipped(folders[-1] / name, "it is not there any more"))
    return None


def _agreed(folders: Sequence[Path], name: str, read: Callable[[int], None]) -> tuple[Path, Manifest]:
    """Return the checkpoint that the rank that claimed has verified: all ranks go on from it, or none does."""
    path = folders[-1] / name
    manifest = manifests.check(path, contents=False)
    for folder in folders[:-1]:
        try:
            if not manifests.is_there(folder / name):
                continue
            if manifests.check(folder / name, contents=True, read=read) == manifest:
                return folder / name, manifest
        except (CheckpointDamagedError, OSError) as problem:
            log.warning("this node's %s: %s", name, problem)
    return path, manifest
