"""This machine's network links: interfaces with their IPv4 networks and speeds, and where its routes lead.

Asked of the kernel through a socket and /proc/net, both of which belong to the network namespace we are in; /sys
belongs to whoever mounted it.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from deeplink.address import LocalAddress, local_addresses

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


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """An interface and one of its addresses.

    Attributes:
        network: the network the address is in, `10.1.0.0/16`.
        speed_mbps: as its driver says; 0 where it says nothing.
    """

    interface: str
    ip: str
    network: str
    speed_mbps: int = 0


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
            with contextlib.suppress(OSError):  # gone meanwhile: a container's, say
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
    with contextlib.suppress(OSError):  # the driver has nothing to say
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
