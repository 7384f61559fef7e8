"""The copies of shards in a real allocation: packing and running agree on leaves that are to hold them apart."""

from __future__ import annotations

import json
import shutil

import pytest

from deeplink.cache import membership
from deeplink.core.types import ShardId, parse_members
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from tests.cache.agents import small_files, write_tree
from tests.cluster.jobs import folder_of, submit
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.cluster]


def test_what_is_packed_in_an_allocation_lies_where_the_ranks_look_for_it_on_two_leaves(sandbox: Sandbox) -> None:
    folder = folder_of(sandbox)
    source = write_tree(folder / "source", small_files(100))
    for path in (source, *source.rglob("*")):
        shutil.chown(path, sandbox.user.uid, sandbox.user.gid)
    script = f"""\
export USER=$(id -un) DEEPLINK_STORE=/local/ssd/$USER
deeplink pack {source} copies --shard-size 50KB --json > {folder}/packed.json
deeplink run --nproc-per-node 1 -- {{train}} 1
"""
    job = submit(sandbox, "-w n[0-3]", script, folder=folder)
    assert job.await_end(3 * LIMIT_S).state is JobState.COMPLETED, job.told()
    placed = json.loads((folder / "packed.json").read_text())["placed"]
    members = parse_members((folder / f"{job.id}.0.0.members").read_text())
    leaf = dict(job.placed(f"{job.id}.0.0"))
    known = membership.standing(members)
    assert len(placed) > 8
    assert len(set(leaf.values())) > 1
    for shard, holders in placed.items():
        assert len({leaf[node] for node in holders}) == 2
        assert tuple(holders) == membership.ranked(ShardId(shard), known.weight, known)[:2]
