"""Fetches to this node the checkpoint that the ranks agreed on: from here, the shared folder or other nodes."""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.agents import NotFetchedError, choose, place
from deeplink.checkpoints.claims import entries, is_fenced
from deeplink.checkpoints.found import EACH, STATE, Checkpoint, Skipped, newest_whole
from deeplink.checkpoints.manifest import NAME, CheckpointDamagedError, Manifest
from deeplink.checkpoints.recovery_agreement import SHARED
from deeplink.checkpoints.saving import replaced
from deeplink.core.private import private_folder
from deeplink.core.publish import DRAFT_PREFIX, published_folder
from deeplink.core.types import Attempt
from deeplink.rpc.plain import PlainCallError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from deeplink.checkpoints.agents import JobAgents, There
    from deeplink.checkpoints.claims import Claim
    from deeplink.checkpoints.manifest import FileEntry
    from deeplink.checkpoints.ownership import FolderOwnership
    from deeplink.checkpoints.saving import Saver
    from deeplink.core.clock import Clock

log = logging.getLogger(__name__)

HERE: Final = "this node's disk"
COMES_S: Final = 1800.0
"""How long a rank waits for the first one on its node to have brought a checkpoint."""
_TRIES = 3
_PAUSE_S = 0.2


def _checkpoint(path: Path, manifest: Manifest, origin: str, parts: ScatteredFiles | None = None) -> Checkpoint:
    return Checkpoint(
        path=path,
        step=manifest.step,
        attempt=Attempt.parse(manifest.attempt) if manifest.attempt else None,
        meta=manifest.meta,
        nonfinite=manifest.nonfinite,
        world=manifest.world,
        origin=origin,
        parts=parts,
    )


