"""Remote batches: our member beside redis, memcached, Arrow Flight, grpcio and a bare socket, in turns in one run.

Servers run on one node, clients on another: two network namespaces joined by a cable, and the servers' shards are
hidden from the clients by a mount of their own. The interface's counters say that the bytes crossed. Where there
are no rights to make namespaces, all of it runs over loopback, and the rows say so.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from benchmarks.cache.local import WrongBytesError
from benchmarks.cache.order import batches, expected
from benchmarks.cache.players import PEERS, ROOT, Player, UnmeasuredError
from benchmarks.cache.sides.ours import config_in
from benchmarks.rows import make_row
from deeplink.cache.packer import pack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.cache.lab import Lab, Source
    from benchmarks.cache.players import Answer
    from benchmarks.rows import Row

SIZES = {4096: ("4 KiB", 1.0), 33_000: ("33 KB", 1.3)}
OURS, BARE = "remote.Ours", "remote.Bare"
CACHES = ("remote.Redis", "remote.Pymemcache", "remote.Pylibmc")
OTHERS = ("remote.Flight", "remote.RawGrpc")
_SERVER_OF = {
    OURS: "ours",
    BARE: "bare",
    "remote.Redis": "redis",
    "remote.Pymemcache": "memcached",
    "remote.Pylibmc": "memcached",
    "remote.Flight": "flight",
    "remote.RawGrpc": "grpc",
}
CONGESTION = "reno"
"""Of all sides: the one that every namespace may have. Where a machine's is BBR its pacing would be measured."""
_START_S = 20.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PASSES = 2
_SINGLES = 300


@dataclass(frozen=True, slots=True)
class Nodes:
    """Two nodes and what joins them.

    Attributes:
        servers, clients: names of their network namespaces; empty where all runs over loopback.
        host: the servers' address.
        device: the clients' interface; empty over loopback.
    """

    servers: str = ""
    clients: str = ""
    host: str = "127.0.0.1"
    device: str = ""

    def on_servers(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs another on the servers' node."""
        return [*(("ip", "netns", "exec", self.servers) if self.servers else ()), *command]

    def on_clients(self, command: Sequence[str], hidden: Path) -> list[str]:
        """Return the command that runs another on the clients' node, where a folder is empty."""
        if not self.clients:
            return list(command)
        hide = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden))
        return ["ip", "netns", "exec", self.clients, *hide, *command]

    def received(self) -> int:
        """Return the bytes that came in over the clients' interface so far; 0 over loopback."""
        if not self.clients:
            return 0
        counter = f"/sys/class/net/{self.device}/statistics/rx_bytes"
        return int(_said(["ip", "netns", "exec", self.clients, "cat", counter]))


