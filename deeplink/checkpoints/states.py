"""Saving states beside the training loop: the loop waits for the copy to memory, a thread does the rest."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints import messages
from deeplink.checkpoints.background import Background
from deeplink.checkpoints.found import EACH, RANDOM, STATE, FolderGoneError, NotFiniteError
from deeplink.checkpoints.manifest import CheckpointWriteError
from deeplink.checkpoints.multirank_save import (
    PATIENCE_S,
    Exchange,
    RankFailedError,
    SaveGroup,
    collect_parts,
    finish_part,
)
from deeplink.checkpoints.rendezvous import Board
from deeplink.checkpoints.saving import Saver, withdraw
from deeplink.publish import DRAFT_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from deeplink.checkpoints.agents import JobAgents
    from deeplink.checkpoints.saving import Save
    from deeplink.checkpoints.tensors import HostCopy
    from deeplink.clock import Clock

log = logging.getLogger(__name__)

Finite: TypeAlias = Literal["note", "refuse", "off"]
Waiting: TypeAlias = Literal["wait", "skip"]
Spread: TypeAlias = Literal["alone", "first", "each", "sharded"]
SAMPLER = "sampler"
"""The part whose state is JSON, and goes into the manifest."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a save is to write: copies that nobody changes.

    Attributes:
        state: this rank's; None where it has none to write.
        numbers: the states of its random numbers; None where they are not wanted.
        is_sharded: whether the ranks' states are parts of the same tensors.
        file: what its own file is called.
    """

    state: Any
    numbers: Any
    is_sharded: bool
    file: str


@dataclass(slots=True)
class StateSaver:
    """Saves states in the background, one at a time.

    Attributes:
        saver: puts a checkpoint of one process where it belongs.
        finite: what to do about NaN and infinity.
        waiting: what to do while a save is under way.
        published: called in the background with each save that succeeded on this rank.
        kept: called in the background, on the first rank of each other node, with the name of a save that several
            ranks made on their nodes' disks, and whether it is to go to the shared folder.
        has_time: whether such a save can go to the shared folder now; asked on rank 0.
        is_first_here: whether this rank is the first on its node.
        group: the ranks that save together; found when first needed.
        session: unique to their processes, and the same on all.
        patience_s: how long ranks wait for each other's parts.
    """

    saver: Saver
    clock: Clock
    finite: Finite
    waiting: Waiting
    published: Callable[[Save], None]
    kept: Callable[[str, bool], None] = lambda _name, _goes_on: None
    has_time: Callable[[], bool] = lambda: True
    is_first_here: bool = True
    group: SaveGroup | None = None
    session: str = ""
    patience_s: float = PATIENCE_S
    _copy: HostCopy | None = None
    _count: int = 0
    _background: Background = field(default_factory=lambda: Background("saving a checkpoint"))

    def __post_init__(self) -> None:
        if self.finite not in get_args(Finite) or self.waiting not in get_args(Waiting):
            raise ValueError(f"finite={self.finite!r}, waiting={self.waiting!r}")

    def save(self, parts: Mapping[str, Any], save: Save, *, spread: Spread, random: bool) -> bool:
        """Copy the parts' states and begin to save them; False if it is skipped.

        Raises:
            DeepLinkError: the save before failed so.
            MetaError: the sampler's state is not JSON.
            ValueError: there is no such spread, or ranks might skip different steps.
        """
        if spread not in get_args(Spread):
            raise ValueError(f"spread={spread!r}")
        if spread != "alone" and self.waiting == "skip":
            raise ValueError('waiting="skip" is for spread="alone": ranks would skip different steps')
        if self.waiting == "skip" and self._background.is_busy:
            log.info("step %d is not saved: the save before is under way", save.step)
            return False
        self._background.wait()
        group = self._met(spread)
        written = self._copied(parts, save, group, spread=spread, random=random)
        save.stall_s, save.world = self.clock.monotonic() - save.began, group.world
        if spread == "alone" or (group.world == 1 and not written.is_sharded):
            self._start(lambda: self._alone(written, save, group))
        else:
            self._count += 1
            count = self._count
            self._start(lambda: self._together(written, save, group, count))
        return True

    def adopt(self, folder: Path, save: Save) -> None:
        """Take in a folder's files; see `Checkpoints.adopt`."""
        self._background.wait()
        staged = folder.with_name(f"{DRAFT_PREFIX}{folder.name}-{os.getpid()}")
        shutil.rmtree(staged, ignore_errors=True)
        shutil.copytree(folder, staged, copy_function=_linked)
        save.stall_s = self.clock.monotonic() - save.began
        self._start(lambda: self._adopted(staged, save))

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._background.is_busy

    def wait(self) -> None:
        """Return once nothing is under way; raises what failed."""
        self._background.wait()

    def raise_failure(self) -> None:
        """Raise what failed since the last time; waits for nothing."""
        self._background.raise_failure()

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
    ) -> Written:
        from deeplink.checkpoints import tensors  # noqa: PLC0415

        self._copy = self._copy or tensors.HostCopy()
        tensors.check_spread(parts, spread)
        numbers = tensors.random_state() if random else None
        has_state = spread != "first" or group.rank == 0
        states = _states_of(parts, spread) if has_state else {}
        if SAMPLER in states:
            save.meta = {**save.meta, **manifests.checked_meta({SAMPLER: states.pop(SAMPLER)})}
        if spread == "sharded":
            return Written(self._copy.take_sharded(states), numbers, is_sharded=True, file="")
        tensors.check_spread(states, spread)
        copied = self._copy.take(states) if has_state else None
        return Written(
            copied, numbers, is_sharded=False, file=EACH.format(group.rank) if spread == "each" else STATE
        )

    # -- in the background

    def _start(self, work: Callable[[], None]) -> None:
        def told() -> None:
            try:
                work()
            except FolderGoneError:
                raise
            except OSError as problem:
                raise CheckpointWriteError(self.saver.folder, problem) from problem

        self._background.start(told)

    def _checked(self, written: Written, save: Save) -> dict[str, str]:
        from deeplink.checkpoints import tensors  # noqa: PLC0415

        found = {} if self.finite == "off" else tensors.nonfinite(written.state)
        if found and self.finite == "refuse":
            raise NotFiniteError(save.step, found)
        if found:
            named = ", ".join(f"{name} ({kind})" for name, kind in list(found.items())[:5])
            log.warning("step %d: not finite: %s", save.step, named)
        return found

    def _files(self, written: Written, save: Save, draft: Path, group: SaveGroup) -> list[Path]:
        from deeplink.checkpoints import tensors  # noqa: PLC0415

        files = []
        if written.state is not None and not save.any_object:
            tensors.refuse_unreadable(written.state)
        if written.state is not None and not written.is_sharded:
            files.append(draft / written.file)
            tensors.write_state(written.state, files[-1])
        if written.numbers is not None:
            files.append(draft / RANDOM.format(group.rank))
            tensors.write_state(written.numbers, files[-1])
        return files

    def _alone(self, written: Written, save: Save, group: SaveGroup) -> None:
        save.nonfinite = self._checked(written, save)
        with self.saver.saving(save) as draft:
            self._files(written, save, draft, group)
        self.published(save)

    def _together(self, written: Written, save: Save, group: SaveGroup, count: int) -> None:
        hold = self.saver.hold
        if self.saver.folder != hold.folder and hold.agents is not None:
            self._together_here(written, save, group, count, hold.agents)
        else:  # straight to the shared folder: without agents the ranks have nowhere else to meet
            self._together_there(written, save, group, count)

    def _together_there(self, written: Written, save: Save, group: SaveGroup, count: int) -> None:
        shared = Saver(self.saver.hold, self.saver.hold.folder, self.clock)
        shared.check()
        draft = self._draft(shared, save, count)
        exchange = Exchange(draft, group, self.clock, shared.check, self.patience_s)
        if group.rank == 0:
            self._clear_before(draft)
        with exchange:
            self._write_part(written, save, exchange)
            if group.rank == 0:
                self._note_nonfinite(save, exchange)
                shared.together(save, exchange, lambda: collect_parts(exchange))
                self.published(save)

    def _together_here(
        self, written: Written, save: Save, group: SaveGroup, count: int, agents: JobAgents
    ) -> None:
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
        board = Board(draft, group, self.clock, here.check, self.patience_s, agents=agents, name=name)
        if self.is_first_here:
            self._clear_before(draft)
        with board:
            self._write_part(written, save, board)
            if group.rank == 0:
                self._note_nonfinite(save, board)
                plan = here.planned(save, messages.all_files(board.gather("done")))
                board.put("manifest", messages.publication_message(*plan))
            name, text = messages.publication(board.take("manifest", of=0))
            final = here.folder / name
            if self.is_first_here:
                here.publish_part(draft, final, text)
            if group.rank == 0:
                self._gather_published(board, final)
        goes_on = self._heard_whole(board, final)
        if group.rank == 0:
            save.path, save.to_shared = final, goes_on
            self.published(save)
        elif self.is_first_here:
            self.kept(name, goes_on)

    def _gather_published(self, board: Board, final: Path) -> None:
        try:
            board.put("published", b"")
            board.gather("published")
        except BaseException:
            withdraw(final)
            raise

    def _heard_whole(self, board: Board, final: Path) -> bool:
        """Return whether the checkpoint, whole now, goes to the shared folder; rank 0 says so.

        No rank says any more that it failed: the others would take their parts back.
        """
        if board.group.rank == 0:
            goes_on = self.has_time()
            board.put("whole", b"1" if goes_on else b"")
            return goes_on
        board.put("published", b"")
        try:
            return bool(board.take("whole", of=0))
        except RankFailedError:
            if self.is_first_here:
                withdraw(final)
            raise

    def _draft(self, saver: Saver, save: Save, count: int) -> Path:
        name = f"step-{save.step:010d}.a{saver.hold.claimed().number}"
        return saver.folder / f"{DRAFT_PREFIX}{name}-{self.session[:12]}{count:06x}"

    def _write_part(self, written: Written, save: Save, exchange: Exchange) -> None:

        exchange.put("nonfinite", messages.nonfinite_message(self._checked(written, save)))
        files = self._files(written, save, exchange.draft, exchange.group)
        if written.is_sharded:
            from deeplink.checkpoints import sharded  # noqa: PLC0415

            files += sharded.write(written.state, exchange)
        finish_part(exchange, files)

    @staticmethod
    def _note_nonfinite(save: Save, exchange: Exchange) -> None:
        save.nonfinite |= messages.all_nonfinite(exchange.gather("nonfinite"))

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


def _states_of(parts: Mapping[str, Any], spread: Spread) -> dict[str, Any]:
    from deeplink.checkpoints import tensors  # noqa: PLC0415

    if spread != "sharded":
        return tensors.states_of(parts)
    from deeplink.checkpoints import sharded  # noqa: PLC0415 - takes seconds, and only here

    return sharded.states_of(parts)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
