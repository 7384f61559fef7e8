"""The benchmark of a large cluster: its crowd beats as launchers and agents do, and is heard by a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.watchdog import scale
from deeplink.core.clock import SystemClock
from deeplink.core.metrics import WatchMetrics
from deeplink.rpc.tokens import write_token
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.liveness.heartbeats import HeartbeatTable
from deeplink.scheduler.watch.server import WatchServicer, watch_server
from tests.scheduler.watch.callers import MINT, authorizer
from tests.waiting import LIMIT_S


def test_the_crowd_is_heard_and_says_what_it_was_told(tmp_path: Path) -> None:
    token, cast, heartbeats = tmp_path / "token", tmp_path / "cast.json", HeartbeatTable()
    write_token(token, MINT.secret)
    cast.write_text(json.dumps({"jobs": {"7": ["n0", "n1"]}, "standing": ["n0", "n1", "n2"]}))
    with Journal(tmp_path / "watch.sqlite") as journal:
        servicer = WatchServicer(
            journal,
            heartbeats,
            SystemClock(),
            WatchMetrics(CollectorRegistry()),
            authorizer(journal, SystemClock()),
        )
        bound = watch_server("127.0.0.1:0", servicer)
        bound.server.start()
        argv = [
            sys.executable,
            "-m",
            "benchmarks.watchdog.crowd",
            f"127.0.0.1:{bound.port}",
            str(token),
            str(cast),
        ]
        with subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(scale.__file__).parents[2]
        ) as crowd:
            try:
                assert crowd.stdin is not None
                crowd.stdin.write("mute n1\n")
                crowd.stdin.flush()
                clock = SystemClock()
                end = clock.monotonic() + LIMIT_S
                while not _misses(heartbeats, "n1") and clock.monotonic() < end:
                    clock.sleep(0.05)
                said, _ = crowd.communicate(timeout=LIMIT_S)
            finally:
                crowd.kill()
                bound.server.stop(0.5).wait(LIMIT_S)
    assert _misses(heartbeats, "n1")
    assert not _misses(heartbeats, "n0")
    told = json.loads(said)
    assert told["calls"] >= 2
    assert told["failed"] == 0


def _misses(heartbeats: HeartbeatTable, node: str) -> bool:
    return any(
        record.silent_s > 0.5
        for heard in heartbeats.all()
        for record in heard.beat.node_beats
        if record.name == node
    )


@pytest.mark.parametrize("wrong", [["--jobs", "300"], ["--faults", "6"], ["--jobs", "0"]])
def test_more_than_there_is_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        scale.main(wrong)
