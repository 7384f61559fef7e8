"""The source is slow, or gone, while a training reads samples that nobody else has."""

from __future__ import annotations

from pathlib import Path

import pytest

from deeplink.cache.packer import pack
from deeplink.cache.store.store import Store
from tests.cache.agents import config_below, write_tree
from tests.faults import slow_source
from tests.faults.processes import Record, reading, survived, task_of

pytestmark = [pytest.mark.slow]


def test_the_source_is_slow_and_then_gone(record: Record, files: dict[str, bytes], tmp_path: Path) -> None:
    slow_source.register()
    config, folder = config_below(tmp_path), write_tree(tmp_path / "source", files)
    pack(f"slow://{folder}", "digits", config=config)
    store = Store(config.store)
    lost = {shard: store.path(shard).read_bytes() for shard in store.ids()[::3]}
    for shard in lost:
        store.remove(shard)
    with reading(task_of(config, files), tmp_path) as loop:
        assert loop.said["stats"]["source_samples"] > 0
        slow_source.set_pace(folder, "0.02")
        loop.await_epochs(2)
        for shard, data in lost.items():
            store.add(shard, [data], len(data))
        # They are looked for again every few seconds; until then the source gives their samples.
        before = loop.said["stats"]["source_samples"]
        loop.await_stats(lambda stats: stats["local_samples"] > 0)
        while loop.said["stats"]["source_samples"] != before:
            before = loop.said["stats"]["source_samples"]
            loop.await_epochs(2)
        slow_source.set_pace(folder, "gone")
        loop.await_epochs(2)
        survived(loop, record)
