"""More clients than an agent can serve at once: bounded memory, polite refusals, all are served in the end."""

from __future__ import annotations

import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deeplink.cache.reader import Reader
from deeplink.cache.serve.server import MOST_READS
from deeplink.cache.transfer import frames
from deeplink.cache.transfer.frames import READ_METHOD
from deeplink.core.clock import SystemClock
from deeplink.rpc.plain import PlainBusyError, PlainConnection
from tests.faults.processes import Nodes, Record, reading, survived, task_of
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.slow]
CLIENTS = 1000
SAMPLES = 64
COPIES = 4
"""Of an answer under way: arena, message, gRPC's own, the socket's."""


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Enough of them for a thousand sockets."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert before[1] > 2 * CLIENTS, "this machine does not let a process have a thousand sockets"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2 * CLIENTS), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def memory_of(pid: int) -> int:
    """Return the bytes a process has in memory that are its own."""
    said = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) << 10 for line in said if line.startswith("RssAnon:"))


def request_of_some(nodes: Nodes, number: int) -> tuple[bytes, list[bytes]]:
    """Return a request of samples of the shards that a member holds, and what the answer is."""
    with Reader.open("digits", config=nodes.config()) as reader:
        index = reader.index
        held = set(nodes[number].store.ids())
        shards = [place for place, entry in enumerate(index.shards) if entry.id in held]
        rows = [row for row in range(len(index)) if int(index.shard[row]) in shards][:SAMPLES]
        extents = np.empty(len(rows), frames.EXTENT)
        extents["shard"] = [shards.index(int(index.shard[row])) for row in rows]
        extents["block"], extents["offset"] = index.block[rows], index.offset[rows]
        extents["length"] = index.lengths[rows]
        request = frames.ExtentsRequest(1, [index.shards[place].id for place in shards], extents)
        return frames.encode_request(request), [nodes.files[index.key(row)] for row in rows]


def test_a_thousand_clients_at_once(nodes: Nodes, record: Record, descriptors: None, tmp_path: Path) -> None:
    message, wanted = request_of_some(nodes, 0)
    before = memory_of(int(nodes[0].said["pid"]))
    with reading(task_of(nodes.config(), nodes.files), tmp_path) as loop:
        crowd = Crowd(f"127.0.0.1:{nodes[0].port}", nodes, message, wanted)
        crowd.press()
        loop.await_epochs(1)
        grown = crowd.memory - before
        record("figure", f"{crowd.served} served, {len(crowd.hints):,} refusals, {grown >> 20} MiB more")
        survived(loop, record)
    assert crowd.served == CLIENTS
    assert all(hint > 0 for hint in crowd.hints), "a refusal did not say when to come again"
    # It grows with the answers that are under way at once, however many clients wait for theirs.
    assert grown < MOST_READS * sum(map(len, wanted)) * COPIES


class Crowd:
    """A thousand clients that ask at once, and again when they were told to."""

    def __init__(self, address: str, nodes: Nodes, message: bytes, wanted: list[bytes]) -> None:
        self._address, self._token, self._pid = address, nodes.token, int(nodes[0].said["pid"])
        self._message, self._wanted = message, wanted
        self._deadline = time.monotonic() + 2 * LIMIT_S
        self.served = self.memory = 0
        self.hints: list[float] = []

    def press(self) -> None:
        """Ask until all were served, or the time is up."""
        while self.served < CLIENTS and time.monotonic() < self._deadline:
            known = len(self.hints)
            self._round(CLIENTS - self.served)
            time.sleep(min(max(self.hints[known:], default=0.0), 1.0))

    def _round(self, asking: int) -> None:
        clock = SystemClock()
        connections = list[PlainConnection]()
        try:
            for _ in range(asking):
                connections.append(PlainConnection(self._address, self._token, clock))
                connections[-1].send(READ_METHOD, self._message, self._deadline)
                connections[-1].flush()  # a stranger that says nothing has ten seconds
            for connection in connections:
                self.memory = max(self.memory, memory_of(self._pid))
                try:
                    assert self._answer(connection) == self._wanted
                except PlainBusyError as problem:
                    self.hints.append(problem.retry_s)
                else:
                    self.served += 1
        finally:
            for connection in connections:
                connection.close()

    def _answer(self, connection: PlainConnection) -> list[bytes]:
        found = []
        for message in connection.replies():
            (count,) = struct.unpack_from("<I", message)
            at = 4 + count * frames.ITEM.itemsize
            for length in np.frombuffer(message, frames.ITEM, count, 4)["length"].tolist():
                found.append(message[at : at + length])
                at += length
        return found