class NodeRestore:
    """Finds the newest whole checkpoint of a run for this node, and fetches it."""

    def __init__(
        self, hold: FolderOwnership, local: Path, agents: JobAgents, clock: Clock, *, is_first_here: bool
    ) -> None:
        self._hold, self._local, self._agents, self._clock = hold, local, agents, clock
        self._is_first_here = is_first_here

    def newest(self, claim: Claim, skipped: list[Skipped]) -> Checkpoint | None:
        """Return the newest whole checkpoint that counts, if any; add to `skipped` what is passed over."""
        folders = [self._local]
        shared: list[str] = []
        try:
            shared = [entry.name for entry in self._hold.shared.ask(lambda: entries(self._hold.folder))]
            folders.append(self._hold.folder)
        except OSError as problem:
            log.warning("%s: %s", SHARED, problem)
        there = self._hold.retried(lambda: [entry for folder in folders for entry in entries(folder)])
        own = [entry for entry in there if entry.is_own(claim)]
        if own and not any(manifests.is_there(self._local / entry.name / manifests.PART) for entry in own):
            found = self._hold.patiently(
                lambda: newest_whole(folders, claim, skipped, agreed=None, read=self._hold.stir)
            )
            return found and _checkpoint(*found, HERE if found[0].parent == self._local else SHARED)
        names = [*dict.fromkeys(entry.name for entry in sorted(own, reverse=True)), *claim.recognised[:1]]
        for name in names:
            try:
                return self._brought(name, is_shared=name in shared)
            except NotFetchedError as lost:
                if name in claim.recognised:
                    raise
                skipped.append(Skipped(self._local / name, lost.why))
        return None

    def _brought(self, name: str, *, is_shared: bool) -> Checkpoint:
        here, problem = self._here(name)
        if here is not None:
            return _checkpoint(here, manifests.read_manifest(here), HERE)
        path, is_refused = self._hold.folder / name, False
        if is_shared:
            try:
                return self._of_shared(path)
            except CheckpointDamagedError as damaged:
                log.warning("%s: %s", SHARED, damaged)
            except OSError as failed:
                log.warning("%s: %s", SHARED, failed)
                problem, is_refused = str(failed), True
        if not self._is_first_here:
            return self._awaited(name, path if is_refused else None)
        try:
            return self._fetched(name, problem)
        except NotFetchedError:
            if not is_refused:
                raise
        return self._of_both(path, self._hold.patiently(lambda: manifests.check(path, contents=False)))

    def _of_shared(self, path: Path) -> Checkpoint:
        return self._of_both(path, self._hold.shared.ask(lambda: manifests.check(path, contents=False)))

    def _of_both(self, shared: Path, manifest: Manifest) -> Checkpoint:
        """Read what is of the shared folder from this node's disk where that has some of it."""
        here = self._local / shared.name
        with suppress(CheckpointDamagedError, OSError):
            if manifests.check_part(here, contents=True) == manifest:
                parts = ScatteredFiles(here, manifest, self._agents, others=shared)
                return _checkpoint(here, manifest, f"{HERE} and {SHARED}", parts)
        return _checkpoint(shared, manifest, SHARED)

    def _here(self, name: str) -> tuple[Path | None, str]:
        path = self._local / name
        try:
            if not manifests.is_there(path):
                return None, "it is not on this node's disk"
            manifests.check(path, contents=True)
        except CheckpointDamagedError as damaged:
            if not manifests.is_there(path / manifests.PART):
                log.warning("this node's %s", damaged)
            return None, damaged.reason
        except OSError as problem:
            log.warning("this node's %s: %s", name, problem)
            return None, str(problem)
        return path, ""

    def _awaited(self, name: str, shared: Path | None) -> Checkpoint:
        """Return what the first rank fetches, or `shared`, which gave an error, once it does not any more."""
        until = self._clock.monotonic() + COMES_S
        path, why = self._local / name, ""
        while self._clock.monotonic() < until:
            try:
                manifest = manifests.check_part(path, contents=False)
                is_part = manifests.is_there(path / manifests.PART)
                parts = ScatteredFiles(path, manifest, self._agents) if is_part else None
                return _checkpoint(path, manifest, HERE, parts)
            except (CheckpointDamagedError, OSError) as problem:
                why = str(problem)
            if shared is not None:
                with suppress(CheckpointDamagedError, OSError):
                    return self._of_shared(shared)
            self._clock.sleep(_PAUSE_S)
        raise NotFetchedError(name, f"this node's first rank did not bring it within {COMES_S:g} s: {why}")

    def _fetched(self, name: str, first: str) -> Checkpoint:
        why = first
        for attempt in range(_TRIES):
            if attempt:
                self._clock.sleep(_PAUSE_S)
            places = self._agents.places(name)
            if not places:
                why = f"{first}, and it is on no node that answers"
                continue
            manifest = places[0].manifest
            plan = choose(name, manifest.files, places)
            if plan is None:
                why = f"{first}, and parts of it are on no node that answers"
                continue
            try:
                return self._put(name, manifest, places[0].text, plan)
            except (PlainCallError, CheckpointDamagedError, NotFetchedError, OSError) as problem:
                why = str(problem)
                log.warning("%s: %s", name, problem)
        raise NotFetchedError(name, why)

    def _put(
        self, name: str, manifest: Manifest, text: str, plan: Sequence[tuple[There, list[FileEntry]]]
    ) -> Checkpoint:
        """Write a checkpoint into this node's folder; of one in parts, ranks will fetch what they need."""
        final = self._local / name
        is_parted = is_of_parts(manifest)
        if _manifest_at(final) == manifest:
            # What is here stays where it is: other nodes may be fetching it.
            parts = ScatteredFiles(final, manifest, self._agents)
            if is_parted:
                return _checkpoint(final, manifest, HERE, parts)
            for path in parts.names():
                parts.find(path)
            (final / manifests.PART).unlink(missing_ok=True)
            return _checkpoint(final, manifest, f"{HERE} and other nodes")
        private_folder(self._local)
        with published_folder(final, check=lambda: replaced(final, lambda: None)) as draft:
            if is_parted:
                manifests.write_part(draft, [])
            else:
                for there, files in plan:
                    self._agents.fetch(there, files, draft)
            (draft / NAME).write_text(text, encoding="utf-8")
        origin = ", ".join(place(there.node, there.origin) for there, _ in plan)
        log.warning("%s comes from %s", name, origin)
        return _checkpoint(
            final, manifest, origin, ScatteredFiles(final, manifest, self._agents) if is_parted else None
        )


def _manifest_at(path: Path) -> Manifest | None:
    try:
        return manifests.read_manifest(path)
    except CheckpointDamagedError:
        return None


def is_of_parts(manifest: Manifest) -> bool:
    """Tell whether ranks read different files of a checkpoint: then no node need have them all."""
    names = {entry.path for entry in manifest.files}
    return STATE not in names and (EACH.format(0) in names or ".metadata" in names)


