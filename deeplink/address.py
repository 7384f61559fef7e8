"""Which of this machine's addresses other nodes reach it by, and which network interface carries it.

Asked of the kernel alone (its interfaces and its routing), nothing is sent.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.clock import SystemClock
from deeplink.resolving import UnresolvedError, addresses

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SIOCGIFCONF = 0x8912  # netdevice(7): list the interfaces that have an IPv4 address
_IFREQ_BYTES = 40 if struct.calcsize("P") == 8 else 32  # noqa: PLR2004 - size of a pointer
_MOST_INTERFACES = 256
_ANYWHERE = "203.0.113.1"  # RFC 5737: belongs to nobody, so the default route is what leads there
_PORT = 9  # any would do: connecting a datagram socket sends nothing


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
