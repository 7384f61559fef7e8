"""Really connecting: ports that a node opens for the others, and what comes of trying theirs."""

from __future__ import annotations

import errno
import os
import select
import socket
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from deeplink.daemon import member_name
from deeplink.errors import DeepLinkError
from deeplink.resolving import UnresolvedError, addresses
from deeplink.scheduler.doctor.running_settings import RANK_PORTS
from deeplink.scheduler.watch.agreement import asked_watchdog
from deeplink.tokens import TokenFileError, read_token

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from deeplink.clock import Clock
    from deeplink.config import Config

WATCH_S = 5.0
_AGAIN_S = 0.25
CONNECT_S = 3.0
"""Linux sends a second SYN after 1 s: a single lost packet is no closed port."""
_TRIED = (RANK_PORTS.start, 24_000, 28_000, RANK_PORTS.stop - 8)
_NEXT = 8  # ports tried one after another where one is taken
_AGENT_PORTS = 2  # an agent listens on two: control, samples
_MOST_PEERS = 16


@contextmanager
def opened_ports(host: str) -> Iterator[dict[str, tuple[int, ...]]]:
    """Listen where agents do (any free port) and where rank 0 does, until the end of the block.

    The kernel takes connections up by itself; nothing is ever read.
    """
    with ExitStack() as stack:
        agent = [_listening(stack, host, 0) for _ in range(_AGENT_PORTS)]
        rank = [_first_free(stack, host, start) for start in _TRIED]
        yield {"agent": tuple(filter(None, agent)), "rank": tuple(filter(None, rank))}


def _first_free(stack: ExitStack, host: str, start: int) -> int:
    return next((port for offset in range(_NEXT) if (port := _listening(stack, host, start + offset))), 0)


def _listening(stack: ExitStack, host: str, port: int) -> int:
    server = stack.enter_context(socket.socket(socket.AF_INET))
    try:
        server.bind((host, port))
        server.listen(4 * _MOST_PEERS)
    except OSError:
        return 0
    return int(server.getsockname()[1])


def peers_of(node: str, nodes: Sequence[str]) -> list[str]:
    """Return whom a node tries: all of a few; of many those 1, 2, 4, ... places on, so that each is tried.

    >>> peers_of("n1", ["n0", "n1", "n2"])
    ['n2', 'n0']
    """
    here = nodes.index(node)
    others = [nodes[(here + step) % len(nodes)] for step in range(1, len(nodes))]
    if len(others) <= _MOST_PEERS:
        return others
    return [others[(1 << power) - 1] for power in range(_MOST_PEERS) if (1 << power) <= len(others)]


def connected(targets: Sequence[tuple[str, int]], clock: Clock, within_s: float = CONNECT_S) -> list[str]:
    """Connect to all targets at once, and return what came of each: empty where it was connected, else why not.

    Args:
        targets: IPv4 addresses and ports.
        clock: time.
        within_s: bound on all of it, seconds.
    """
    outcomes = [f"no answer within {within_s:g} s"] * len(targets)
    poll = select.poll()
    waiting: dict[int, tuple[int, socket.socket]] = {}
    with ExitStack() as stack:
        for number, target in enumerate(targets):
            client = stack.enter_context(socket.socket(socket.AF_INET))
            client.settimeout(0.0)
            try:
                code = client.connect_ex(target)
            except OSError as problem:  # no address
                outcomes[number] = problem.strerror or str(problem)
                continue
            if code == errno.EINPROGRESS:
                waiting[client.fileno()] = (number, client)
                poll.register(client, select.POLLOUT)
            else:
                outcomes[number] = os.strerror(code) if code else ""
        deadline = clock.monotonic() + within_s
        while waiting and (left := deadline - clock.monotonic()) > 0:
            for descriptor, _ in poll.poll(left * 1000):
                number, client = waiting.pop(descriptor)
                poll.unregister(descriptor)
                code = client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                outcomes[number] = os.strerror(code) if code else ""
    return outcomes


def tried_peers(peers: Mapping[str, tuple[str, tuple[int, ...]]], clock: Clock) -> dict[str, dict[str, str]]:
    """Connect to every port of every peer; return what came of it by node and port."""
    targets = [(node, host, port) for node, (host, ports) in peers.items() for port in ports]
    outcomes = connected([(host, port) for _, host, port in targets], clock)
    found: dict[str, dict[str, str]] = {node: {} for node in peers}
    for (node, _, port), outcome in zip(targets, outcomes, strict=True):
        found[node][str(port)] = outcome
    return found


def tried_services(addresses: Sequence[str], clock: Clock) -> dict[str, str]:
    """Connect to `host:port` addresses; return what came of each."""
    found: dict[str, str] = {}
    targets: list[tuple[str, tuple[str, int]]] = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        ip = _resolved(host.strip("[]"), clock) if port.isdigit() else None
        if ip is None:
            found[address] = f"{host or address} is no host that is known here"
        else:
            targets.append((address, (ip, int(port))))
    outcomes = connected([target for _, target in targets], clock)
    return found | {address: outcome for (address, _), outcome in zip(targets, outcomes, strict=True)}


def _resolved(host: str, clock: Clock) -> str | None:
    try:
        found = addresses(host, 0, clock)
    except UnresolvedError:
        return None
    return next((str(where[0]) for family, _, _, _, where in found if family == socket.AF_INET), None)


def watchdog_answer(config: Config, clock: Clock) -> str | None:
    """Ask the watchdog as launchers and agents do; return what is wrong, empty where nothing is.

    None where it cannot be asked from here: no watchdog is configured, or a token that is cannot be read.
    """
    if not config.watch:
        return None
    if config.watch_token_file is None:
        return asked_watchdog(config.watch, timeout_s=WATCH_S) or _unproved(config.watch, config.node, clock)
    try:
        token = read_token(config.watch_token_file)
    except TokenFileError:
        return None  # the check of token files says so
    return asked_watchdog(config.watch, token, timeout_s=WATCH_S)


def _unproved(address: str, name: str, clock: Clock) -> str:
    """Have MUNGE vouch for this process to the watchdog; return what is wrong, empty where it decodes that.

    Whom it then believes is another question: a user who may not report for this node has proved who he is.
    """
    # Not above: see `asked_watchdog`.
    import grpc  # noqa: PLC0415

    from deeplink.scheduler.watch.watchdog_client import WatchdogClient  # noqa: PLC0415

    until = clock.monotonic() + WATCH_S
    while True:
        try:
            line = WatchdogClient(address, None, member_name(name))
            try:
                line.call(lambda _stub: None)
            finally:
                line.close()
        except grpc.RpcError as refused:
            status, said = refused.code(), str(refused.details())
            if status is grpc.StatusCode.PERMISSION_DENIED and not said.startswith("MUNGE:"):
                return ""
            if status is not grpc.StatusCode.RESOURCE_EXHAUSTED or clock.monotonic() >= until:
                return f"{status.name.lower().replace('_', ' ')}: {said}"
            clock.sleep(_AGAIN_S)  # every node of the doctor's step asks at this moment
        except DeepLinkError as problem:
            return str(problem)
        else:
            return ""