class ScatteredFiles:
    """The files of a checkpoint that is spread over nodes, found one by one. Not thread-safe."""

    def __init__(self, folder: Path, manifest: Manifest, agents: JobAgents, *, others: Path | None = None) -> None:
        self._folder, self._manifest, self._agents, self._others = folder, manifest, agents, others
        self._places: list[There] | None = None
        self._checked: set[str] = set()

    def names(self) -> list[str]:
        """Return the paths of all files."""
        return [entry.path for entry in self._manifest.files]

    def find(self, path: str) -> Path:
        """Return where a file of the checkpoint lies on this node's disk; fetches it if need be."""
        entry = next((one for one in self._manifest.files if one.path == path), None)
        if entry is None:
            raise FileNotFoundError(path)
        if path in self._checked:
            return self._folder / path
        try:
            manifests.check_files(self._folder, [entry], contents=True)
        except (CheckpointDamagedError, OSError) as problem:
            if not self._copied(entry):
                self._fetch(entry, str(problem))
        self._checked.add(path)
        return self._folder / path

    def _copied(self, entry: FileEntry) -> bool:
        if self._others is None:
            return False
        draft = self._folder / f"{DRAFT_PREFIX}{os.urandom(6).hex()}"
        try:
            shutil.copyfile(self._others / entry.path, draft)
            if manifests.checksum(draft) != entry.xxh3_64:
                return False
            (self._folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
            draft.replace(self._folder / entry.path)
        except OSError as problem:
            log.warning("%s of %s: %s", entry.path, self._folder.name, problem)
            return False
        finally:
            draft.unlink(missing_ok=True)
        return True

    def _fetch(self, entry: FileEntry, why: str) -> None:
        name = self._folder.name
        if self._places is None:
            self._places = self._agents.places(name)
        for there in self._places:
            if entry.path in there.absent or there.manifest != self._manifest:
                continue
            draft = self._folder / f"{DRAFT_PREFIX}{os.urandom(6).hex()}"
            try:
                self._agents.fetch(there, [entry], draft)
                (self._folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
                (draft / entry.path).replace(self._folder / entry.path)
            except (PlainCallError, CheckpointDamagedError, OSError) as problem:
                why = str(problem)
                log.warning("%s of %s: %s", entry.path, name, problem)
            else:
                log.info("%s of %s comes from %s", entry.path, name, place(there.node, there.origin))
                return
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        raise NotFetchedError(f"{name}/{entry.path}", why)


class Finder:
    """Finds the newest whole checkpoint of a folder for one process."""

    def __init__(
        self,
        hold: FolderOwnership,
        saver: Saver,
        local: Path | None,
        restore: NodeRestore | None,
        *,
        readonly: bool,
    ) -> None:
        self._hold, self._saver, self._local, self._restore = hold, saver, local, restore
        self._readonly = readonly
        self.skipped: tuple[Skipped, ...] = ()

    def newest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, None where there is nothing; see `Checkpoints.latest`."""
        claim = self._claim()
        skipped = [Skipped(self._hold.folder / name, reason) for name, reason in claim.skipped]
        chosen = self._chosen(claim, skipped)
        self._say(skipped)
        self._hold.suspected |= {item.path for item in skipped if not is_fenced(item.reason)}
        self._hold.refuse_if_nothing_is_whole(
            [chosen.path.name] if chosen else [], [(item.path.name, item.reason) for item in skipped]
        )
        self._hold.looked(claim, chosen.path.name if chosen else None)
        return chosen and replace(chosen, skipped=self.skipped)

    def _claim(self) -> Claim:
        """Return the claim under which checkpoints count for this process; a training one claims."""
        hold = self._hold
        if hold.attempt is None or self._readonly:
            return hold.claim or hold.patiently(hold.claims.newest)
        if self._local is None and (running := hold.patiently(hold.running_other)):  # who gives local= trains
            return running
        claim = hold.claimed()
        hold.patiently(self._saver.check)
        return claim

    def _chosen(self, claim: Claim, skipped: list[Skipped]) -> Checkpoint | None:
        hold = self._hold
        if self._restore is not None and hold.agents is not None and hold.claim is not None:
            return self._restore.newest(claim, skipped)
        folders = [*filter(None, [self._local]), hold.folder]
        found = hold.patiently(lambda: newest_whole(folders, claim, skipped, agreed=hold.claim, read=hold.stir))
        return found and _checkpoint(*found, HERE if found[0].parent == self._local else SHARED)

    def _say(self, skipped: Iterable[Skipped]) -> None:
        for item in skipped:
            if item not in self.skipped:
                log.warning("checkpoint %s skipped: %s", item.path, item.reason)
        self.skipped = tuple(skipped)
