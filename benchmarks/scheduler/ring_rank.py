"""A rank of a data-parallel step: an all-reduce around the ring of ranks, in their order, as NCCL's rings go.

`python ring_rank.py FOLDER KIB STEPS`, as a task of srun or of `deeplink run`: it takes its place from RANK or
SLURM_PROCID, finds its neighbours by files in FOLDER, which all nodes see, and leaves RANK.json there: where it
ran, where the rank before it runs, and how long each step took. Standard library alone: eight of these share two
cores.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path

FOUND_S = 60.0
_NETWORK = ("10.77.0.1", 9)  # the sandbox's; nothing is sent


def own_address() -> str:
    """Return the address this node has on the fabric."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_NETWORK)
        return str(probe.getsockname()[0])


def put(folder: Path, name: str, said: object) -> None:
    """Leave a file that appears whole."""
    draft = folder / f".{name}"
    draft.write_text(json.dumps(said), encoding="utf-8")
    draft.replace(folder / name)


def awaited(folder: Path, name: str) -> dict[str, str]:
    """Return what another rank left, once it did."""
    end = time.monotonic() + FOUND_S
    while not (folder / name).exists():
        if time.monotonic() > end:
            raise SystemExit(f"no {name} after {FOUND_S:g} s")
        time.sleep(0.02)
    found: dict[str, str] = json.loads((folder / name).read_text(encoding="utf-8"))
    return found


def exactly(source: socket.socket, size: int) -> bytes:
    """Return so many bytes."""
    held = bytearray()
    while len(held) < size:
        data = source.recv(min(1 << 20, size - len(held)))
        if not data:
            raise SystemExit("the rank before went away")
        held += data
    return bytes(held)


def combined(one: bytes, other: bytes) -> bytes:
    """Return both as a reduction would; exclusive-or, which is quick without numpy."""
    return (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")).to_bytes(len(one), "big")


class Ring:
    """The ring, from one rank's place."""

    def __init__(self, before: socket.socket, after: socket.socket, rank: int, world: int) -> None:
        self._before, self._after, self._rank, self._world = before, after, rank, world

    def passed(self, part: bytes) -> bytes:
        """Hand a part to the rank behind while taking one from the rank before."""
        sender = threading.Thread(target=self._after.sendall, args=(part,))
        sender.start()
        taken = exactly(self._before, len(part))
        sender.join()
        return taken

    def all_reduce(self, parts: list[bytes]) -> list[bytes]:
        """Reduce-scatter, then all-gather: 2 (world - 1) hops of one part each."""
        rank, world = self._rank, self._world
        for hop in range(world - 1):
            taken = self.passed(parts[(rank - hop) % world])
            place = (rank - hop - 1) % world
            parts[place] = combined(parts[place], taken)
        for hop in range(world - 1):
            parts[(rank - hop) % world] = self.passed(parts[(rank - hop + 1) % world])
        return parts


def main() -> None:
    """Join the ring, time the steps, leave what was seen."""
    folder, part, steps = Path(sys.argv[1]), int(sys.argv[2]) << 10, int(sys.argv[3])
    env = os.environ
    rank = int(env.get("RANK", env.get("SLURM_PROCID", "0")))
    world = int(env.get("WORLD_SIZE", env.get("SLURM_NTASKS", "1")))
    leaf = env.get("SLURM_TOPOLOGY_ADDR", "").split(".")[-2:-1]
    here = {"node": env.get("SLURMD_NODENAME", socket.gethostname()), "leaf": leaf[0] if leaf else ""}
    with socket.create_server(("", 0)) as server:
        put(folder, f"{rank}.place", {**here, "address": own_address(), "port": str(server.getsockname()[1])})
        server.settimeout(FOUND_S)
        behind = awaited(folder, f"{(rank + 1) % world}.place")
        after = socket.create_connection((behind["address"], int(behind["port"])), timeout=FOUND_S)
        before, _ = server.accept()
    for link in (before, after):
        link.settimeout(FOUND_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ring = Ring(before, after, rank, world)
    told = json.loads(ring.passed(struct.pack("256s", json.dumps(here).encode())).rstrip(b"\0"))
    took, right = [], True
    for step in range(steps):
        parts = [bytes([1 << (rank % 8)]) * part for _ in range(world)]
        ring.passed(b".")
        began = time.monotonic()
        done = ring.all_reduce(parts)
        took.append(time.monotonic() - began)
        expected = 0
        for one in range(world):
            expected ^= 1 << (one % 8)
        right = right and all(set(found) == {expected} for found in done)
        print(f"rank {rank} on {here['node']} ({here['leaf']}): step {step} {took[-1]:.3f} s", flush=True)
    put(folder, f"{rank}.json", {"rank": rank, **here, "before": told, "steps_s": took, "right": right})


if __name__ == "__main__":
    main()
