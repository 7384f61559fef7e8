"""Clients that ask for batches of samples by row, each of a server that `benchmarks.cache.transport` started.

What is opened is a folder with `servers.json`: kind of server -> its `host:port`; ours finds its catalog there.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from typing_extensions import override

from benchmarks.cache.sides.base import Side

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.cache.sides.base import Batches

COUNT = struct.Struct("<I")


class Remote(Side):
    """A client; `server` says of what."""

    kept = "remote"
    server: ClassVar[str]

    @override
    def open(self, source: Path, packed: Path) -> None:
        said = json.loads((packed / "servers.json").read_text(encoding="utf-8"))
        self.size: int = said["size"]
        host, _, port = said[self.server].rpartition(":")
        self.connect(host, int(port), packed)

    def connect(self, host: str, port: int, packed: Path) -> None:
        """Connect to the server."""
        raise NotImplementedError


class Ours(Remote):
    """A reader on a node that holds nothing."""

    name = "ours, from a member"
    server = "ours"
    settings = "Reader.batch on a node without shards, one member; every sample's checksum compared"

    @override
    def connect(self, host: str, port: int, packed: Path) -> None:
        from deeplink.cache.reader import Reader  # noqa: PLC0415 - the peers' environment lacks what it needs
        from deeplink.core.config import Config  # noqa: PLC0415 - as above

        self.reader = Reader.open(
            "bench",
            config=Config(
                catalog=packed / "catalog",
                store=packed / "no-store",
                state=packed / "state",
                members=f"n0={host}:{port}",
                node="reader",
                fill_on_miss=False,
                token_file=packed / "token",
            ),
        )
        self.reader.batch([0])  # it connects when it first reads

    @override
    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        for rows in wanted:
            yield self.reader.batch(rows).views()
        stats = self.reader.stats()
        if stats.failures or stats.source_samples or stats.local_samples:
            raise RuntimeError(f"not all came from the member: {stats}")

    @override
    def close(self) -> None:
        if hasattr(self, "reader"):
            self.reader.close()


class Bare(Remote):
    """A socket, row numbers one way, bytes the other."""

    name = "bare socket"
    server = "bare"
    settings = "blocking socket; sendmsg of slices of a mapped file, recv_into one arena; no checksum, no status"

    @override
    def connect(self, host: str, port: int, packed: Path) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @override
    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        for rows in wanted:
            self.socket.sendall(COUNT.pack(len(rows)) + np.asarray(rows, "<u4").tobytes())
            arena = memoryview(np.empty(len(rows) * self.size, np.uint8).data)
            done = 0
            while done < len(arena):
                done += self.socket.recv_into(arena[done:], 0, socket.MSG_WAITALL)
            yield [arena[start : start + self.size] for start in range(0, len(arena), self.size)]

    @override
    def close(self) -> None:
        if hasattr(self, "socket"):
            self.socket.close()


class Redis(Remote):
    """MGET."""

    name = "redis"
    server = "redis"
    is_peer = True
    settings = "MGET of a batch; redis-py with hiredis, TCP; no persistence"

    @override
    def connect(self, host: str, port: int, packed: Path) -> None:
        import redis  # noqa: PLC0415 - only in the peers' environment

        self.client: Any = redis.Redis(host, port)

    @override
    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        for rows in wanted:
            yield self.client.mget([b"%d" % row for row in rows])


class Pymemcache(Remote):
    """get_many, in Python."""

    name = "memcached, pymemcache"
    server = "memcached"
    is_peer = True
    settings = "get_many of a batch; pymemcache, no_delay"

    @override
    def connect(self, host: str, port: int, packed: Path) -> None:
        from pymemcache.client.base import Client  # noqa: PLC0415 - only in the peers' environment

        self.client: Any = Client((host, port), no_delay=True)

    @override
    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        for rows in wanted:
            names = [str(row) for row in rows]
            found = self.client.get_many(names)
            yield [found[name] for name in names]


class Pylibmc(Remote):
    """get_multi, in C."""

    name = "memcached, pylibmc"
    server = "memcached"
    is_peer = True
    settings = "get_multi of a batch; pylibmc, binary protocol, tcp_nodelay, no_block"

    @override
    def connect(self, host: str, port: int, packed: Path) -> None:
        import pylibmc  # noqa: PLC0415 - only in the peers' environment

        behaviors = {"tcp_nodelay": True, "no_block": True}
        self.client: Any = pylibmc.Client([f"{host}:{port}"], binary=True, behaviors=behaviors)

    @override
    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        for rows in wanted:
            names = [str(row) for row in rows]
            found = self.client.get_multi(names)
            yield [found[name] for name in names]


class Flight(Remote):
    """DoExchange that stays open."""

    name = "Arrow Flight DoExchange"
    server = "flight"
    is_peer = True
    settings = (
        "pyarrow.flight, one exchange that stays open, a batch is one binary column of one row, concatenated"
    )

    @override
    def connect(self, host: str, port: int, packed: Path) -> None:
        from pyarrow import flight  # noqa: PLC0415 - only the peers' environment is sure to have it

        self.client: Any = flight.connect(f"grpc://{host}:{port}")
        self.writer, self.reader = self.client.do_exchange(flight.FlightDescriptor.for_command(b"rows"))

    @override
    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        for rows in wanted:
            self.writer.write_metadata(np.asarray(rows, "<u4").tobytes())
            whole = memoryview(self.reader.read_chunk().data.column(0)[0].as_buffer())
            yield [whole[start : start + self.size] for start in range(0, len(whole), self.size)]


class RawGrpc(Remote):
    """A stream of raw bytes that stays open, with grpcio at both ends."""

    name = "grpcio, raw bytes"
    server = "grpc"
    settings = "grpcio, a bidirectional stream that stays open, no serializers, a batch is one message"

    @override
    def connect(self, host: str, port: int, packed: Path) -> None:
        import queue  # noqa: PLC0415 - as below

        import grpc  # noqa: PLC0415 - the peers' environment lacks it

        options = [("grpc.max_receive_message_length", 64 << 20)]
        self.channel: Any = grpc.insecure_channel(f"{host}:{port}", options=options)
        self.asked: Any = queue.SimpleQueue()
        self.answers: Any = self.channel.stream_stream("/bench/Read")(iter(self.asked.get, None))

    @override
    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        for rows in wanted:
            self.asked.put(np.asarray(rows, "<u4").tobytes())
            whole = memoryview(next(self.answers))
            yield [whole[start : start + self.size] for start in range(0, len(whole), self.size)]

    @override
    def close(self) -> None:
        if hasattr(self, "channel"):
            self.asked.put(None)
            self.channel.close()
