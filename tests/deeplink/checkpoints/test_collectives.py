"""Text between real ranks, as bytes in tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed

from deeplink.checkpoints import CheckpointError, tensors
from deeplink.checkpoints.tensors import LONGEST, broadcast_text, gathered_texts
from tests.deeplink.checkpoints.test_multirank_save import leave
from tests.deeplink.checkpoints.test_resuming import run
from tests.deeplink.checkpoints.trainings import joined


def speaking(rank: int, world: int, meeting: str, _folder: Path) -> None:
    joined(rank, world, meeting)
    assert gathered_texts("ü" * rank) == ["", "ü", "üü"]
    assert gathered_texts("") == [""] * 3
    assert broadcast_text(f"from {rank}", src=1) == "from 1"
    assert broadcast_text("", src=2) == ""
    for say in (gathered_texts, lambda text: broadcast_text(text, src=1)):
        # On every rank, so that none waits for another.
        with pytest.raises(CheckpointError, match=f"text of {LONGEST + 1} bytes"):
            say("x" * (LONGEST + 1) if rank == 1 else "short")
    with pytest.raises(CheckpointError, match="at most"):
        tensors._checked(-1)
    assert broadcast_text("still in step", src=0) == "still in step"
    leave()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_have_each_others_text(tmp_path: Path) -> None:
    run(speaking, 3, tmp_path)


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("gloo", "cpu"),
        (None, "cpu"),
        ("cuda:gloo", "cuda"),
        ("xpu:gloo", "xpu"),
        ("cuda:gloo,xpu:gloo", "cuda"),
        ("cpu:gloo,cuda:gloo", "cpu"),
    ],
)
def test_texts_go_through_a_device_that_the_group_has(tmp_path: Path, backend: str | None, device: str) -> None:
    distributed.init_process_group(backend, init_method=f"file://{tmp_path}/met", rank=0, world_size=1)
    try:
        assert tensors._device() == torch.device(device)
    finally:
        distributed.destroy_process_group()
