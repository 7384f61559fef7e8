"""The dataset of the storm's jobs: packed onto the nodes, and what each job is to be fed of it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from benchmarks.watchdog.stand import StandError
from deeplink.data.digest import DeliveryDigest
from deeplink.scheduler.testbed.shape import CTL

if TYPE_CHECKING:
    from benchmarks.watchdog.stand import Stand

DATASET, FILES, FILE_BYTES = "storm", 240, 700
EPOCHS = 8
PACK_S = 120.0


def packed(stand: Stand) -> DeliveryDigest:
    """Pack the dataset onto the nodes' disks, and return what each job is to be fed.

    Raises:
        StandError: it cannot be packed.
    """
    cluster = stand.cluster
    store = f'store = "{cluster.ssd_in_jobs}/deeplink"\n'
    make = f"""
mkdir -p .config/deeplink source && cat > .config/deeplink/config.toml
for i in $(seq {FILES}); do head -c {FILE_BYTES} /dev/urandom > source/$i.bin; done
"""
    cluster.run(CTL, ["bash", "-c", make], stdin=store, timeout_s=60)
    argv = [
        "salloc",
        "--quiet",
        f"-N{len(cluster.nodes)}",
        "--exclusive",
        "deeplink",
        "pack",
        str(cluster.home / "source"),
        DATASET,
    ]
    done = cluster.run(CTL, [*argv, "--shard-size", "65536"], timeout_s=PACK_S)
    if done.code:
        raise StandError(f"packing: {done.stderr[-2000:]}")
    tell = f"""
import json, numpy, deeplink.data.digest as d
from deeplink.cache.reader import Reader
index = Reader.open({DATASET!r}).index
class All: rows = numpy.arange(len(index), dtype=numpy.int64); checksums = index.checksums
print(json.dumps(d.DeliveryDigest.expected(All, {EPOCHS}).state_dict()))
"""
    told = cluster.run(CTL, [sys.executable, "-c", tell], timeout_s=60)
    if told.code:
        raise StandError(f"the digest to expect: {told.stderr[-2000:]}")
    expected = DeliveryDigest()
    expected.load_state_dict(json.loads(told.stdout))
    return expected
