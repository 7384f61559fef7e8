"""The training loop with checkpoints in one line: `for batch in checkpoints.over(loader, every=100, ...)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deeplink.checkpoints.states import SAMPLER
from deeplink.progress import should_save

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from deeplink.checkpoints.folder import Checkpoints
    from deeplink.checkpoints.found import Checkpoint
    from deeplink.checkpoints.states import Spread


class Loop:
    """How far a training loop is, and what of it is saved.

    Attributes:
        step: steps done since training began, across restarts.
        parts: what is saved, by name.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self.step = 0
        self.parts: Mapping[str, Any] = {}
        self._is_resumed = False

    def resume(self, parts: Mapping[str, Any], *, random: bool = True) -> Checkpoint | None:
        """Hand the parts the newest whole checkpoint's states; see `Checkpoints.resume`."""
        from deeplink.checkpoints import tensors  # noqa: PLC0415 - torch

        self.parts, self._is_resumed = dict(parts), True
        found = self._checkpoints.latest()
        if found is not None:
            found.restore(rank=tensors.group().rank, random=random, **parts)
            self.step = found.step
        return found

    def over(
        self, batches: Iterable[Any], *, every: int, spread: Spread | None, parts: Mapping[str, Any]
    ) -> Iterator[Any]:
        """Yield the batches; see `Checkpoints.over`."""
        from deeplink.checkpoints import tensors  # noqa: PLC0415

        if every < 1:
            raise ValueError(f"every must be 1 or more, got {every}")
        if parts and not self._is_resumed:
            self.resume(parts)
        if not self.parts:
            raise ValueError("nothing to save: name the parts, over(loader, every=..., model=model, ...)")
        replicated: Spread = "first" if tensors.group().world > 1 else "alone"
        is_sharded = any(tensors.holds_shards(part) for part in self.parts.values())
        how = spread or ("sharded" if is_sharded else replicated)
        tensors.check_spread(self.parts, how)  # before the first step, not at the first save
        for batch in batches:
            yield batch
            # Here the loop's body is done with it.
            if SAMPLER in self.parts and hasattr(self.parts[SAMPLER], "finished"):
                self.parts[SAMPLER].finished()
            self.step += 1
            if self.step % every == 0 or should_save(step=self.step):
                self._checkpoints.save_state(self.parts, step=self.step, spread=how)
