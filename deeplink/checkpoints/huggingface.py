"""Checkpoints for Hugging Face's Trainer: `Trainer(callbacks=[trainer_callback(checkpoints)])`.

Written for and tried with transformers 5.23; imports it when called. The Trainer writes `checkpoint-<step>`
folders itself (`save_steps=`); each is then taken in, with a manifest, under the fence: what a fenced or half dead
process leaves in `output_dir` is not resumed from.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.checkpoints.lightning import installed
from deeplink.training.progress import should_save

if TYPE_CHECKING:
    from deeplink.checkpoints.folder import Checkpoints


def latest_path(checkpoints: Checkpoints) -> str | None:
    """Return the folder for `Trainer.train(resume_from_checkpoint=...)`, None when there is none.

    Raises:
        DeepLinkError: as `Checkpoints.latest`.
    """
    found = checkpoints.latest()
    return None if found is None else str(found.path)


def trainer_callback(checkpoints: Checkpoints, *, framework: Any = None) -> Any:
    """Return a callback that takes in each checkpoint the Trainer writes, in the background.

    Args:
        checkpoints: where to; on the same file system as `output_dir` nothing is copied.
        framework: `transformers`, or what stands for it; None: what is installed.

    Raises:
        CheckpointError: it is not installed.
    """
    hf = framework or installed("transformers", "transformers")

    class TrainerCheckpoints(hf.TrainerCallback):  # type: ignore[misc, name-defined] # its base is known when made
        """Saves through DeepLink."""

        def on_step_end(self, _args: Any, state: Any, control: Any, **_more: Any) -> Any:
            """Have a checkpoint written where the job is about to end."""
            if should_save(step=int(state.global_step)):
                control.should_save = True
            return control

        def on_save(self, args: Any, state: Any, _control: Any, **_more: Any) -> None:
            """Take in what was written a moment ago."""
            if state.is_world_process_zero:
                step = int(state.global_step)
                checkpoints.adopt(Path(args.output_dir) / f"checkpoint-{step}", step=step)

        def on_train_end(self, _args: Any, _state: Any, _control: Any, **_more: Any) -> None:
            """Wait for what is under way, and raise what failed."""
            checkpoints.wait()

    return TrainerCheckpoints()