def _said(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


@contextmanager
def nodes() -> Iterator[Nodes]:
    """Make two nodes and a cable, and take them away in the end; loopback where there are no rights to."""
    name = f"dlb{os.getpid() % 100_000}"
    found = Nodes(f"{name}s", f"{name}c", "10.98.77.1", f"{name}c")
    made = []
    try:
        for namespace in (found.servers, found.clients):
            _said(["ip", "netns", "add", namespace])
            made.append(namespace)
        ends = (f"{name}s", "netns", found.servers, "type", "veth", "peer", "name", found.device)
        _said(["ip", "link", "add", *ends, "netns", found.clients])
        for namespace, device, address in (
            (found.servers, f"{name}s", "10.98.77.1/30"),
            (found.clients, found.device, "10.98.77.2/30"),
        ):
            _said(["ip", "-n", namespace, "address", "add", address, "dev", device])
            _said(["ip", "-n", namespace, "link", "set", device, "up"])
            _said(["ip", "-n", namespace, "link", "set", "lo", "up"])
            congestion = f"net.ipv4.tcp_congestion_control={CONGESTION}"
            _said(["ip", "netns", "exec", namespace, "sysctl", "-qw", congestion])
    except (OSError, subprocess.CalledProcessError):
        for namespace in made:
            _said(["ip", "netns", "delete", namespace])
        yield Nodes()
        return
    try:
        yield found
    finally:
        for namespace in made:
            _said(["ip", "netns", "delete", namespace])


class Servers:
    """The servers' processes, all with the same samples.

    Args:
        where: the nodes.
        work: an own folder; clients see it, except `work/store`.
        source: the samples.
    """

    def __init__(self, where: Nodes, work: Path, source: Source) -> None:
        self._where, self._work, self._source = where, work, source
        self.addresses: dict[str, str | int] = {"size": source.size}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> dict[str, str]:
        """Start all of them and fill them; return those that could not be, and why."""
        self._work.mkdir()
        flat = self._work / "flat"
        with flat.open("wb") as out:
            for path in sorted(self._source.root.rglob("*.bin")):
                out.write(path.read_bytes())
        missing = {}
        for kind in dict.fromkeys(_SERVER_OF.values()):
            try:
                self._start_one(kind, flat)
            except (OSError, UnmeasuredError) as problem:
                missing[kind] = str(problem)
        (self._work / "servers.json").write_text(json.dumps(self.addresses), encoding="utf-8")
        return missing

    def _start_one(self, kind: str, flat: Path) -> None:
        if kind == "ours":
            self._start_ours()
        elif kind in {"redis", "memcached"}:
            self._start_cache(kind, flat)
        else:
            python = str(PEERS) if kind == "flight" else sys.executable
            script = [python, "-m", "benchmarks.cache.sample_server", kind, self._where.host]
            self._run(kind, [*script, str(flat), str(self._source.size)])
            self._note(kind, int(self._line(kind)))

    def _start_ours(self) -> None:
        config = config_in(self._work)
        pack(str(self._source.root), "bench", config=config)
        agent = [sys.executable, "-m", "deeplink", "node", "--name", "n0", "--bind", f"{self._where.host}:0"]
        options = ["--store", str(config.store), "--token-file", str(self._work / "token")]
        self._run(
            "ours", [*agent, *options], DEEPLINK_STATE=str(config.state), DEEPLINK_CATALOG=str(config.catalog)
        )
        self._note("ours", int(json.loads(self._line("ours"))["address"].rpartition(":")[2]))

    def _start_cache(self, kind: str, flat: Path) -> None:
        host, port = self._where.host, _free_port()
        room = str(2 * self._source.payload // (1 << 20) + 256)
        if kind == "redis":
            command = ["redis-server", "--bind", host, "--port", str(port), "--save", "", "--appendonly", "no"]
            command += ["--protected-mode", "no"]
        else:
            command = ["memcached", "-l", host, "-p", str(port), "-m", room, "-I", "4m", "-U", "0", "-u", "nobody"]
        if shutil.which(command[0]) is None:
            raise UnmeasuredError(f"{command[0]} is not installed")
        self._run(kind, command)
        self._note(kind, port)
        fill = [str(PEERS), "-m", "benchmarks.cache.fill_caches", kind, host, str(port), str(flat)]
        done = subprocess.run(
            self._where.on_clients([*fill, str(self._source.size)], self._store),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            raise UnmeasuredError(f"{kind} cannot be filled: {done.stderr.strip()[-300:]}")

    @property
    def _store(self) -> Path:
        store = self._work / "store"
        store.mkdir(exist_ok=True)
        return store

    def client(self, where: str, log: Path) -> Player:
        """Return a client's process, on the clients' node."""
        is_peer = where not in {OURS, BARE, "remote.RawGrpc"}
        command = [str(PEERS) if is_peer else sys.executable, "-m", "benchmarks.cache.child", where]
        return Player(where, log, self._where.on_clients(command, self._store))

    def _run(self, kind: str, command: Sequence[str], **variables: str) -> None:
        with (self._work / f"{kind}.log").open("ab") as log:
            self._processes[kind] = subprocess.Popen(
                self._where.on_servers(command),
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **variables},
            )

    def _line(self, kind: str) -> str:
        line = cast("IO[bytes]", self._processes[kind].stdout).readline().decode()
        if not line:
            log = (self._work / f"{kind}.log").read_text(encoding="utf-8", errors="replace").strip()
            raise UnmeasuredError(f"{kind} does not start: {log[-300:]}")
        return line

    def _note(self, kind: str, port: int) -> None:
        self.addresses[kind] = f"{self._where.host}:{port}"

    def cpu_s(self, kind: str) -> float:
        """Return the CPU time of a server so far, user and kernel, of its process and those below it."""
        own = self._processes[kind].pid
        below = Path(f"/proc/{own}/task/{own}/children").read_text(encoding="ascii").split()
        ticks = 0
        for pid in (own, *below):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / _TICKS

    def end(self) -> None:
        """End all of them."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            cast("IO[bytes]", process.stdout).close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@dataclass(slots=True)
class Client:
    """A client, and what its turns came to."""

    player: Player
    kind: str
    rates: list[float]
    cpu: list[float]
    server_cpu: list[float]
    singles_us: list[float]


def measure(lab: Lab) -> list[Row]:
    """Return all rows about remote reads."""
    rows: list[Row] = []
    with nodes() as where:
        if not where.clients:
            lab.missing["remote reads between namespaces"] = "no rights to make them: all of it over loopback"
        for size in SIZES:
            rows += _of_size(lab, where, size)
    return rows


def _of_size(lab: Lab, where: Nodes, size: int) -> list[Row]:
    source = lab.source(size)
    work = lab.work / f"remote-{size}"
    with ExitStack() as stack:
        servers = Servers(where, work, source)
        stack.callback(servers.end)
        missing = servers.start()
        clients: dict[str, Client] = {}
        for side, kind in _SERVER_OF.items():
            if kind in missing:
                lab.missing[f"remote reads, {size}: {side}"] = missing[kind]
                continue
            try:
                player = servers.client(side, lab.work / f"{side}.log")
                stack.callback(player.end)
                player.ask("open", source=str(source.root), packed=str(work))
                clients[side] = Client(player, kind, [], [], [], [])
            except UnmeasuredError as problem:
                lab.missing[f"remote reads, {size}: {side}"] = str(problem)
                lab.say(f"not measured: remote reads: {side}: {problem}")
        crossed = [_turns(lab, where, servers, source, clients) for _ in range(lab.scale.repeats)]
    shutil.rmtree(work)
    return _rows(size, clients, crossed, is_loopback=not where.clients)


def _turns(lab: Lab, where: Nodes, servers: Servers, source: Source, clients: dict[str, Client]) -> float:
    """Have each client read the same once, in an order drawn again; return the bytes on our wire per byte read."""
    seed, samples, crossed = lab.seed(), len(source.digests), 0.0
    wanted = expected(source.digests, chain.from_iterable(batches(seed, samples, samples))) * _PASSES
    for side in lab.order.sample(list(clients), len(clients)):
        client = clients[side]
        before, received = servers.cpu_s(client.kind), where.received()
        answer: Answer = client.player.ask(
            "random", seed=seed, samples=samples, count=samples, touch=True, passes=_PASSES
        )
        if answer.digest != wanted % (1 << 64):
            raise WrongBytesError(f"{side}: other bytes than were written")
        payload = answer.samples * source.size
        client.rates.append(payload / answer.seconds / 1e9)
        client.cpu.append(answer.cpu_s / payload * 1e9)
        client.server_cpu.append((servers.cpu_s(client.kind) - before) / payload * 1e9)
        if side == OURS:
            crossed = (where.received() - received) / payload
        single = client.player.ask("singles", seed=seed, samples=samples, count=min(_SINGLES, samples))
        client.singles_us.append(single.seconds * 1e6)
    return crossed


def _rows(size: int, clients: dict[str, Client], crossed: Sequence[float], *, is_loopback: bool) -> list[Row]:
    name, goal = SIZES[size]
    what = f"remote batches of 256, {name}" + (", loopback" if is_loopback else "")
    ours = clients[OURS]
    rows = []
    caches = [clients[side] for side in CACHES if side in clients]
    if caches:
        best = max(caches, key=lambda client: statistics.median(client.rates))
        rows.append(_over(f"{what}: the better of redis and memcached ({best.player.name})", ours, best, goal))
    if BARE in clients:
        rows.append(_over(f"{what}: bare socket", ours, clients[BARE], 0.65))
    others = [clients[side] for side in (*CACHES, *OTHERS) if side in clients]
    rows += [_over(f"{what}: {client.player.name}", ours, client, None) for client in others]
    for client in clients.values():
        rows += [
            make_row(f"{what}: {client.player.name}", client.rates, "GB/s"),
            make_row(f"{what}: {client.player.name}, client", client.cpu, "CPU s/GB"),
            make_row(f"{what}: {client.player.name}, server", client.server_cpu, "CPU s/GB"),
            make_row(f"one sample, {name}: {client.player.name}, p50", client.singles_us, "us"),
        ]
    if not is_loopback:
        rows.append(make_row(f"{what}: ours, bytes over the interface per byte read", crossed, at_least=1.0))
    return rows


def _over(row: str, ours: Client, theirs: Client, goal: float | None) -> Row:
    return make_row(row, [a / b for a, b in zip(ours.rates, theirs.rates, strict=True)], at_least=goal)
