"""A folder of checkpoints.

step-0000000120.a3      the checkpoint of step 120 by the holder of claim 3; saved once more: step-0000000120.a3-1
claims/                 who holds the folder (deeplink.checkpoints.claims)
.draft-*                unfinished
"""

from __future__ import annotations

import logging
import operator
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.agents import JobAgents
from deeplink.checkpoints.claims import Retention
from deeplink.checkpoints.fencing import LENGTH_S, FencingGuard, guarded, last_resort_of, witnesses_of
from deeplink.checkpoints.found import SAMPLER
from deeplink.checkpoints.interval import RESTART_S, advice_for
from deeplink.checkpoints.manifest import CheckpointError
from deeplink.checkpoints.mirror import FAILED, Mirror, UploadBarrier, bring_together, refuse_failures
from deeplink.checkpoints.multirank_save import SaveGroup
from deeplink.checkpoints.ownership import FolderOwnership
from deeplink.checkpoints.recovery_agreement import RecoveryAgreement, no_agreement
from deeplink.checkpoints.restore import Finder, NodeRestore
from deeplink.checkpoints.saving import Save, Saver, tidy_shared
from deeplink.checkpoints.training_states import Finite, StateSaver, Waiting
from deeplink.core import process_metrics
from deeplink.core.clock import Clock, SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.private import PrivateFolderError, private_folder
from deeplink.core.types import Attempt
from deeplink.training.progress import Section, count_step, should_save
from deeplink.training.step_split import CHECKPOINT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import TracebackType

    from deeplink.checkpoints.claims import Claim
    from deeplink.checkpoints.found import Checkpoint, Skipped
    from deeplink.checkpoints.interval import Advice
    from deeplink.checkpoints.training_states import Spread
    from deeplink.core.clock import Clock

log = logging.getLogger(__name__)

_TAKEN: Final = {"rank", "random", "map_location"}
"""Names that no part in a loop has: `Checkpoint.restore` takes something else by them."""


def refuse_strangers(local: Path | None, *, readonly: bool) -> None:
    """Make the folder on this node's disk, for this user alone: what others put there would be gone on from.

    Where its disk refuses, the nodes agree without it, and a save raises.
    """
    try:
        if local is not None and (not readonly or local.exists()):
            private_folder(local)
    except PrivateFolderError:
        raise
    except OSError as problem:
        log.warning("this node's disk: %s", problem)


def keep_here_first(
    hold: FolderOwnership, local: Path, states: StateSaver, retention: Retention, clock: Clock
) -> tuple[Mirror, NodeRestore | None]:
    """Return the mirror of this node's disk, and the restore from other nodes' disks.

    The latter is there where the job's agents are: through them the nodes agree on what they go on from. Without,
    those of an attempt meet in the shared folder (`UploadBarrier`), others in their process group (`resume`).
    """
    env = os.environ
    agents = JobAgents.of_environment(env, hold.folder, hold.attempt, clock)
    node = SaveGroup(int(env.get("GROUP_RANK") or 0), int(env.get("GROUP_WORLD_SIZE") or 1))
    mirror = Mirror(hold, local, retention, agents, node=node, clock=clock)
    states.is_first_here = env.get("LOCAL_RANK", "0") == "0"
    states.mirror = mirror
    hold.before_claiming = UploadBarrier(hold, local, env, clock).wait
    if agents is None:
        return mirror, None
    agreement = RecoveryAgreement(hold, local, agents, env, clock)
    hold.agents, hold.agreed = agents, agreement.agree
    return mirror, NodeRestore(hold, local, agents, clock, is_first_here=agreement.is_first_here)


