"""10,000 nodes and 1e9 samples: what one launcher, one agent and one packer have to do, by the production's code.

`python -m benchmarks.scheduler.ten_thousand [--nodes N] [--seconds S] [--quick] [--json]` prints a table and
writes build/bench/ten_thousand.json. Exit code 0 whether figures are reached or not.

The launcher is the production's pool of agents with all N nodes, 32 on a leaf, in a process of its own. On the
other side a process answers for every leaf at an address of its own, with the production's server and as many of
its servicers as there are nodes: what it does not do is ask over the network within the leaf. That is measured on
one leaf of 32 real servers. Of the launcher's traffic the bytes that TCP brought are counted, both ways. Of 1e9
samples only the shards are made up, as many as samples of 4 KiB fill: nothing is read. Traffic and CPU are
those of one question to all, times the questions in a second; what pace this machine kept is a row of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import struct
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from benchmarks.program import hand_over, options
from benchmarks.rows import make_row
from deeplink.cache.membership import RendezvousOrder, standing
from deeplink.core.clock import SystemClock
from deeplink.core.publish import leave_members, read_members
from deeplink.core.types import Attempt, NodeName, ShardId, format_members
from deeplink.rpc.channel import allow_descriptors
from deeplink.rpc.grpc_server import BoundServer, bound_server
from deeplink.scheduler.launch import agent_pool
from deeplink.scheduler.launch.agent_monitor import POLL_S
from deeplink.scheduler.launch.agent_pool import AgentPool
from deeplink.scheduler.launch.ending import TICK_S
from deeplink.scheduler.launch.environment import Launch, NodeFacts, leave_launch, left_launch
from deeplink.scheduler.node.servicer import NodeServicer, add_to
from deeplink.v1 import node_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection

    import grpc

    from benchmarks.rows import Row

ON_A_LEAF, ON_A_SPINE = 32, 512
SAMPLES, SAMPLE_BYTES, SHARD_BYTES = 10**9, 4096, 256 << 20
_TOKEN = "t" * 43  # as long as one is
_ATTEMPT = Attempt(7, 0, 0)
_WARM_S = 8.0  # connections are made and the list is told
_SHARDS_MEASURED = 500


def _name(node: int) -> NodeName:
    return NodeName(f"n{node:05d}")


def _facts(node: int, address: str) -> NodeFacts:
    leaf = node // ON_A_LEAF
    return NodeFacts(
        node=_name(node),
        address=address,
        topology_address=f"core.spine{node // ON_A_SPINE}.leaf{leaf}.{_name(node)}",
        token_file=f"/run/user/1000/deeplink-{_name(node)}-0123456789/token",
        store="/local/ssd/deeplink-user",
        interface="ib0",
        pid=4711,
        weight=4096,
        domain=f"leaf{leaf}",
    )


def _servicer(node: int, nodes: int) -> NodeServicer:
    shards = -(-2 * SAMPLES * SAMPLE_BYTES // SHARD_BYTES // nodes)
    held = node_pb2.StoreStatus(
        shards=shards,
        bytes=shards * SHARD_BYTES,
        free_bytes=3 << 40,
        served_samples=SAMPLES,
        served_bytes=SAMPLES * SAMPLE_BYTES,
        verified_shards=shards,
        verified_bytes=shards * SHARD_BYTES,
        budget_bytes=4 << 40,
    )
    place = _facts(node, "").topology_address
    return NodeServicer(_name(node), place, lambda: held, boot_id="01234567-89ab-cdef-0123-456789abcdef")


class _EveryNode(NodeServicer):
    """Answers for each node that a question names, as that node's own servicer does."""

    def __init__(self, nodes: int) -> None:
        super().__init__(NodeName("every"), "", node_pb2.StoreStatus)
        self._nodes = {_name(node): _servicer(node, nodes) for node in range(nodes)}

    @override
    def Gather(self, request: node_pb2.GatherRequest, context: grpc.ServicerContext) -> node_pb2.GatherReply:
        """Answer a leaf's question without asking over the network."""
        answers = [
            node_pb2.GatheredStatus(
                node=one.node,
                number=request.number,
                status=self._nodes[NodeName(one.node)].Status(request.status, context),
            )
            for one in request.agents
        ]
        return node_pb2.GatherReply(answers=answers)


def _served(servicer: NodeServicer, bind: str, workers: int) -> BoundServer:
    bound = bound_server(bind, _TOKEN, lambda server: [add_to(server, servicer)], workers=workers)
    bound.server.start()
    return bound


