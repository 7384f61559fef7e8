"""Network interfaces and InfiniBand ports: links that are down, slower than they were, flap or make errors."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.scheduler.node.check_result import (
    Complaint,
    Counters,
    Look,
    NodeCheck,
    Recent,
    comment,
    drain,
    observe,
)
from deeplink.scheduler.node.reading import number_of, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deeplink.core.clock import Clock
    from deeplink.scheduler.node.reading import HighWaterMarks
    from deeplink.scheduler.node.settings import NetworkSettings

FLAP_HELD_S = 600.0
_DOWN = frozenset({"down", "lowerlayerdown", "notpresent"})
_ERRORS = ("rx_errors", "tx_errors")
_MANY = 100  # times as many errors as are complained of at all
_UP = "up "
_SPEED = "speed "
_INFINIBAND_ERRORS = (
    "symbol_error",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
_DOWNED = ("link_downed", "link_error_recovery")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*Gb/sec")
_ACTIVE = "ACTIVE"
UNREADABLE = "?"


@dataclass(frozen=True, slots=True)
class Port:
    """What was seen of an InfiniBand or RoCE port below /sys/class/infiniband."""

    name: str  # device and port, `mlx5_0/1`
    # DOWN, INIT, ARMED, ACTIVE; empty where it is not there any more, `UNREADABLE` where it does not say
    state: str = ""
    phys_state: str = ""  # LinkUp, Polling, Disabled or another
    rate: float = 0.0  # Gbit/s; 0 where unknown
    counters: Mapping[str, int] = field(default_factory=dict)  # of errors, since the driver was loaded


def read_ports(folder: Path) -> dict[str, Port]:
    """Return all ports; none where there is no such hardware."""
    found = {}
    for path in sorted(folder.glob("*/ports/*")):
        name = f"{path.parent.parent.name}/{path.name}"
        counts = {name: number_of(path / "counters" / name) for name in (*_INFINIBAND_ERRORS, *_DOWNED)}
        found[name] = Port(
            name,
            word_of(text_of(path / "state")) or UNREADABLE,
            word_of(text_of(path / "phys_state")),
            rate_of(text_of(path / "rate") or ""),
            {counter: count for counter, count in counts.items() if count is not None},
        )
    return found


def word_of(text: str | None) -> str:
    """Return the word of `4: ACTIVE`.

    >>> word_of("4: ACTIVE"), word_of("5: LinkUp"), word_of(None)
    ('ACTIVE', 'LinkUp', '')
    """
    return (text or "").rpartition(":")[2].strip()


def rate_of(text: str) -> float:
    """Return the Gbit/s of `200 Gb/sec (4X HDR)`; 0 where it says none.

    >>> rate_of("200 Gb/sec (4X HDR)"), rate_of("2.5 Gb/sec (1X SDR)"), rate_of("")
    (200.0, 2.5, 0.0)
    """
    found = _RATE.search(text)
    return float(found[1]) if found else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """What was seen of an interface."""

    name: str
    state: str = ""  # its operstate; empty where it is not there any more
    speed: int | None = None  # Mbit/s; None where it does not say (virtual ones, and all that are down)
    changes: int = 0  # times its carrier went or came since it was made
    errors: int = 0  # received and sent in error since then
    is_ours: bool = True  # a physical one, that of the default route, or one that the site names


def read_interfaces(folder: Path, routes: str, named: tuple[str, ...]) -> dict[str, Interface]:
    """Return the interfaces below /sys/class/net, but for loopback, and those that are named and not there."""
    there = sorted(path for path in folder.iterdir() if path.name != "lo" and (path / "operstate").exists())
    ours = {*named, *default_route_of(routes)}
    found = {name: Interface(name=name) for name in named}
    for path in there:
        speed = number_of(path / "speed")
        found[path.name] = Interface(
            name=path.name,
            state=text_of(path / "operstate") or "unknown",
            speed=speed if speed is not None and speed > 0 else None,
            changes=number_of(path / "carrier_changes") or 0,
            errors=sum(number_of(path / "statistics" / name) or 0 for name in _ERRORS),
            is_ours=path.name in ours or (path / "device").exists(),
        )
    return found


def default_route_of(routes: str) -> set[str]:
    r"""Return the interfaces of default routes in the text of /proc/net/route.

    >>> default_route_of("Iface Destination Gateway\neth0 00000000 0100A8C0\neth1 0000FEA9 00000000")
    {'eth0'}
    """
    rows = [line.split() for line in routes.splitlines()[1:]]
    return {row[0] for row in rows if len(row) > 1 and row[1] == "00000000"}


@dataclass(slots=True)
class NetworkCheck(NodeCheck):
    """Looks at the interfaces and InfiniBand ports; what they were at their best is in `seen`."""

    settings: NetworkSettings
    clock: Clock
    seen: HighWaterMarks
    net: Path = Path("/sys/class/net")
    infiniband: Path = Path("/sys/class/infiniband")
    routes: Path = Path("/proc/net/route")
    _errors: Counters = field(default_factory=Counters)
    _changes: Counters = field(default_factory=Counters)
    _ports: Counters = field(default_factory=Counters)
    _recent: Recent = field(default_factory=lambda: Recent(FLAP_HELD_S))

    @override
    def look(self) -> Look:
        now = self.clock.monotonic()
        complaints = [*self._interfaces(now), *self._infiniband(now)]
        return Look((*complaints, *self._recent.complaints(now)))

    def _interfaces(self, now: float) -> Iterator[Complaint]:
        named = self.settings.interfaces
        found = read_interfaces(self.net, text_of(self.routes) or "", named)
        for name in self.seen.names(_UP):
            found.setdefault(name, Interface(name=name))
        ours = [one for one in found.values() if one.is_ours and one.name not in self.settings.skip]
        changes = self._changes.rises({one.name: one.changes for one in ours if one.state})
        errors = self._errors.rises({one.name: one.errors for one in ours if one.state})
        for name, count in changes.items():
            flaps = observe(f"{name} flaps", f"{name}: its link went down or came up {count} times")
            self._recent.note(flaps, now)
        for one in ours:
            was_up = self.seen.best(_UP + one.name, float(one.state == "up")) > 0
            best = self.seen.best(_SPEED + one.name, one.speed or 0)
            yield from judge_interface(one, was_up=was_up or one.name in named, best=best)
            count = errors.get(one.name, 0)
            said = f"{one.name}: {count} errors since the last look"
            yield from self._judge_errors(f"{one.name} errors", said, count)

    def _infiniband(self, now: float) -> Iterator[Complaint]:
        ports = read_ports(self.infiniband)
        for name in self.seen.names("port "):
            ports.setdefault(name, Port(name))
        ours = [port for port in ports.values() if port.name not in self.settings.skip]
        risen = self._ports.rises(
            {f"{port.name} {name}": count for port in ours for name, count in port.counters.items()}
        )
        for port in ours:
            was_active = self.seen.best(f"port {port.name}", float(port.state == _ACTIVE)) > 0
            best = self.seen.best(f"rate {port.name}", port.rate if port.state == _ACTIVE else 0.0)
            yield from judge_port(port, was_active=was_active, best=best)
            for counter in port.counters:
                subject = f"{port.name} {counter}"
                if count := risen.get(subject, 0):
                    said = f"{port.name}: {counter} rose by {count}"
                    if counter in _DOWNED:
                        self._recent.note(comment(subject, said, certain=True), now)
                    else:
                        yield from self._judge_errors(subject, f"port {said} since the last look", count)

    def _judge_errors(self, subject: str, said: str, risen: int) -> Iterator[Complaint]:
        bound = self.settings.errors
        if risen and risen >= bound:
            yield (comment if risen >= _MANY * bound else observe)(subject, said)


def judge_port(port: Port, *, was_active: bool, best: float) -> Iterator[Complaint]:
    """Return what is wrong with a port as it is; one that never was active is nobody's."""
    if was_active and port.state not in {_ACTIVE, UNREADABLE}:
        how = f"{port.state} ({port.phys_state})" if port.state else "gone"
        yield drain(port.name, f"port {port.name} is {how}")
    elif was_active and 0 < port.rate < best:
        said = f"port {port.name} runs at {port.rate:g} Gbit/s and has run at {best:g}"
        yield comment(f"{port.name} rate", said)


def judge_interface(one: Interface, *, was_up: bool, best: float) -> Iterator[Complaint]:
    """Return what is wrong with an interface as it is; `best` is the greatest speed it had."""
    if was_up and not one.state:
        yield drain(one.name, f"{one.name} is gone")
    elif was_up and one.state in _DOWN:
        yield drain(one.name, f"{one.name} is {one.state}")
    elif one.speed is not None and one.speed < best:
        yield comment(f"{one.name} speed", f"{one.name} runs at {one.speed} Mbit/s and has run at {best:.0f}")
