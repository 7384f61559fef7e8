"""Stand-ins for the launchers and agents of a large cluster: what they say to a watchdog, over real gRPC.

`python -m benchmarks.watchdog.crowd ADDRESS SECRET_FILE CAST` reads the watchdog's secret and a cast (JSON: jobs
with their nodes, nodes that have a standing agent) and beats for each of them, until standard input ends. Lines on
standard input change the parts: `mute NODE` and the node's launcher misses its agent from now on, `heal NODE` and
it hears it again. A last line of JSON tells how many calls were made and how long they took.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio

from deeplink.core.types import Attempt, NodeName
from deeplink.rpc.tokens import TOKEN_HEADER, read_token
from deeplink.scheduler.liveness.heartbeats import beat_to_wire
from deeplink.scheduler.recovery.records import Beat, NodeRecord, Phase, ProgressPoint
from deeplink.scheduler.watch.authorizer import Caller, TokenMint
from deeplink.v1 import watch_pb2, watch_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BEAT_S, ATTEND_S, CALL_S = 1.0, 5.0, 5.0
"""As launchers and standing agents do."""
_CHANNELS = 64
"""Connections in all: each launcher has one of its own in life; here some share, for files' sake."""


@dataclass(slots=True)
class Crowd:
    """Everybody who speaks, and what was measured.

    Attributes:
        muted: nodes not heard by their launcher, and since when, monotonic.
        took_s: of each call that was answered.
        failed: calls that were not.
    """

    address: str
    token: str
    muted: dict[str, float] = field(default_factory=dict)
    took_s: list[float] = field(default_factory=list)
    failed: int = 0

    async def play(self, jobs: dict[str, list[str]], standing: list[str]) -> None:
        """Speak until cancelled."""
        metadata = ((TOKEN_HEADER, self.token),)
        channels = [
            grpc.aio.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)])
            for _ in range(min(_CHANNELS, len(jobs) + len(standing)))
        ]
        stubs = [watch_pb2_grpc.WatchStub(channel) for channel in channels]

        def launcher(number: int, job: int, nodes: list[str]) -> Callable[[], Awaitable[object]]:
            stub, steps = stubs[number % len(stubs)], iter(range(1, 1 << 30))
            beat = Beat(
                attempt=Attempt(job, 0, 0),
                phase=Phase.RUNNING,
                user="root",
                job_name="crowd",
                nodes=tuple(NodeName(name) for name in nodes),
                world_size=8 * len(nodes),
                step_timeout_s=600.0,
            )

            async def tell() -> None:
                now, step = time.time(), next(steps)
                told = replace(
                    beat,
                    node_beats=tuple(self._heard(name, job) for name in nodes),
                    progress=(ProgressPoint(attempt=beat.attempt, step=step, unix=now, metrics={"loss": 1.0}),),
                )
                await stub.Beat(beat_to_wire(told), timeout=CALL_S, metadata=metadata)

            return tell

        def agent(number: int, name: str) -> Callable[[], Awaitable[object]]:
            stub = stubs[number % len(stubs)]

            async def tell() -> None:
                request = watch_pb2.AttendRequest(node=name, boot_id="0", unix=time.time(), free_bytes=1 << 40)
                await stub.Attend(request, timeout=CALL_S, metadata=metadata)

            return tell

        speakers = [
            self._speak(launcher(number, int(job), nodes), BEAT_S, number / len(jobs))
            for number, (job, nodes) in enumerate(jobs.items())
        ]
        speakers += [
            self._speak(agent(number, name), ATTEND_S, number / len(standing))
            for number, name in enumerate(standing)
        ]
        await asyncio.gather(*speakers)

    def _heard(self, name: str, job: int) -> NodeRecord:
        since = self.muted.get(name)
        silent_s = 0.1 if since is None else time.monotonic() - since
        return NodeRecord(name=NodeName(name), silent_s=silent_s, job=job)

    async def _speak(self, tell: Callable[[], Awaitable[object]], every_s: float, share: float) -> None:
        await asyncio.sleep(share * every_s)
        while True:
            began = time.monotonic()
            try:
                await tell()
                self.took_s.append(time.monotonic() - began)
            except grpc.aio.AioRpcError:
                self.failed += 1
            await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began)))


async def _follow(crowd: Crowd) -> None:
    """Do what standard input says, until it ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().split():
        word, node = line
        if word == "mute":
            crowd.muted[node] = time.monotonic()
        else:
            crowd.muted.pop(node, None)


async def _run(crowd: Crowd, roles: dict[str, Any]) -> None:
    playing = asyncio.create_task(crowd.play(roles["jobs"], roles["standing"]))
    following = asyncio.create_task(_follow(crowd))
    await asyncio.wait({playing, following}, return_when=asyncio.FIRST_COMPLETED)
    if playing.done():
        playing.result()
    playing.cancel()
    took = sorted(crowd.took_s) or [0.0]
    told = {
        "calls": len(crowd.took_s),
        "failed": crowd.failed,
        "median_ms": 1e3 * took[len(took) // 2],
        "p99_ms": 1e3 * took[int(0.99 * len(took))],
    }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    everybody = Crowd(
        sys.argv[1],
        TokenMint(read_token(Path(sys.argv[2]))).token(Caller(uid=os.getuid()), time.time() + 86_400.0),
    )
    asyncio.run(_run(everybody, json.loads(Path(sys.argv[3]).read_text(encoding="utf-8"))))
