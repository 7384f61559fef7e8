"""A watchdog on a cluster's control host, for tests of what it agreed to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL
from tests.cluster.jobs import folder_of
from tests.waiting import LIMIT_S, until


@contextmanager
def watchdog(cluster: Sandbox, port: int = 7412, folder: Path | None = None) -> Iterator[dict[str, str]]:
    """Run `deeplink watch --act` with an operator's rights; give what a user's environment names it by."""
    folder = folder or folder_of(cluster)
    argv = [sys.executable, "-m", "deeplink", "-v", "watch", "--act", "--bind", f"127.0.0.1:{port}"]
    argv += ["--journal", str(folder / "watch.sqlite"), "--token-file", str(folder / "token")]
    with (folder / "said").open("ab") as said:
        process = cluster.spawn(CTL, argv, root=True, stdout=said, stderr=said)
    try:
        until(lambda: "watching: " in (folder / "said").read_text(), 3 * LIMIT_S, (folder / "said").read_text)
        yield {"DEEPLINK_WATCH": f"127.0.0.1:{port}"}
    finally:
        process.terminate()
        process.wait(LIMIT_S)
