"""What DataLoader workers read is in the numbers that their trainer reports."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import data as torch_data
from typing_extensions import override

import deeplink
from deeplink.core import process_metrics
from deeplink.core.config import Config
from deeplink.data import ResumableSampler
from tests.deeplink.data.packed_things import COUNT, packed_below


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return packed_below(tmp_path_factory.mktemp("counts"))


@pytest.fixture
def many(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> deeplink.Dataset:
    """A dataset in a job, whose process has counted nothing yet."""
    monkeypatch.setenv("DEEPLINK_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setattr(process_metrics, "of_process", process_metrics.Vitals())
    return deeplink.Dataset("many", labels=False, packed=True, config=config)


def numbers() -> dict[str, float]:
    return process_metrics.of_process.numbers()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        pytest.param({"num_workers": 2, "multiprocessing_context": "spawn"}, marks=pytest.mark.slow),
        pytest.param({"num_workers": 2, "multiprocessing_context": "forkserver"}, marks=pytest.mark.slow),
    ],
)
def test_reads_are_counted_at_any_number_of_workers(many: deeplink.Dataset, options: dict[str, Any]) -> None:
    assert numbers() == {}
    # A test before this one may have begun the server, which has kept the environment of then.
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]
    sampler = ResumableSampler(many, batch_size=16)
    loader = torch_data.DataLoader(many, batch_sampler=sampler, collate_fn=len, **options)
    for epoch in range(2):
        for _ in loader:
            sampler.finished()
        assert numbers()[process_metrics.LOCAL_SAMPLES] == COUNT * (epoch + 1)
        assert numbers()[process_metrics.SOURCE_SAMPLES] == 0


def test_what_is_not_here_is_counted_with_the_time_it_took(config: Config, many: deeplink.Dataset) -> None:
    import dataclasses

    elsewhere = dataclasses.replace(config, store=config.store.with_name("empty"), fill_on_miss=False)
    dataset = deeplink.Dataset("many", labels=False, packed=True, config=elsewhere)
    list(torch_data.DataLoader(dataset, batch_size=16, num_workers=2, collate_fn=len))
    assert numbers()[process_metrics.SOURCE_SAMPLES] == COUNT
    assert numbers()[process_metrics.WAITED_S] > 0


class Deadly(torch_data.Dataset[int]):
    """Reads, and ends its worker at one item."""

    def __init__(self, whole: deeplink.Dataset) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return len(self.whole)

    @override
    def __getitem__(self, index: int) -> int:
        length = len(self.whole[index].arena)
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return length


def test_a_killed_workers_counts_stay_and_its_row_is_taken_over(many: deeplink.Dataset, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed"):
        list(torch_data.DataLoader(Deadly(many), batch_size=1, num_workers=1, prefetch_factor=1))
    before = numbers()[process_metrics.LOCAL_SAMPLES]
    assert before >= 8
    for _ in range(3):
        list(torch_data.DataLoader(many, batch_size=60, num_workers=1, collate_fn=len))
    assert numbers()[process_metrics.LOCAL_SAMPLES] == before + 3 * COUNT
    (file,) = tmp_path.glob("reads-*")
    rows = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float64).view(256, -1)
    assert (rows.sum(1) > 0).sum() == 1
    assert file.stat().st_mode & 0o077 == 0


def test_outside_of_a_job_nothing_is_written(
    many: deeplink.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DEEPLINK_TOKEN_FILE")
    list(torch_data.DataLoader(many, batch_size=60, num_workers=1, collate_fn=len))
    assert numbers() == {}
    assert not list(tmp_path.glob("reads-*"))
