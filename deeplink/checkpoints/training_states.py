"""Saving states beside the training loop: the loop waits for the copy to memory, a thread does the rest."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.background import Background
from deeplink.checkpoints.found import EACH, RANDOM, SAMPLER, STATE, FolderGoneError, NotFiniteError
from deeplink.checkpoints.manifest import CheckpointWriteError
from deeplink.checkpoints.multirank_save import (
    PATIENCE_S,
    Board,
    Exchange,
    SaveAbandonedError,
    SaveGroup,
    all_files,
    all_nonfinite,
    finish_part,
    publication,
)
from deeplink.checkpoints.saving import Saver, withdraw
from deeplink.core.publish import DRAFT_PREFIX
from deeplink.v1 import saving_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from deeplink.checkpoints.agents import JobAgents
    from deeplink.checkpoints.mirror import Mirror
    from deeplink.checkpoints.saving import Save
    from deeplink.checkpoints.tensors import HostCopy
    from deeplink.core.clock import Clock

log = logging.getLogger(__name__)

Finite: TypeAlias = Literal["note", "refuse", "off"]
Waiting: TypeAlias = Literal["wait", "skip"]
Spread: TypeAlias = Literal["alone", "first", "each", "sharded"]


@dataclass(frozen=True, slots=True)
class Copied:
    """Copies of all that a save is to write; nothing changes them."""

    state: Any  # this rank's; None where it has none to write
    numbers: Any  # the states of its random numbers; None where they are not wanted
    file: str  # of this rank's state; empty where the ranks' states are parts of the same tensors


@dataclass(slots=True)
class StateSaver:
    """Saves states in the background, one at a time."""

    saver: Saver
    clock: Clock
    finite: Finite
    waiting: Waiting
    published: Callable[[Save], None]  # called with each save that succeeded on this rank
    mirror: Mirror | None = None  # of this node's disk, where saves go there first
    is_first_here: bool = True  # whether this rank is the first on its node
    group: SaveGroup | None = None  # found when first needed
    session: str = ""  # unique to the processes that save together, and the same on all
    patience_s: float = PATIENCE_S
    background: Background = field(default_factory=lambda: Background("saving a checkpoint"))
    _copy: HostCopy | None = None
    _count: int = 0

    def __post_init__(self) -> None:
        if self.finite not in get_args(Finite) or self.waiting not in get_args(Waiting):
            raise ValueError(f"finite={self.finite!r}, waiting={self.waiting!r}")

    def save(self, parts: Mapping[str, Any], save: Save, *, spread: Spread, random: bool) -> bool:
        """Copy the parts' states and begin to save them; False if it is skipped."""
        if spread not in get_args(Spread):
            raise ValueError(f"spread={spread!r}")
        if spread != "alone" and self.waiting == "skip":
            raise ValueError('waiting="skip" is for spread="alone": ranks would skip different steps')
        if self.waiting == "skip" and self.background.is_busy:
            log.info("step %d is not saved: the save before is under way", save.step)
            return False
        self.background.wait()
        group = self._met(spread)
        copied = self._copied(parts, save, group, spread=spread, random=random)
        save.stall_s, save.world = self.clock.monotonic() - save.began, group.world
        if spread == "alone" or (group.world == 1 and copied.file):
            self._start(lambda: self._alone(copied, save, group))
            return True
        self._count += 1
        count, hold = self._count, self.saver.hold
        if self.saver.folder == hold.folder or hold.agents is None:
            # Straight to the shared folder: without agents the ranks have nowhere else to meet.
            self._start(lambda: self._together_there(copied, save, group, count))
        else:
            agents = hold.agents
            self._start(lambda: self._together_here(copied, save, group, count, agents))
        return True

    def adopt(self, folder: Path, save: Save) -> None:
        """Take in a folder's files; see `Checkpoints.adopt`."""
        self.background.wait()
        staged = folder.with_name(f"{DRAFT_PREFIX}{folder.name}-{os.getpid()}")
        shutil.rmtree(staged, ignore_errors=True)
        shutil.copytree(folder, staged, copy_function=_linked)
        save.stall_s = self.clock.monotonic() - save.began
        self._start(lambda: self._adopted(staged, save))

    # -- in the training loop

    def _met(self, spread: Spread) -> SaveGroup:
        from deeplink.checkpoints import tensors  # noqa: PLC0415 - torch, when the first state is saved

        if self.group is None:
            self.group = tensors.group()
        if spread != "alone" and not self.session:
            # Outside of a job the ranks have no attempt in common: they hold the folder by rank 0's name.
            self.session = tensors.agreed(self.saver.hold.holder)
            if self.saver.hold.attempt is None:
                self.saver.hold.holder = self.session
        return self.group

    def _copied(
        self, parts: Mapping[str, Any], save: Save, group: SaveGroup, *, spread: Spread, random: bool
    ) -> Copied:
        from deeplink.checkpoints import tensors  # noqa: PLC0415

        self._copy = self._copy or tensors.HostCopy()
        tensors.check_spread(parts, spread)
        numbers = tensors.random_state() if random else None
        if spread == "first" and group.rank:
            return Copied(None, numbers, STATE)
        if spread == "sharded":
            from deeplink.checkpoints import sharded  # noqa: PLC0415 - takes seconds, and only here

            states = sharded.states_of(parts)
        else:
            states = tensors.states_of(parts)
        if SAMPLER in states:
            save.meta = {**save.meta, **manifests.checked_meta({SAMPLER: states.pop(SAMPLER)})}
        if spread == "sharded":
            return Copied(self._copy.take_sharded(states), numbers, "")
        tensors.check_spread(states, spread)
        return Copied(self._copy.take(states), numbers, EACH.format(group.rank) if spread == "each" else STATE)

    # -- in the background

    def _start(self, work: Callable[[], None]) -> None:
        def explained() -> None:
            try:
                work()
            except FolderGoneError:
                raise
            except OSError as problem:
                raise CheckpointWriteError(self.saver.folder, problem) from problem

        self.background.start(explained)

    def _nonfinite(self, copied: Copied, save: Save) -> dict[str, str]:
        from deeplink.checkpoints import tensors  # noqa: PLC0415

        found = {} if self.finite == "off" else tensors.nonfinite(copied.state)
        if found and self.finite == "refuse":
            raise NotFiniteError(save.step, found)
        if found:
            named = ", ".join(f"{name} ({kind})" for name, kind in list(found.items())[:5])
            log.warning("step %d: not finite: %s", save.step, named)
        return found

    @staticmethod
    def _write(copied: Copied, save: Save, draft: Path, group: SaveGroup) -> list[Path]:
        """Write this rank's own files and return them."""
        from deeplink.checkpoints import tensors  # noqa: PLC0415

        files = []
        if copied.state is not None and not save.any_object:
            tensors.refuse_unreadable(copied.state)
        if copied.state is not None and copied.file:
            files.append(draft / copied.file)
            tensors.write_state(copied.state, files[-1])
        if copied.numbers is not None:
            files.append(draft / RANDOM.format(group.rank))
            tensors.write_state(copied.numbers, files[-1])
        return files

    def _alone(self, copied: Copied, save: Save, group: SaveGroup) -> None:
        save.nonfinite = self._nonfinite(copied, save)
        with self.saver.saving(save) as draft:
            self._write(copied, save, draft, group)
        self.published(save)

    def _together_there(self, copied: Copied, save: Save, group: SaveGroup, count: int) -> None:
        shared = Saver(self.saver.hold, self.saver.hold.folder, self.clock)
        shared.check()
        draft = self._draft(shared, save, count)
        if group.rank == 0:
            self._clear_before(draft)
        with Exchange(draft, group, self.clock, shared.check, self.patience_s) as exchange:
            self._write_part(copied, save, exchange)
            if group.rank == 0:
                save.nonfinite |= all_nonfinite(exchange.gather("nonfinite"))
                shared.together(save, exchange)
                self.published(save)

    def _together_here(self, copied: Copied, save: Save, group: SaveGroup, count: int, agents: JobAgents) -> None:
        """Write this rank's files to its node's disk; the nodes publish their parts once all are written.

        The manifest of the whole lies on every node, beside the files that are there. Once a node has told of its
        part, it takes that back only where a rank says that it failed: rank 0 may have called it all whole, and
        this node did not hear it. What then lacks parts is passed over by a restart.
        """
        here = self.saver
        here.check()
        here.make_folder()
        draft = self._draft(here, save, count)
        name = f"{agents.attempt}/{agents.run}/{self.session[:12]}{count:06x}"
        if self.is_first_here:
            self._clear_before(draft)
        with Board(draft, group, self.clock, here.check, self.patience_s, agents=agents, name=name) as board:
            self._write_part(copied, save, board)
            if group.rank == 0:
                save.nonfinite |= all_nonfinite(board.gather("nonfinite"))
                name, text = here.planned(save, all_files(board.gather("done")))
                board.put("manifest", saving_pb2.Publication(name=name, manifest=text).SerializeToString())
            name, text = publication(board.take("manifest", of=0))
            final = here.folder / name
            if self.is_first_here:
                here.publish_part(draft, final, text)
            if group.rank == 0:
                try:
                    board.put("published", b"")
                    board.gather("published")
                except BaseException:
                    withdraw(final)
                    raise
        goes_on = self._learn_whole(board, final)
        if group.rank == 0:
            save.path, save.to_shared = final, goes_on
            self.published(save)
        elif self.is_first_here and self.mirror is not None:
            self.mirror.offer(name, to_shared=goes_on)

    def _learn_whole(self, board: Board, final: Path) -> bool:
        """Return whether the checkpoint, whole now, goes to the shared folder; rank 0 says so.

        No rank says any more that it failed: the others would take their parts back.
        """
        if board.group.rank == 0:
            goes_on = self.mirror is None or self.mirror.has_time()
            board.put("whole", b"1" if goes_on else b"")
            return goes_on
        board.put("published", b"")
        try:
            return bool(board.take("whole", of=0))
        except SaveAbandonedError as abandoned:
            if abandoned.by_rank and self.is_first_here:
                withdraw(final)
            raise

    def _draft(self, saver: Saver, save: Save, count: int) -> Path:
        name = f"step-{save.step:010d}.a{saver.hold.claimed().number}"
        return saver.folder / f"{DRAFT_PREFIX}{name}-{self.session[:12]}{count:06x}"

    def _write_part(self, copied: Copied, save: Save, exchange: Exchange) -> None:
        tensors = saving_pb2.RankNonfinite(tensors=self._nonfinite(copied, save))
        exchange.put("nonfinite", tensors.SerializeToString())
        files = self._write(copied, save, exchange.draft, exchange.group)
        if not copied.file:
            from deeplink.checkpoints import sharded  # noqa: PLC0415

            files += sharded.write(copied.state, exchange)
        finish_part(exchange, files)

    def _clear_before(self, draft: Path) -> None:
        """Remove what a rank left that began a save when rank 0 had given it up."""
        session = self.session[:12]
        for path in draft.parent.glob(f"{DRAFT_PREFIX}step-*-{session}*"):
            if path.name.rpartition(session)[2] < draft.name.rpartition(session)[2]:
                shutil.rmtree(path, ignore_errors=True)

    def _adopted(self, staged: Path, save: Save) -> None:
        try:
            with self.saver.saving(save) as draft:
                shutil.copytree(staged, draft, copy_function=_linked, dirs_exist_ok=True)
            self.published(save)
        finally:
            shutil.rmtree(staged, ignore_errors=True)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
