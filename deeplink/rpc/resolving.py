"""Addresses of hosts, resolved without waiting long; this machine's own addresses, links and routes.

gRPC's own resolver asks name servers alone: where those are silent it finds what /etc/hosts says late. Links and
routes come through a socket and /proc/net, which belong to our network namespace; /sys may belong to another.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
import threading
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.core.clock import SystemClock
from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from deeplink.core.clock import Clock

    Address = tuple[int, int, int, str, tuple[Any, ...]]

_SIOCGIFCONF = 0x8912  # netdevice(7): list the interfaces that have an IPv4 address
_IFREQ_BYTES = 40 if struct.calcsize("P") == 8 else 32  # noqa: PLR2004 - size of a pointer
_MOST_INTERFACES = 256
_ANYWHERE = "203.0.113.1"  # RFC 5737: belongs to no one, so the default route is what leads there
_PORT = 9  # any would do: connecting a datagram socket sends nothing
_SIOCGIFFLAGS, _SIOCGIFNETMASK, _SIOCETHTOOL = 0x8913, 0x891B, 0x8946  # netdevice(7), sockios.h
_IFF_RUNNING = 0x40
_ETHTOOL_GSET, _ETHTOOL_CMD_BYTES = 1, 44
_ETHTOOL_GDRVINFO, _ETHTOOL_DRVINFO_BYTES = 3, 196
_UNKNOWN_SPEEDS = {0, 0xFFFF, 0xFFFFFFFF}
_INVENTING = {b"tun", b"veth"}
"""Drivers that tell a speed (10 Gb/s) that nothing stands behind: a tunnel's would beat a real gigabit."""
_NAME_BYTES = 16
ROUTES = Path("/proc/net/route")
_RTF_UP, _RTF_REJECT = 0x1, 0x200
MOST_ROUTES = 256
"""More are left out, the narrowest first: a node that routes for containers has one for each."""
_WAIT_S = 1.0
_KNOWN_S = 60.0
"""How long an answer is used without another question."""
_MOST_KNOWN = 65_536
"""Hosts whose answers are kept: those of the largest clusters, several times."""


class UnresolvedError(DeepLinkError):
    """A host's address is not known."""

    def __init__(self, host: str, problem: str) -> None:
        super().__init__(
            f"the address of {host!r} is not known: {problem}",
            remedy=f"`getent hosts {host}` shows what is known.",
        )
        self.host, self.problem = host, problem


class _Names:
    """The known answers, and who is asked now; one question for each host, however many callers wait."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: dict[str, tuple[float, list[Address]]] = {}
        self.asked: dict[str, Future[list[Address]]] = {}

    def forked(self) -> None:
        """Forget the questions: their threads are not in this process."""
        self.lock, self.asked = threading.Lock(), {}

    def begin(self, host: str, clock: Clock) -> tuple[Future[list[Address]], bool]:
        """Return the question under way and whether it began now."""
        with self.lock:
            question = self.asked.get(host)
            if question is not None:
                return question, False
            question = self.asked[host] = Future()
        # A thread of its own, for there is no other way to end the wait. What comes late is kept all the same.
        threading.Thread(
            target=self._ask, args=(host, question, clock), name="deeplink-names", daemon=True
        ).start()
        return question, True

    def _ask(self, host: str, question: Future[list[Address]], clock: Clock) -> None:
        try:
            found = _looked_up(host, 0)
        except BaseException as problem:  # noqa: BLE001 - raised again where it is waited for
            with self.lock:
                self.asked.pop(host, None)
            question.set_exception(problem)
            return
        with self.lock:
            while len(self.known) >= _MOST_KNOWN and host not in self.known:
                del self.known[next(iter(self.known))]
            self.known[host] = clock.monotonic() + _KNOWN_S, found
            self.asked.pop(host, None)
        question.set_result(found)


_names = _Names()
os.register_at_fork(after_in_child=_names.forked)


def addresses(host: str, port: int, clock: Clock) -> list[Address]:
    """Return what `getaddrinfo` says of a host; for a number at once, for a name within a second.

    An answer is kept: for a minute it is used as it is, and beyond that where no other comes.
    """
    return _at(port, _ended(host, _begun(host, clock), _WAIT_S))


def addresses_of_all(targets: Collection[tuple[str, int]], clock: Clock) -> dict[tuple[str, int], list[Address]]:
    """Return what `addresses` does of many hosts and ports, within a second in all; without those not known.

    A question that was under way before is not waited for: who asks often would wait each time.
    """
    with _names.lock:
        before = set(_names.asked)
    begun: dict[str, list[Address] | Future[list[Address]]] = {}
    for host in {host for host, _ in targets}:
        with suppress(UnresolvedError):
            begun[host] = _begun(host, clock)
    wait([one for host, one in begun.items() if isinstance(one, Future) and host not in before], _WAIT_S)
    found: dict[str, list[Address]] = {}
    for host, question in begun.items():
        with suppress(UnresolvedError):
            found[host] = _ended(host, question, 0)
    return {(host, port): _at(port, found[host]) for host, port in targets if host in found}


def _looked_up(host: str, flags: int) -> list[Address]:
    return list(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=flags | socket.AI_NUMERICSERV))


def _at(port: int, found: list[Address]) -> list[Address]:
    return [
        (family, kind, protocol, name, (address[0], port, *address[2:]))
        for family, kind, protocol, name, address in found
    ]


def _begun(host: str, clock: Clock) -> list[Address] | Future[list[Address]]:
    """Return a host's addresses where they are at hand, else the question for them."""
    try:
        return _looked_up(host, socket.AI_NUMERICHOST)
    except socket.gaierror as problem:
        if problem.errno != socket.EAI_NONAME:
            raise UnresolvedError(host, str(problem)) from problem
    except (OSError, UnicodeError) as problem:
        raise UnresolvedError(host, str(problem)) from problem
    until, known = _names.known.get(host, (0.0, []))
    if known and until >= clock.monotonic():
        return known
    question, is_new = _names.begin(host, clock)
    return question if is_new or not known else known  # one caller waits for the answer; that is enough


