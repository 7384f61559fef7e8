"""A store that was wiped between two runs is noticed, once, with the likely reason."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from deeplink.cache.store import identity
from deeplink.cache.store.identity import StoreNotes, identity_of, shared_with, unmark
from deeplink.cache.store.store import Store
from deeplink.core.clock import ManualClock
from deeplink.core.process_identity import ProcessIdentity, boot_id
from deeplink.core.types import NodeName
from tests.cache.pack.test_shard import PAYLOADS, write

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "ssd" / "store")
    store.adopt(tmp_path / "draft", write(tmp_path / "draft", PAYLOADS).id)
    return store


def notes(tmp_path: Path, store: Store) -> StoreNotes:
    return StoreNotes(tmp_path / "state", NodeName("n0"), store, ManualClock())


def wipe(store: Store) -> Store:
    shutil.rmtree(store.root)
    return Store(store.root)


def test_a_wiped_store_is_said_once(tmp_path: Path, store: Store) -> None:
    assert notes(tmp_path, store).wiped() == ""  # never seen before
    notes(tmp_path, store).note()
    assert notes(tmp_path, store).wiped() == ""
    anew = wipe(store)
    said = notes(tmp_path, anew).wiped()
    assert "held 1 shards" in said
    assert "job_container/tmpfs" in said
    assert "DEEPLINK_STORE" in said
    notes(tmp_path, anew).note()
    assert notes(tmp_path, anew).wiped() == ""


def test_what_was_evicted_was_not_wiped(tmp_path: Path, store: Store) -> None:
    notes(tmp_path, store).note()
    for shard in store.ids():
        store.remove(shard)
    assert notes(tmp_path, store).wiped() == ""


@pytest.mark.parametrize(
    ("field", "value", "says"), [("device", -1, "another file system"), ("boot", "x", "was restarted")]
)
def test_the_likely_reason_is_named(tmp_path: Path, store: Store, field: str, value: object, says: str) -> None:
    notes(tmp_path, store).note()
    noted = next((tmp_path / "state" / "stores").iterdir())
    noted.write_text(json.dumps({**json.loads(noted.read_text()), field: value}))
    assert says in notes(tmp_path, wipe(store)).wiped()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"uuid": 1}'])
def test_a_damaged_note_or_identity_is_no_obstacle(tmp_path: Path, store: Store, text: str) -> None:
    first = identity_of(store, ManualClock())
    assert identity_of(store, ManualClock()) == first
    (store.root / ".store.json").write_text(text)
    assert identity_of(store, ManualClock()).uuid != first.uuid
    notes(tmp_path, store).note()
    next((tmp_path / "state" / "stores").iterdir()).write_text(text)
    assert notes(tmp_path, store).last() is None
    assert notes(tmp_path, wipe(store)).wiped() == ""


def test_this_boot_has_a_name() -> None:
    assert len(boot_id()) == 36
    assert {field.name for field in dataclasses.fields(identity.StoreNote)} >= {"uuid", "boot", "device"}


def test_a_store_that_two_machines_use_is_noticed_by_the_second(store: Store) -> None:
    assert shared_with(store, "n0") == ""
    assert shared_with(store, "n0") == ""
    assert shared_with(store, "n1") == "n0"
    assert shared_with(store, "n0") == "n1"
    unmark(store, "n1")
    assert shared_with(store, "n0") == ""
    (mark,) = store.root.glob(".agent-*")
    old = mark.stat().st_mtime - 100_000
    os.utime(mark, (old, old))  # that machine was not heard of since yesterday
    assert shared_with(store, "n1") == ""
    assert store.status().shards == 1


def marked_by(store: Store, host: str, agent: ProcessIdentity) -> None:
    (store.root / f".agent-{host}").write_text(json.dumps(agent))


def test_the_mark_of_an_agent_that_was_killed_here_counts_no_more_under_another_name(store: Store) -> None:
    ended = subprocess.Popen(["true"])
    us = ProcessIdentity.own()
    ended.wait()
    killed = us._replace(pid=ended.pid, started=us.started + 1)
    marked_by(store, "old-name", killed)
    assert shared_with(store, "n0") == ""
    marked_by(store, "old-name", us)  # it runs, under another name
    assert shared_with(store, "n0") == "old-name"
    for elsewhere in (
        killed._replace(boot="other"),
        killed._replace(boot=""),
        killed._replace(namespace="pid:[1]"),
    ):
        marked_by(store, "old-name", elsewhere)  # whether that one runs, this machine cannot tell
        assert shared_with(store, "n0") == "old-name"
    (store.root / ".agent-old-name").write_text("")  # of an older release
    assert shared_with(store, "n0") == "old-name"