def _serve(pipe: Connection, nodes: int, *, one_leaf: bool) -> None:
    """Say at which ports is served, until told to end: all nodes at one, or those of a leaf at one each."""
    allow_descriptors()
    if one_leaf:
        bound = [_served(_servicer(node, nodes), "127.0.0.1:0", 2) for node in range(ON_A_LEAF)]
    else:
        bound = [_served(_EveryNode(nodes), "0.0.0.0:0", 32)]
    pipe.send([one.port for one in bound])
    pipe.recv()
    os._exit(0)


class _AllUp:
    """The agents' starter, which has started all."""

    starter, doubt, gone = "bench", "", frozenset[NodeName]()

    def __init__(self, facts: Sequence[NodeFacts]) -> None:
        self._facts = list(facts)

    def announced(self) -> list[NodeFacts]:
        facts, self._facts = self._facts, []
        return facts

    def ended(self) -> int | None:
        return None

    def killed(self) -> frozenset[NodeName]:
        return frozenset()

    def last_words(self) -> str:
        return ""

    def abandon(self) -> None:
        return

    def stop(self) -> None:
        return


def _tcp_bytes() -> int:
    """Return how many bytes this process's open TCP connections have sent and received (tcp(7), TCP_INFO)."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as one:
                if one.type == socket.SOCK_STREAM and one.family in {socket.AF_INET, socket.AF_INET6}:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                    total += sum(struct.unpack_from("=QQ", info, 120))  # tcpi_bytes_acked, tcpi_bytes_received
    return total


def _asked(pool: AgentPool) -> float:
    """Return how often all nodes were asked, by the mean of the leaves."""
    leaves = pool._leaves._leaves.values()  # noqa: SLF001 - nobody else counts it
    return sum(leaf._rounds for leaf in leaves) / len(leaves)  # noqa: SLF001 - the same


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _launch(pipe: Connection, facts: Sequence[NodeFacts], seconds: float, server: int) -> None:
    """Watch over these nodes as `deeplink run` does, and say what that took."""
    allow_descriptors()
    agent_pool.FEW = min(agent_pool.FEW, len(facts) - 1)  # one leaf alone is gathered here, too
    before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    with tempfile.TemporaryDirectory() as folder:
        pool = AgentPool(_AllUp(facts), lambda _: _TOKEN, SystemClock(), folder=Path(folder))
        names = [one.name for one in facts]
        unheard: Any = None  # all are up
        pool.gather(names, len(names), logs="", told_to_end=lambda: False, unheard=unheard)

        def watch(for_s: float) -> float:
            silent = 0.0
            end = time.monotonic() + for_s
            while time.monotonic() < end:
                pool.tick(_ATTEMPT)
                silent = max(silent, *(one.answer_s for one in pool.silence().values()))
                time.sleep(TICK_S)
            return silent

        watch(_WARM_S)
        began, cpu, theirs, bytes_before = time.monotonic(), time.process_time(), _cpu_s(server), _tcp_bytes()
        asked_before = _asked(pool)
        silent = watch(seconds)
        took, rounds = time.monotonic() - began, _asked(pool) - asked_before
        pipe.send(
            {
                "bytes": (_tcp_bytes() - bytes_before) / rounds,
                "cpu_s": (time.process_time() - cpu) / rounds,
                "server_cpu_s": (_cpu_s(server) - theirs) / rounds,
                "pace": rounds * POLL_S / took,
                "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before_mib,
                "silent_s": silent,
            }
        )
        pipe.recv()
        os._exit(0)


def _watched(nodes: int, seconds: float, *, one_leaf: bool) -> dict[str, float]:
    """Return what watching over nodes took the launcher, and who answers it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    ours, launcher_end = context.Pipe()
    server = context.Process(target=_serve, args=(there, nodes), kwargs={"one_leaf": one_leaf}, daemon=True)
    server.start()
    there.close()
    try:
        ports = here.recv()
        hosts = ["127.0.0.1"] * nodes if one_leaf else [_loopback(node // ON_A_LEAF) for node in range(nodes)]
        facts = [_facts(node, f"{host}:{ports[node % len(ports)]}") for node, host in enumerate(hosts)]
        launcher = context.Process(target=_launch, args=(launcher_end, facts, seconds, server.pid), daemon=True)
        launcher.start()
        launcher_end.close()
        found: dict[str, float] = ours.recv()
    finally:
        for process in multiprocessing.active_children():
            process.kill()
            process.join()
    return found


def _loopback(leaf: int) -> str:
    return f"127.1.{leaf // 250}.{leaf % 250 + 1}"


def _timed(what: Callable[[], object], runs: int = 5) -> list[float]:
    """Return, per run, its milliseconds."""
    found = []
    for _ in range(runs):
        began = time.perf_counter()
        what()
        found.append((time.perf_counter() - began) * 1e3)
    return found


def _files(nodes: int) -> Iterator[Row]:
    facts = tuple(_facts(node, f"10.{node >> 16}.{node >> 8 & 255}.{node & 255}:34567") for node in range(nodes))
    ranks = (8,) * nodes
    launch = Launch(attempt=_ATTEMPT, nodes=facts, spares=(), ranks=ranks, master_port=1, passed_on={})
    with tempfile.TemporaryDirectory() as folder:
        path = leave_launch(launch, Path(folder))
        value = leave_members(Path(folder), format_members(launch.members))
        env = {"DEEPLINK_LAUNCH": path}
        yield make_row(
            f"{nodes:,} nodes: longest value in a rank's environment", [len(value)], "B", at_most=131_071
        )
        sizes = [Path(path).stat().st_size / 1024], [Path(value[1:]).stat().st_size / 1024]
        yield make_row(f"{nodes:,} nodes: file of the launch", sizes[0], "KiB")
        yield make_row(f"{nodes:,} nodes: file of the members", sizes[1], "KiB")
        yield make_row(f"{nodes:,} nodes: a rank reads its launch", _timed(lambda: left_launch(env)), "ms")
        yield make_row(f"{nodes:,} nodes: an agent reads the members", _timed(lambda: read_members(value)), "ms")


def _owners(nodes: int) -> Iterator[Row]:
    members = tuple(_facts(node, "h:1").member for node in range(nodes))
    known = standing(members)
    names = list(known.weight)
    yield make_row(
        f"{nodes:,} members: the order is prepared", _timed(lambda: RendezvousOrder(names, known)), "ms"
    )
    order = RendezvousOrder(names, known)
    shards = -(-SAMPLES * SAMPLE_BYTES // SHARD_BYTES)
    each = []
    for run in range(5):
        found = [
            ShardId(f"{number:040x}") for number in range(run * _SHARDS_MEASURED, (run + 1) * _SHARDS_MEASURED)
        ]
        began = time.perf_counter()
        for shard in found:
            order.owners(shard, 2)
        each.append((time.perf_counter() - began) / _SHARDS_MEASURED * 1e3)
    yield make_row(f"{nodes:,} members: two owners of a shard", each, "ms", at_most=0.2)
    everything = [one * shards / 1e3 for one in each]
    yield make_row(f"{nodes:,} members: owners of all {shards:,} shards of 1e9 samples of 4 KiB", everything, "s")


def _rows(nodes: int, seconds: float) -> Iterable[Row]:
    yield from _owners(nodes)
    yield from _files(nodes)
    found = _watched(nodes, seconds, one_leaf=False)
    what = f"{nodes:,} nodes asked every {POLL_S:g} s"
    yield make_row(f"{what}: launcher's traffic, both ways", [found["bytes"] / POLL_S / 1e6], "MB/s", at_most=10.0)
    yield make_row(f"{what}: CPU of the launcher", [found["cpu_s"] / POLL_S], "cores", at_most=1.0)
    yield make_row(f"{what}: memory of the launcher", [found["mib"]], "MiB")
    yield make_row(f"{what}: CPU of who answers for all", [found["server_cpu_s"] / POLL_S], "cores")
    yield make_row(f"{what}: pace that this machine kept", [found["pace"]], "of it", at_least=0.8)
    yield make_row(f"{what}: longest a node was not heard of", [found["silent_s"]], "s", at_most=1.5)
    leaf = _watched(ON_A_LEAF, seconds, one_leaf=True)
    what = f"a leaf of {ON_A_LEAF} agents, one of which asks the others every {POLL_S:g} s"
    yield make_row(f"{what}: CPU of all of them", [leaf["server_cpu_s"] / POLL_S], "cores")
    yield make_row(f"{what}: longest a node was not heard of", [leaf["silent_s"]], "s", at_most=1.5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write build/bench/ten_thousand.json."""
    parser = options("benchmarks.scheduler.ten_thousand", __doc__, quick="1,000 nodes for 5 s")
    parser.add_argument("--nodes", type=int, default=10_000, help="how many (default: 10000)")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long it is watched (default: 30)")
    asked = parser.parse_args(arguments)
    if asked.quick:
        asked.nodes, asked.seconds = 1_000, 5.0
    hand_over("ten_thousand", list(_rows(asked.nodes, asked.seconds)), as_json=asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
