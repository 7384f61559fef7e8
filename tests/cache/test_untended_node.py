"""Readers on a node that no agent looks after: a login node, a workstation, a node of another partition.

Whoever reads, whatever members there are and wherever the shards lie: right bytes or PermissionError, in time, and
no epoch after the first from the source where a store can be filled.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deeplink.cache.packer import pack
from deeplink.core.types import format_members
from deeplink.rpc.tokens import write_token
from deeplink.scheduler.slurm.command import finish
from tests.cache.agents import small_files, write_tree
from tests.cache.keepers import Keepers
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

OTHER = 54_321
IS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="acts as other users")
READ = """
import dataclasses, hashlib, json, sys, time
from pathlib import Path
from deeplink.cache.reader import Reader
from deeplink.core.config import Config

def came(now, before):
    return {place: getattr(now, place + "_samples") - getattr(before, place + "_samples") for place in PLACES}

PLACES = ("local", "peer", "home", "source")
limit_s, cases = float(sys.argv[1]), json.loads(sys.argv[2])
found = {}
for case, settings in cases.items():
    paths = {name: Path(settings.pop(name)) for name in ("catalog", "store", "token_file")}
    epochs, until = [], time.monotonic() + limit_s
    try:
        with Reader.open("digits", config=Config(**paths, **settings)) as reader:
            before = reader.stats()
            while not epochs or epochs[-1]["source"] and time.monotonic() < until:
                time.sleep(0.2 * bool(epochs))
                read = reader.read(range(len(reader)))
                said = hashlib.sha256()
                for row, view in enumerate(read):
                    said.update(reader.index.key(row).encode() + bytes(view))
                now = reader.stats()
                epochs.append({**came(now, before), "digest": said.hexdigest()})
                before = now
            found[case] = epochs
    except Exception as problem:
        found[case] = type(problem).__name__ + ("" if isinstance(problem, PermissionError) else f": {problem}")
print(json.dumps(found))
"""


@pytest.fixture
def keepers() -> Iterator[Keepers]:
    """Members whose folders other users may enter: pytest's own are closed by each pytest that begins."""
    with tempfile.TemporaryDirectory(prefix="deeplink-site-") as site:
        Path(site).chmod(0o755)
        running = Keepers(Path(site))
        yield running
        running.stop_all()


def digest_of(files: dict[str, bytes]) -> str:
    whole = hashlib.sha256()
    for key in sorted(files, key=str.encode):
        whole.update(key.encode() + files[key])
    return whole.hexdigest()


def read_as(user: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what readers of a user with these settings got: epochs, or the error."""
    argv = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", sys.executable, "-c", READ]
    done = finish([*argv, str(LIMIT_S), json.dumps(cases)], timeout_s=4 * LIMIT_S)
    assert done.code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@IS_ROOT
@pytest.mark.parametrize("is_private", [False, True], ids=["public", "private"])
@pytest.mark.parametrize("home", ["none", "there", "gone"])
def test_every_reader_gets_right_bytes_or_a_permission_error_and_fills_what_it_can(
    keepers: Keepers, closed_port: int, home: str, is_private: bool
) -> None:
    files, site = small_files(), keepers.root
    source = write_tree(site / "source", files)
    source.chmod(0o700 if is_private else 0o755)
    config = keepers.config(store=site / "packed", shard_bytes=50_000)
    (site / "catalog").mkdir(mode=0o755)
    url = site / "home"
    pack(str(source), "digits", config=config, home="" if home == "none" else str(url))
    shutil.rmtree(config.store)  # nobody holds it now
    if home == "gone":
        shutil.rmtree(url)
    for name in ("n0", "n1"):
        keepers.start(name)
    keepers.introduce()
    write_token(site / "token", keepers.token)
    members = {
        "nobody": "",
        "alive": format_members(keepers.members),
        "dead": f"n0=127.0.0.1:{closed_port},n1=127.0.0.1:{closed_port}",
    }
    for user, name in ((0, "same"), (OTHER, "other")):
        stores = site / f"stores-{name}"
        stores.mkdir()
        os.chown(stores, user, user)
        cases = {
            who: {
                "catalog": str(config.catalog),
                "store": str(stores / who),
                "token_file": str(site / "token"),
                "members": known,
                "node": "login",
                "step_aside": False,
                "read_deadline_ms": 20_000,
            }
            for who, known in members.items()
        }
        found = read_as(user, cases)
        assert found.keys() == members.keys()
        for (who, epochs), told in itertools.product(found.items(), [f"{name}, {home}, private {is_private}"]):
            if is_private and user == OTHER:
                assert epochs == "SampleForbiddenError", (told, who, epochs)
                continue
            assert isinstance(epochs, list), (told, who, epochs)
            assert {epoch["digest"] for epoch in epochs} == {digest_of(files)}, (told, who)
            assert epochs[-1]["source"] == 0, (told, who, epochs)
            assert sum(epochs[0][place] for place in ("local", "peer", "home", "source")) == len(files)
            if home == "there":
                assert not any(epoch["source"] for epoch in epochs), (told, who, epochs)
            if who == "alive" and user == 0:
                assert not any(epoch["peer"] for epoch in epochs[:1])  # they held nothing