def _ended(host: str, begun: list[Address] | Future[list[Address]], wait_s: float) -> list[Address]:
    """Return the answer to a question; what was known before where none comes in time."""
    if isinstance(begun, list):
        return begun
    _, known = _names.known.get(host, (0.0, []))
    try:
        return begun.result(wait_s)
    except TimeoutError:
        if known:
            return known
        raise UnresolvedError(host, "no answer in time: does the name server answer?") from None
    except (OSError, UnicodeError) as problem:
        if known and isinstance(problem, socket.gaierror) and problem.errno == socket.EAI_AGAIN:
            return known
        raise UnresolvedError(host, str(problem)) from problem


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port` (`[v6]:port` for IPv6).

    >>> split_address("10.0.0.7:7411"), split_address("[fe80::1]:7411")
    (('10.0.0.7', 7411), ('fe80::1', 7411))
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


# Which of this machine's addresses other nodes reach it by, and which network interface carries it.


@dataclass(frozen=True, slots=True)
class LocalAddress:
    """An IPv4 address of this machine and the interface that carries it."""

    ip: str
    interface: str


LOOPBACK = LocalAddress("127.0.0.1", "lo")


def local_addresses() -> tuple[LocalAddress, ...]:
    """Return every IPv4 address of every interface that is up, in the kernel's order."""
    room = array.array("B", bytes(_IFREQ_BYTES * _MOST_INTERFACES))
    where, _ = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        answer = fcntl.ioctl(asker.fileno(), _SIOCGIFCONF, struct.pack("iP", len(room), where))
    used = struct.unpack("iP", answer)[0]
    listing = room.tobytes()[:used]
    return tuple(
        LocalAddress(
            socket.inet_ntoa(listing[start + 20 : start + 24]),
            listing[start : start + 16].split(b"\0", 1)[0].decode(),
        )
        for start in range(0, used, _IFREQ_BYTES)
    )


def _source_towards(destination: str) -> str | None:
    """Return the address the kernel would send from; None where no route leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            asker.connect((destination, _PORT))
        except OSError:
            return None
        return str(asker.getsockname()[0])


def _address_of_name(name: str) -> str | None:
    try:
        found = addresses(name, 0, SystemClock())
    except UnresolvedError:
        return None
    return next((str(where[0]) for family, _, _, _, where in found if family == socket.AF_INET), None)


def _candidates(env: Mapping[str, str]) -> Iterator[str | None]:
    # Slurm's own idea of this node comes first: it is what the other nodes of the job are known to reach.
    for variable in ("SLURMD_NODENAME", "HOSTNAME"):
        if env.get(variable):
            yield _address_of_name(env[variable])
    if env.get("SLURM_LAUNCH_NODE_IPADDR"):
        yield _source_towards(env["SLURM_LAUNCH_NODE_IPADDR"])
    yield _source_towards(_ANYWHERE)
    for address in local_addresses():
        yield address.ip


def primary_address(env: Mapping[str, str] | None = None) -> LocalAddress:
    """Return the address other nodes reach this one by; loopback where there is no other.

    In this order: what this node's Slurm name stands for, the address towards the node that launched us, the
    address of the default route, any address. Loopback addresses and addresses of other machines do not count.
    """
    carriers = {address.ip: address for address in local_addresses()}
    for ip in _candidates(os.environ if env is None else env):
        if ip in carriers and not ipaddress.IPv4Address(ip).is_loopback:
            return carriers[ip]
    return LOOPBACK


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """An interface and one of its addresses."""

    interface: str
    ip: str
    network: str  # the network the address is in, `10.1.0.0/16`
    speed_mbps: int = 0  # as its driver says; 0 where it says nothing


@dataclass(frozen=True, slots=True)
class Route:
    """Packets to `network` leave through `interface`."""

    network: str
    interface: str


def links() -> tuple[InterfaceAddress, ...]:
    """Return every interface that can carry traffic to other machines, with each of its IPv4 addresses."""
    found: list[InterfaceAddress] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for address in local_addresses():
            with suppress(OSError):  # gone meanwhile: a container's, say
                found += _links_of(asker, address)
    return tuple(found)


def _links_of(asker: socket.socket, address: LocalAddress) -> tuple[InterfaceAddress, ...]:
    ip = ipaddress.IPv4Address(address.ip)
    if ip.is_loopback or ip.is_link_local or not _running(asker, address.interface):
        return ()
    mask = _netmask(asker, address.interface)
    network = ipaddress.IPv4Network(f"{address.ip}/{mask}", strict=False)
    # An address beside the first has a label of its own: `eth0:1` is carried by eth0.
    name = address.interface.partition(":")[0]
    return (InterfaceAddress(name, address.ip, str(network), _speed(asker, name)),)


def _asked(asker: socket.socket, request: int, interface: str) -> bytes:
    return fcntl.ioctl(asker.fileno(), request, struct.pack("16s24x", interface.encode()))


def _running(asker: socket.socket, interface: str) -> bool:
    flags: int = struct.unpack_from("H", _asked(asker, _SIOCGIFFLAGS, interface), _NAME_BYTES)[0]
    return bool(flags & _IFF_RUNNING)


def _netmask(asker: socket.socket, interface: str) -> str:
    # A second address with a label is asked for by its label.
    return socket.inet_ntoa(_asked(asker, _SIOCGIFNETMASK, interface)[20:24])


def _told_by_driver(asker: socket.socket, command: int, size: int, interface: str) -> array.array[int]:
    room = array.array("B", struct.pack("I", command).ljust(size, b"\0"))
    where, _ = room.buffer_info()
    fcntl.ioctl(asker.fileno(), _SIOCETHTOOL, struct.pack("16sP16x", interface.encode(), where))
    return room


def _speed(asker: socket.socket, interface: str) -> int:
    with suppress(OSError):  # the driver has nothing to say
        driver = _told_by_driver(asker, _ETHTOOL_GDRVINFO, _ETHTOOL_DRVINFO_BYTES, interface)
        if driver.tobytes()[4:36].split(b"\0", 1)[0] in _INVENTING:
            return 0
        room = _told_by_driver(asker, _ETHTOOL_GSET, _ETHTOOL_CMD_BYTES, interface)
        low: int = struct.unpack_from("H", room, 12)[0]
        high: int = struct.unpack_from("H", room, 28)[0]
        speed = high << 16 | low
        return 0 if speed in _UNKNOWN_SPEEDS else speed
    return 0


def routes() -> tuple[Route, ...]:
    """Return where this machine's IPv4 routes lead, in the kernel's order: narrowest first, then by metric."""
    try:
        return parse_routes(ROUTES.read_text(encoding="ascii"))
    except (OSError, ValueError):  # ValueError: names and fields that are none of ours to know
        return ()


def parse_routes(text: str) -> tuple[Route, ...]:
    r"""Return the routes in a text of /proc/net/route.

    >>> parse_routes("Iface ...\neth1 0000630A 00000000 0001 0 0 0 00FFFFFF 0 0 0\n")
    (Route(network='10.99.0.0/24', interface='eth1'),)
    """
    found = []
    for line in text.splitlines()[1:]:
        interface, destination, _, flags, _, _, metric, mask, *_ = line.split()
        if int(flags, 16) & (_RTF_UP | _RTF_REJECT) != _RTF_UP:
            continue
        network = ipaddress.IPv4Network((_address(destination), _address(mask)), strict=False)
        found.append((-network.prefixlen, int(metric), Route(str(network), interface)))
    found.sort(key=lambda one: one[:2])
    return tuple(route for _, _, route in found[-MOST_ROUTES:])


def _address(text: str) -> str:
    return socket.inet_ntoa(struct.pack("=I", int(text, 16)))