class Checkpoints:
    """Saves and finds checkpoints in one folder.

    Nothing is read or written until the first `latest` or save. An attempt of a job then claims the folder, once
    for all its ranks; from there on saves of older attempts are refused, and what they publish all the same is
    ignored. Within one job an older attempt cannot claim after a newer one; between jobs the latest claim wins.
    While ranks of another job are at work on the folder, `latest` only looks, and the first save claims.

    A process outside of a job (no `attempt`, no DEEPLINK_ATTEMPT) is an attempt of its own, which claims when it
    first saves. From within a job, open with `readonly=True` to look at another's.

    Not thread-safe. Every rank may call `latest`: all of an attempt get the same answer before its first save.

    Args:
        folder: made at the first save; shared storage if the job can run elsewhere next time.
        attempt: who saves; DEEPLINK_ATTEMPT of the environment when None.
        keep: whole checkpoints kept; older ones are removed after a save.
        keep_every: checkpoints of steps that are a multiple of it are kept besides; none where it is 0.
        local: a folder on this node's own disk, this user's alone: saves go there, and from there to `folder` in
            the background. Then one rank of each node must call `latest` before the first save; outside of
            `deeplink run` every rank has one, and calls `resume` or `over` within a process group of
            torch.distributed.
        finite: "note" names tensors that hold NaN or infinity in manifest and log, "refuse" saves no such
            state, "off" does not look. Of states that `save_state` is given.
        waiting: what a `save_state` does while the one before is under way: "wait" for it, or "skip" this one.
        lease_s: a rank of a job (DEEPLINK_ATTEMPT) that hears neither of the shared folder nor of another node for
            so long ends itself, and at once when a newer attempt has begun; None: it goes on.
        readonly: claim nothing, refuse to save.
        from_scratch: begin at zero where there are checkpoints and none is whole; they are kept as `.damaged-*`.
        clock: where time comes from.

    Attributes:
        step: steps done since training began, across restarts, as `resume` and `over` count them.

    Raises:
        AttemptFormatError: DEEPLINK_ATTEMPT is malformed.
        ValueError: keep is under 1, or another setting is none of those named.
    """

    def __init__(  # noqa: PLR0913 - each has a default, and is said by name
        self,
        folder: Path | str,
        *,
        attempt: Attempt | None = None,
        keep: int = 3,
        keep_every: int = 0,
        local: Path | str | None = None,
        finite: Finite = "note",
        waiting: Waiting = "wait",
        lease_s: float | None = LENGTH_S,
        readonly: bool = False,
        from_scratch: bool = False,
        clock: Clock | None = None,
    ) -> None:
        named = os.environ.get("DEEPLINK_ATTEMPT", "")
        self.folder, self.readonly = Path(folder), readonly
        self.local = Path(local) if local else None
        self.retention, self.keep = Retention(keep, keep_every), keep
        self.attempt = attempt or (Attempt.parse(named) if named else None)
        self.guard: FencingGuard | None = None
        self._lease_s = lease_s if named and attempt is None and not readonly else None
        self._clock = clock or SystemClock()
        self._hold = FolderOwnership(self.folder, self.attempt, self._clock, from_scratch=from_scratch)
        self._saver = Saver(self._hold, self.local or self.folder, self._clock)
        self._states = StateSaver(self._saver, self._clock, finite, waiting, self._published)
        self._mirror: Mirror | None = None
        node_restore = None
        if self.local and not readonly:
            self._mirror, node_restore = keep_here_first(
                self._hold, self.local, self._states, self.retention, self._clock
            )
        self._finder = Finder(self._hold, self._saver, self.local, node_restore, readonly=readonly)
        self._hold.after_claiming = self._watch_over
        self.step = 0
        self._parts: dict[str, Any] = {}
        self._is_resumed = False
        self._noted: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close()
        except Exception as problem:  # noqa: BLE001 - the error that ends the block is the one to see
            log.error("checkpoints in %s: %s", self.folder, problem)  # noqa: TRY400

    # -- looking

    def latest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, sizes and checksums verified; None when there is none at all.

        The checksums of what the attempt goes on from are read once, by its first rank; later looks compare sizes.
        What does not count is logged, and told in `.skipped` of the checkpoint and this object. Waits for a save.

        Raises:
            NothingWholeError: there are some, none is whole, and `from_scratch` is not set.
            StorageUnreadableError, StorageSilentError: errors for a minute, or no answer for two.
            PrivateFolderError: `local` is not this user's alone.
            FencedError, FolderGoneError: a newer attempt has claimed the folder, or it is not there any more.
            CheckpointDamagedError: the checkpoint that this attempt's ranks agreed on was damaged since.
            CheckpointError, NotFetchedError: with `local`, the nodes did not agree on one, or it is lost since.
            ClaimDamagedError: a claim is torn.
            DeepLinkError: a save or copy in the background failed so since the last call.
        """
        self._states.background.wait()
        refuse_strangers(self.local, readonly=self.readonly)
        return self._finder.newest()

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """What the last `latest` passed over, and why."""
        return self._finder.skipped

    def _watch_over(self, claim: Claim) -> None:
        """End this process when it has no business any more (`lease_s`)."""
        if self._lease_s and self.guard is None:
            env, clock = os.environ, self._clock
            agents = JobAgents.of_environment(env, self.folder, self.attempt, clock)
            witnesses = witnesses_of(env, self._hold.claims, claim, agents)
            world = int(env.get("WORLD_SIZE") or 1)
            last = last_resort_of(env, agents)
            self.guard = guarded(witnesses, self._lease_s, world=world, clock=clock, last_resort=last)

    # -- saving

    @contextmanager
    def save(self, *, step: int, meta: dict[str, Any] | None = None) -> Iterator[Path]:
        """Give an empty folder to write files into; after the block it is a checkpoint, whole, or not there.

        All is on stable storage when the block has ended; that takes as long as the storage takes. Afterwards
        older checkpoints are removed but for the newest `keep` whole ones. Save on one rank.

        Args:
            step: number of optimizer steps done since training began.
            meta: small facts to carry along, as JSON: the sampler's state, the digest's.

        Raises:
            FencedError, CheckpointWriteError: nothing was published.
            CheckpointError: opened for reading, meta is not JSON, or another process saved this step meanwhile.
            ValueError: the block left something that is neither file nor folder, or a file named manifest.json.
            DeepLinkError: a save or copy in the background failed so since the last call.
        """
        save = self._begun(step, meta)
        with Section(CHECKPOINT):
            self._states.background.wait()
            self._raise_failures()
            with self._saver.saving(save) as draft:
                yield draft
                save.stall_s = self._clock.monotonic() - save.began
            self._published(save)

    def save_state(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        meta: dict[str, Any] | None = None,
        spread: Spread = "alone",
        random: bool = True,
        wait: bool = False,
        any_object: bool = False,
    ) -> bool:
        """Save a state in the background; training waits only while it is copied to memory.

        Args:
            state: by name, what has a `state_dict` (model, optimizer) or is a state itself.
            step: optimizer steps done since training began.
            meta: small facts, as JSON. A part of `state` named `sampler` goes there by itself.
            spread: "alone": this process saves all of `state`, and it alone calls this. The others are called by
                every rank: with "first" rank 0's state is saved, with "each" every rank's own (torch.save), with
                "sharded" all together by torch.distributed.checkpoint.
            random: save the states of this process's random numbers, too.
            wait: return when it is on stable storage.
            any_object: save what `Checkpoint.load` refuses, too; somebody else loads it.

        Returns:
            False if it was skipped: the one before is under way (`waiting="skip"`).

        Raises:
            DeepLinkError: as `save`; what fails in the background is raised by the next call of whatever method.
            NotFiniteError: it holds NaN or infinity (finite="refuse").
            UnreadableStateError: it holds what `Checkpoint.load` would not read (a numpy number).
        """
        if not hasattr(state, "items"):
            raise TypeError(f"a state is a dict of parts by name ({{'model': model}}), not {type(state).__name__}")
        save = self._begun(step, meta)
        save.any_object = any_object
        self._raise_failures()
        with Section(CHECKPOINT):
            begun = self._states.save(state, save, spread=spread, random=random)
            if wait:
                self._states.background.wait()
        return begun

    def adopt(self, folder: Path | str, *, step: int, meta: dict[str, Any] | None = None) -> None:
        """Save, in the background, the files of a folder that something else wrote and does not change any more.

        Files are linked where both are on one file system, else copied while this waits.

        Raises:
            DeepLinkError: as `save_state`.
        """
        save = self._begun(step, meta)
        self._raise_failures()
        self._states.adopt(Path(folder), save)

    @property
    def is_saving(self) -> bool:
        """Whether a state is being written in the background."""
        return self._states.background.is_busy

    def wait(self) -> None:
        """Return once everything saved is on stable storage, and on the shared one.

        Raises:
            DeepLinkError: a save or copy in the background failed so since the last call.
        """
        with Section(CHECKPOINT):
            self._states.background.wait()
            if self._mirror is not None:
                self._mirror.wait()

    def close(self) -> None:
        """Wait for what is under way, and watch over this process no more.

        Raises:
            DeepLinkError: as `wait`.
        """
        try:
            self.wait()
        finally:
            if self._mirror:
                self._mirror.close()
            if self.guard:
                self.guard.stop()

    def _begun(self, step: int, meta: dict[str, Any] | None) -> Save:
        if self.readonly:
            raise CheckpointError(
                f"{self.folder} was opened with readonly=True", remedy="Open it without, to save."
            )
        step = operator.index(step)  # numpy's and torch's whole numbers, too
        if step < 0:
            raise ValueError(f"step {step}")
        refuse_strangers(self.local, readonly=self.readonly)
        if self._mirror:
            self._mirror.begin()
        return Save(step=step, meta=manifests.checked_meta(meta), began=self._clock.monotonic())

    def _raise_failures(self) -> None:
        self._states.background.raise_failure()
        if self._mirror:
            self._mirror.raise_failure()

    def _published(self, save: Save) -> None:
        """Note a save that has succeeded in the metrics, and tidy up; in the background for states."""
        step = save.step
        now = self._clock.unix()
        numbers = {process_metrics.CHECKPOINT_STEP: float(step), process_metrics.CHECKPOINT_UNIX: now}
        if self._noted is not None and step > self._noted:
            numbers[process_metrics.CHECKPOINT_EVERY] = float(step - self._noted)
        self._noted = step
        process_metrics.of_process.note(**numbers)
        if self._mirror and save.path and save.path.parent == self.local:
            self._mirror.offer(save.path.name, to_shared=save.to_shared)
        else:
            tidy_shared(self._hold, self.retention, proved=save.path.name if save.path else "")

    # -- the training loop

    def resume(self, *, random: bool = True, **parts: Any) -> Checkpoint | None:
        """Hand the parts the newest whole checkpoint's states, and return it; every rank calls it.

        Raises:
            DeepLinkError, KeyError, TypeError: as `latest` and `Checkpoint.restore`.
        """
        from deeplink.checkpoints import tensors  # noqa: PLC0415 - torch

        self._parts, self._is_resumed = dict(parts), True
        rank, world = tensors.group().rank, tensors.group().world
        if self.local and self._mirror is not None and self.attempt is None and world > 1:
            found = self._found_together(self.local, rank, tensors.gathered_texts)
        else:
            found = self.latest()
        if found is not None:
            found.restore(rank=rank, random=random, **parts)
            self.step = found.step
        return found

    def _found_together(self, local: Path, rank: int, gathered: Callable[[str], list[str]]) -> Checkpoint | None:
        """Return what all ranks of no attempt go on from; where one of them fails, all do."""
        bring_together(local, self._hold, rank, gathered)
        found, failed, said = None, None, ""
        try:
            found = self.latest()
            said = found.path.name if found else ""
        except (DeepLinkError, OSError) as problem:
            failed, said = problem, f"{FAILED}{problem}"
        names = gathered(said)
        if failed is not None:
            raise failed
        refuse_failures(names)
        if len(set(names)) > 1:
            raise no_agreement(f"the ranks found {', '.join(name or 'nothing' for name in names)}")
        return found

    def over(
        self, batches: Iterable[Any], *, every: int, spread: Spread | None = None, **parts: Any
    ) -> Iterator[Any]:
        """Yield a loader's batches, saving the parts each `every` steps; asking for the next batch ends a step.

        The last step is saved, too, when the batches end; not where the loop is left before.
        Resumes first, unless `resume` was called. A part `sampler` is told `finished()` after each step, and the
        step is reported (`deeplink.report`) unless the loop does so.

        Args:
            batches: what the loop goes over.
            every: steps between two saves.
            spread: as `save_state` has it; None: "sharded" where a part is (FSDP), else rank 0's state and every
                rank's random numbers.
            parts: model, optimizer, sampler ...; those of `resume` when there are none. None is called `rank`,
                `random` or `map_location`.

        Raises:
            DeepLinkError, KeyError, TypeError: as `resume` and `save_state`.
        """
        from deeplink.checkpoints import tensors  # noqa: PLC0415

        if every < 1:
            raise ValueError(f"every must be 1 or more, got {every}")
        if taken := sorted(_TAKEN & parts.keys()):
            raise ValueError(f"call no part {', '.join(taken)}: `restore` takes something else by that name")
        if parts and not self._is_resumed:
            self.resume(**parts)
        self._parts = parts or self._parts
        if not self._parts:
            raise ValueError("nothing to save: name the parts, over(loader, every=..., model=model, ...)")
        replicated: Spread = "first" if tensors.group().world > 1 else "alone"
        is_sharded = any(tensors.holds_shards(part) for part in self._parts.values())
        how = spread or ("sharded" if is_sharded else replicated)
        tensors.check_spread(self._parts, how)  # before the first step, not at the first save
        saved = self.step
        for batch in batches:
            yield batch
            # Here the loop's body is done with it.
            if SAMPLER in self._parts and hasattr(self._parts[SAMPLER], "finished"):
                self._parts[SAMPLER].finished()
            self.step += 1
            count_step(self.step)
            is_due = self.step % every == 0 or should_save(step=self.step)
            if is_due and self.save_state(self._parts, step=self.step, spread=how):
                saved = self.step
        if saved != self.step and not self.save_state(self._parts, step=self.step, spread=how):
            self.wait()  # for the one that it was skipped for
            self.save_state(self._parts, step=self.step, spread=how)

    def advice(self, *, mtbf_s: float | None = None, restart_s: float = RESTART_S) -> Advice:
        """Return how often to save: from what the saves in the folder cost, and how often its job was restarted.

        Args:
            mtbf_s: seconds between two failures, where that is known better.
            restart_s: seconds from a failure to the first new step.

        Raises:
            NoAdviceError: one of them is not known.
        """
        return advice_for(self.folder, now_unix=self._clock.unix(), mtbf_s=mtbf_s, restart_s=restart_s)
