"""The callbacks for Lightning and Hugging Face's Trainer, against what those call and hand over."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typing_extensions import override

from deeplink.checkpoints import CheckpointError, Checkpoints, huggingface, lightning
from deeplink.checkpoints.huggingface import trainer_callback
from deeplink.checkpoints.lightning import lightning_callback
from deeplink.core.types import Attempt
from tests.deeplink.checkpoints.nodes import Nodes

FIRST = Attempt(17, 0, 0)


class Callback:
    """The base of either framework's callbacks."""


class Strategy:
    """The base of Lightning's strategies."""

    def __init__(self) -> None:
        self.checkpoint_io = CheckpointIO()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Path) -> None:
        self.checkpoint_io.save_checkpoint(checkpoint, path)


LIGHTNING = SimpleNamespace(Callback=Callback, strategies=SimpleNamespace(Strategy=Strategy))
TRANSFORMERS = SimpleNamespace(TrainerCallback=Callback)


class CheckpointIO:
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Path) -> None:
        raise AssertionError("Lightning's own must not write")


class LightningTrainer:
    """What of Lightning's Trainer is used (2.6): global_step, is_global_zero, strategy, save_checkpoint."""

    def __init__(self, strategy: Strategy | None = None) -> None:
        self.strategy = strategy or Strategy()
        self.global_step, self.is_global_zero = 0, True
        self.weight = torch.zeros(2)

    def save_checkpoint(self, filepath: Any) -> None:
        state = {"global_step": self.global_step, "state_dict": {"w": self.weight}, "loops": {"fit": 1}}
        if self.is_global_zero:
            self.strategy.save_checkpoint(state, filepath)


def test_lightning_saves_each_so_many_steps_and_waits_at_the_end(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, attempt=FIRST, keep=9)
    callback = lightning_callback(checkpoints, every=2, framework=LIGHTNING)
    assert Callback in type(callback).__mro__
    assert lightning.latest_path(checkpoints) is None
    trainer = LightningTrainer()
    own = trainer.strategy.checkpoint_io
    for step in (0, 1, 2, 2, 3, 4):  # two batches for step 2: gradients are accumulated
        trainer.global_step = step
        trainer.weight += 1
        callback.on_train_batch_end(trainer, None, None, None, 0)
    callback.on_train_end(trainer, None)
    assert trainer.strategy.checkpoint_io is own
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-0000000002.a1", "step-0000000004.a1"]
    path = lightning.latest_path(checkpoints)
    assert path is not None
    state = torch.load(path, weights_only=True)
    assert (state["global_step"], state["state_dict"]["w"].tolist()) == (4, [6.0, 6.0])


def test_lightnings_other_ranks_take_part_and_write_nothing(tmp_path: Path) -> None:
    trainer = LightningTrainer()
    trainer.global_step, trainer.is_global_zero = 1, False
    callback = lightning_callback(Checkpoints(tmp_path, attempt=FIRST), every=1, framework=LIGHTNING)
    callback.on_train_batch_end(trainer, None, None, None, 0)
    assert list(tmp_path.iterdir()) == []


class WritingStrategy(Strategy):
    """One that writes a folder of its own."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Path) -> None:
        path.mkdir()
        (path / "shard-0").write_text(str(checkpoint["global_step"]))


def test_a_strategy_that_writes_itself_writes_into_a_checkpoint(tmp_path: Path) -> None:
    trainer = LightningTrainer(WritingStrategy())
    trainer.global_step = 1
    checkpoints = Checkpoints(tmp_path, attempt=FIRST)
    callback = lightning_callback(checkpoints, every=1, framework=LIGHTNING)
    callback.on_train_batch_end(trainer, None, None, None, 0)
    path = lightning.latest_path(checkpoints)
    assert path is not None
    assert (Path(path) / "shard-0").read_text() == "1"


def test_a_strategy_that_writes_itself_cannot_write_to_nodes_own_disks(tmp_path: Path) -> None:
    trainer = LightningTrainer(WritingStrategy())
    trainer.global_step = 1
    with Checkpoints(tmp_path / "shared", local=tmp_path / "local", attempt=FIRST) as checkpoints:
        callback = lightning_callback(checkpoints, every=1, framework=LIGHTNING)
        with pytest.raises(CheckpointError, match="WritingStrategy the ranks of all nodes write into one folder"):
            callback.on_train_batch_end(trainer, None, None, None, 0)


def test_what_hugging_faces_trainer_wrote_is_taken_in(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", attempt=FIRST)
    callback = trainer_callback(checkpoints, framework=TRANSFORMERS)
    assert Callback in type(callback).__mro__
    assert huggingface.latest_path(checkpoints) is None
    args = SimpleNamespace(output_dir=str(tmp_path / "out"))
    written = tmp_path / "out" / "checkpoint-4"
    written.mkdir(parents=True)
    (written / "trainer_state.json").write_text("{}")
    other = SimpleNamespace(global_step=4, is_world_process_zero=False)
    callback.on_save(args, other, None, model=None)
    callback.on_save(args, SimpleNamespace(global_step=4, is_world_process_zero=True), None, model=None)
    callback.on_train_end(args, other, None)
    path = huggingface.latest_path(checkpoints)
    assert path is not None
    assert (Path(path) / "trainer_state.json").read_text() == "{}"


@pytest.mark.parametrize("make", [lambda c: lightning_callback(c, every=1), trainer_callback])
def test_a_framework_that_is_not_there_is_named(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("importlib.import_module", absent)
    with pytest.raises(CheckpointError, match="is not installed"):
        make(Checkpoints(tmp_path))


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_what_a_framework_saves_is_on_a_partners_disk_too_and_resumed_from_there(
    tmp_path: Path, framework: str
) -> None:
    nodes = Nodes(tmp_path)

    def begun(attempt: Attempt, node: str) -> Checkpoints:
        spares = tuple(other for other in nodes.servers if other != node)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in nodes.env(attempt, node, [node], spares=spares).items():
                patch.setenv(name, value)
            return Checkpoints(tmp_path / "c", local=nodes.local(node), lease_s=None)

    checkpoints = begun(FIRST, "n0")
    if framework == "lightning":
        trainer = LightningTrainer()
        trainer.global_step = 4
        callback = lightning_callback(checkpoints, every=2, framework=LIGHTNING)
        callback.on_train_batch_end(trainer, None, None, None, 0)
        callback.on_train_end(trainer, None)
    else:
        written = tmp_path / "out" / "checkpoint-4"
        written.mkdir(parents=True)
        (written / "trainer_state.json").write_text("{}")
        callback = trainer_callback(checkpoints, framework=TRANSFORMERS)
        args = SimpleNamespace(output_dir=str(tmp_path / "out"))
        callback.on_save(args, SimpleNamespace(global_step=4, is_world_process_zero=True), None, model=None)
        callback.on_train_end(args, None, None)
    assert nodes.copies("n2") == ["from-n0/step-0000000004.a1"]
    nodes.stop("n0")
    shutil.rmtree(tmp_path / "n0")
    shutil.rmtree(tmp_path / "c")
    again = begun(Attempt(17, 0, 1), "n1")
    path = (lightning if framework == "lightning" else huggingface).latest_path(again)
    nodes.close()
    assert path is not None
    assert Path(path).is_relative_to(nodes.local("n1"))
    if framework == "lightning":
        assert torch.load(path, weights_only=True)["global_step"] == 4
    else:
        assert (Path(path) / "trainer_state.json").read_text() == "{}"
