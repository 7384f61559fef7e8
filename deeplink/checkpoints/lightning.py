"""Checkpoints for Lightning: `Trainer(callbacks=[lightning_callback(checkpoints, every=500)])`.

Written for and tried with Lightning 2.6; imports it when called. Lightning's own loop state, callbacks and
schedulers are saved, since Lightning puts the checkpoint together: we take it where it would be written. A
strategy that writes files of its own (FSDP, model parallel, DeepSpeed) is given the folder to write them into.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.checkpoints.found import STATE
from deeplink.checkpoints.manifest import CheckpointError
from deeplink.training.progress import should_save

if TYPE_CHECKING:
    from deeplink.checkpoints.folder import Checkpoints


WRITTEN = "lightning.ckpt"
"""The file, or folder, of a strategy that writes itself."""


def latest_path(checkpoints: Checkpoints) -> str | None:
    """Return the path for `Trainer.fit(ckpt_path=...)`: the newest whole checkpoint's, if there is one.

    Raises:
        DeepLinkError: as `Checkpoints.latest`.
    """
    found = checkpoints.latest()
    if found is None:
        return None
    written = found.path / WRITTEN
    return str(written if written.exists() else found.path / STATE)


def lightning_callback(checkpoints: Checkpoints, *, every: int, framework: Any = None) -> Any:
    """Return a callback that saves each `every` optimizer steps, in the background.

    With a strategy that writes files of its own, training waits until they are on stable storage.

    Args:
        checkpoints: where to; every rank makes its own of the same folder.
        every: optimizer steps between two saves.
        framework: `lightning.pytorch`, `pytorch_lightning` or what stands for it; None: what is installed.

    Raises:
        CheckpointError: it is not installed.
    """
    pl = framework or installed("Lightning", "lightning.pytorch", "pytorch_lightning")

    class LightningCheckpoints(pl.Callback):  # type: ignore[misc, name-defined] # its base is known when it is made
        """Saves through DeepLink."""

        saved = -1

        def on_train_batch_end(self, trainer: Any, *_batch: Any) -> None:
            """Save if it is time; several batches may make one step."""
            step = int(trainer.global_step)
            if step and step != self.saved and (step % every == 0 or should_save(step=step)):
                self.saved = step
                if type(trainer.strategy).save_checkpoint is not pl.strategies.Strategy.save_checkpoint:
                    _written(trainer, checkpoints, step)
                    return
                state = _taken(trainer)
                if trainer.is_global_zero:
                    checkpoints.save_state(state, step=step, any_object=True)  # Lightning loads it itself

        def on_train_end(self, _trainer: Any, _module: Any) -> None:
            """Wait for what is under way, and raise what failed."""
            checkpoints.wait()

    return LightningCheckpoints()


def installed(framework: str, *modules: str) -> Any:
    """Return the first of a framework's modules that is installed."""
    for name in modules:
        with suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise CheckpointError(f"{framework} is not installed", remedy="Install it beside DeepLink.")


class _Catch:
    """Stands where Lightning writes its checkpoints, and keeps the one it is handed."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], *_where: Any, **_options: Any) -> None:
        self.state = checkpoint


def _taken(trainer: Any) -> dict[str, Any]:
    """Return the checkpoint that Lightning would write; every rank must call it. Empty but on rank 0."""
    strategy, catch = trainer.strategy, _Catch()
    own = strategy.checkpoint_io
    strategy.checkpoint_io = catch
    try:
        trainer.save_checkpoint(WRITTEN)
    finally:
        strategy.checkpoint_io = own
    return catch.state


def _written(trainer: Any, checkpoints: Checkpoints, step: int) -> None:
    """Have every rank write its files into one folder, and publish that; every rank must call it."""
    if checkpoints.local is not None:
        raise CheckpointError(
            f"with {type(trainer.strategy).__name__} the ranks of all nodes write into one folder",
            remedy="Leave `local=` out.",
        )
    with checkpoints.save(step=step) if trainer.is_global_zero else nullcontext(Path()) as draft:
        trainer.save_checkpoint(draft / WRITTEN)  # rank 0's path counts, and rank 0 waits for the others
