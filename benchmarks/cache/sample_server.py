"""Serves the samples of one flat file by row, in one of several ways, for `benchmarks.cache.transport`.

python -m benchmarks.cache.sample_server bare|grpc|flight HOST FLAT SIZE

Its first line says its port.
"""

from __future__ import annotations

import mmap
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

COUNT = struct.Struct("<I")
_IOV_MAX = 1024


class Samples:
    """A mapped file of samples of one size."""

    def __init__(self, path: Path, size: int) -> None:
        with path.open("rb") as file:
            self._whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self._size = size

    def of(self, rows: Iterable[int]) -> list[memoryview]:
        """Return views of samples."""
        whole, size = self._whole, self._size
        return [whole[row * size : (row + 1) * size] for row in rows]


def _received(peer: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = peer.recv(size - len(found), socket.MSG_WAITALL)
        if not more:
            raise EOFError
        found += more
    return found


def _answer(peer: socket.socket, samples: Samples) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        while True:
            (count,) = COUNT.unpack(_received(peer, COUNT.size))
            rows = memoryview(_received(peer, count * 4)).cast("I").tolist()
            parts = samples.of(rows)
            while parts:
                sent = peer.sendmsg(parts[:_IOV_MAX])
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]
    except (EOFError, ConnectionError):
        peer.close()


def bare(host: str, samples: Samples) -> None:
    """Serve over plain sockets, a thread per connection."""
    with socket.create_server((host, 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            peer, _ = server.accept()
            threading.Thread(target=_answer, args=(peer, samples), daemon=True).start()


def grpcio(host: str, samples: Samples) -> None:
    """Serve a stream of raw bytes with grpcio."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - the peers' environment lacks grpcio

    import grpc  # noqa: PLC0415 - as above

    def read(requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            yield b"".join(samples.of(memoryview(request).cast("I").tolist()))

    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.max_send_message_length", 64 << 20)])
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"Read": grpc.stream_stream_rpc_method_handler(read)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    port = server.add_insecure_port(f"{host}:0")
    server.start()
    print(port, flush=True)
    server.wait_for_termination()


def flight(host: str, samples: Samples) -> None:
    """Serve DoExchange with Arrow Flight."""
    import pyarrow as pa  # noqa: PLC0415 - only this way needs it
    from pyarrow import flight as arrow_flight  # noqa: PLC0415 - as above

    schema = pa.schema([("body", pa.large_binary())])

    class Server(arrow_flight.FlightServerBase):  # type: ignore[misc]
        def do_exchange(self, _context: Any, _descriptor: Any, reader: Any, writer: Any) -> None:
            writer.begin(schema)
            for chunk in reader:
                rows = memoryview(chunk.app_metadata).cast("I").tolist()
                body = b"".join(samples.of(rows))
                sizes = pa.py_buffer(struct.pack("<qq", 0, len(body)))
                column = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, sizes, pa.py_buffer(body)])
                writer.write_batch(pa.record_batch([column], schema=schema))

    server = Server(f"grpc://{host}:0")
    print(server.port, flush=True)
    server.serve()


def main() -> None:
    """Serve until told to end."""
    kind, host, path, size = sys.argv[1:]
    {"bare": bare, "grpc": grpcio, "flight": flight}[kind](host, Samples(Path(path), int(size)))


if __name__ == "__main__":
    main()
