"""What is sent to other nodes is in use here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache.serve.served import ServedShards
from deeplink.cache.serve.server import CacheServicer
from deeplink.cache.store.store import Store
from deeplink.cache.transfer import frames
from deeplink.core.clock import ManualClock
from deeplink.core.types import NodeName
from tests.cache.pack.test_shard import PAYLOADS, write

if TYPE_CHECKING:
    from pathlib import Path


def test_what_is_sent_counts_as_read_and_is_noted_once_a_minute(tmp_path: Path) -> None:
    store, clock = Store(tmp_path / "store"), ManualClock()
    sealed = write(tmp_path / "draft", PAYLOADS)
    store.adopt(tmp_path / "draft", sealed.id)
    os.utime(store.path(sealed.id), (1000, 1000))
    mark = store.root / f"{sealed.id}.used"
    served = ServedShards(store, clock)
    for later, is_noted in ((0, True), (1, False), (58, False), (1, True), (59, False)):
        clock.now += later
        mark.unlink(missing_ok=True)
        assert served.get(sealed.id)[0] is not None
        assert (store.used_unix(sealed.id) > 1000) == is_noted


def test_a_file_that_took_another_s_place_is_served_at_once_when_the_other_is_doubted(tmp_path: Path) -> None:
    store, clock = Store(tmp_path / "store"), ManualClock()
    sealed = write(tmp_path / "draft", PAYLOADS)
    store.adopt(tmp_path / "draft", sealed.id)
    servicer = CacheServicer(store, NodeName("n0"), clock)
    found, _ = servicer._shards.get(sealed.id)
    other = tmp_path / "other"
    other.write_bytes(store.path(sealed.id).read_bytes())
    other.rename(store.path(sealed.id))
    # The folder is looked at ten times a second: until then it is the file that was open.
    assert servicer._shards.get(sealed.id)[0] is found
    doubt = frames.ExtentsRequest(0, (), np.empty(0, frames.EXTENT), (sealed.id,))
    list(servicer.read_message(frames.encode_request(doubt)))
    again, _ = servicer._shards.get(sealed.id)
    assert again is not None
    assert again.file.inode == store.path(sealed.id).stat().st_ino
