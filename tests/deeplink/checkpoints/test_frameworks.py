"""Lightning and Hugging Face's Trainer: an interrupted training ends up where an uninterrupted one does."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import transformers
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from typing_extensions import override

from deeplink.checkpoints import Checkpoints, huggingface
from deeplink.checkpoints import lightning as ours
from deeplink.core.types import Attempt
from tests.deeplink.checkpoints.test_multirank_save import leave
from tests.deeplink.checkpoints.test_resuming import run as launch
from tests.deeplink.checkpoints.trainings import joined

STEPS = 12

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),  # theirs: of this host, of torch's
]


class KilledError(Exception):
    """Stands for the end of a rank."""


@pytest.fixture(autouse=True)
def outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPLINK_ATTEMPT", raising=False)


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Twelve batches of two rows."""

    def __len__(self) -> int:
        return 2 * STEPS

    @override
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randn(3, generator=torch.Generator().manual_seed(index))
        return {"x": row, "labels": row.sum()}


def weights(model: nn.Module) -> list[float]:
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


class Module(lightning.LightningModule):
    def __init__(self, killed_at: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.killed_at, self.calls = nn.Linear(3, 1), killed_at, 0

    @override
    def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
        if self.calls == self.killed_at:
            raise KilledError
        self.calls += 1
        return nn.functional.mse_loss(self.layer(batch["x"])[:, 0], batch["labels"])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def fit(folder: Path, relaunch: int, killed_at: int | None = None) -> tuple[list[float], int]:
    with Checkpoints(folder, attempt=Attempt(1, 0, relaunch)) as checkpoints:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[ours.lightning_callback(checkpoints, every=3)],
        )
        module = Module(killed_at)
        path = ours.latest_path(checkpoints)
        trainer.fit(module, StatefulDataLoader(Rows(), batch_size=2), ckpt_path=path, weights_only=True)
    return weights(module), module.calls


class Model(nn.Module):
    def __init__(self, killed_at: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.killed_at, self.calls = nn.Linear(3, 1), killed_at, 0

    @override
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.calls == self.killed_at:
            raise KilledError
        self.calls += 1
        said = self.layer(x)[:, 0]
        return {"loss": nn.functional.mse_loss(said, labels), "logits": said}


def train(folder: Path, relaunch: int, killed_at: int | None = None) -> tuple[list[float], int]:
    with Checkpoints(folder, attempt=Attempt(1, 0, relaunch)) as checkpoints:
        model = Model(killed_at)
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=str(folder.with_name(f"{folder.name}-out")),
                max_steps=STEPS,
                per_device_train_batch_size=2,
                save_steps=3,
                learning_rate=0.05,
                use_cpu=True,
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Rows(),
            callbacks=[huggingface.trainer_callback(checkpoints)],
        )
        trainer.train(resume_from_checkpoint=huggingface.latest_path(checkpoints))
    return weights(model), model.calls


class ShardedModule(Module):
    """One whose layer is sharded over the ranks."""

    @override
    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])


def fit_sharded(rank: int, world: int, meeting: str, folder: Path) -> None:
    """Train as one of two ranks; one relaunch after the end of both goes on."""
    joined(rank, world, meeting)
    for relaunch, killed_at in ((0, 8), (1, None)):
        with Checkpoints(folder, attempt=Attempt(1, 0, relaunch)) as checkpoints:
            trainer = lightning.Trainer(
                accelerator="cpu",
                strategy=ModelParallelStrategy(
                    data_parallel_size=world, tensor_parallel_size=1, process_group_backend="gloo"
                ),
                plugins=[Joined(rank, world)],
                devices=world,
                max_steps=STEPS,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[ours.lightning_callback(checkpoints, every=3)],
            )
            module = ShardedModule(killed_at)
            with suppress(KilledError):
                trainer.fit(
                    module, StatefulDataLoader(Rows(), batch_size=2), ckpt_path=ours.latest_path(checkpoints)
                )
            (folder.parent / f"calls-{relaunch}-{rank}").write_text(str(module.calls))
    leave()


class Joined(LightningEnvironment):
    """Two ranks that are there already."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self._rank, self._world = rank, world

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @override
    def local_rank(self) -> int:
        return self._rank

    @override
    def global_rank(self) -> int:
        return self._rank

    @override
    def world_size(self) -> int:
        return self._world


def test_lightnings_sharded_strategy_is_resumed_by_all_ranks(tmp_path: Path) -> None:
    launch(fit_sharded, 2, tmp_path / "c")
    calls = [(tmp_path / f"calls-{relaunch}-{rank}").read_text() for relaunch in (0, 1) for rank in (0, 1)]
    assert calls == ["8", "8", "6", "6"]


@pytest.mark.parametrize("run", [fit, train], ids=["lightning", "transformers"])
def test_an_interrupted_training_ends_where_an_uninterrupted_one_does(tmp_path: Path, run: Any) -> None:
    whole, steps = run(tmp_path / "whole", 0)
    assert steps == STEPS
    with pytest.raises(KilledError):
        run(tmp_path / "cut", 0, killed_at=8)
    found = Checkpoints(tmp_path / "cut", attempt=Attempt(1, 0, 1)).latest()
    assert found is not None
    assert found.step == 6
    assert run(tmp_path / "cut", 1) == (whole, STEPS - 6)


@pytest.mark.parametrize(("run", "asked"), [(fit, ours), (train, huggingface)], ids=["lightning", "transformers"])
def test_a_job_that_is_about_to_lose_its_nodes_saves_besides(
    tmp_path: Path, run: Any, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, "should_save", lambda *, step: step == 7)
    with pytest.raises(KilledError):
        run(tmp_path / "cut", 0, killed_at=8)
    found = Checkpoints(tmp_path / "cut", attempt=Attempt(1, 0, 1)).latest()
    assert found is not None
    assert found.step == 7
