"""Network interfaces: links that went down, that got slower, that go up and down, that make errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.scheduler.health.infiniband import PortCheck
from deeplink.scheduler.health.look import Complaint, Look, comment, drain, observe
from deeplink.scheduler.health.reading import number_of, text_of
from deeplink.scheduler.health.recent import Counters, Recent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.clock import Clock
    from deeplink.scheduler.health.seen import HighWaterMarks
    from deeplink.scheduler.health.settings import NetworkSettings

FLAP_HELD_S = 600.0
_DOWN = frozenset({"down", "lowerlayerdown", "notpresent"})
_ERRORS = ("rx_errors", "tx_errors")
_MANY = 100  # times as many errors as are complained of at all
_UP = "up "
_SPEED = "speed "


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """What was seen of an interface.

    Attributes:
        state: its operstate; empty where it is not there any more.
        speed: Mbit/s; None where it does not say (virtual ones, and all that are down).
        changes: times its carrier went or came since it was made.
        errors: received and sent in error since then.
        is_ours: a physical one, that of the default route, or one that the site names.
    """

    name: str
    state: str = ""
    speed: int | None = None
    changes: int = 0
    errors: int = 0
    is_ours: bool = True


def read_interfaces(folder: Path, routes: str, named: tuple[str, ...]) -> dict[str, Interface]:
    """Return the interfaces below /sys/class/net, but for loopback, and those that are named and not there.

    Raises:
        OSError: they cannot be listed.
    """
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
class NetworkCheck:
    """Looks at the interfaces and InfiniBand ports; what they were at their best is in `seen`."""

    settings: NetworkSettings
    clock: Clock
    seen: HighWaterMarks
    net: Path = Path("/sys/class/net")
    infiniband: Path = Path("/sys/class/infiniband")
    routes: Path = Path("/proc/net/route")
    _errors: Counters = field(default_factory=Counters)
    _changes: Counters = field(default_factory=Counters)
    _recent: Recent = field(default_factory=lambda: Recent(FLAP_HELD_S))
    _ports: PortCheck | None = None

    def look(self) -> Look:
        """Look once."""
        now = self.clock.monotonic()
        named = self.settings.interfaces
        found = read_interfaces(self.net, text_of(self.routes) or "", named)
        for name in self.seen.names(_UP):
            found.setdefault(name, Interface(name=name))
        ours = [one for one in found.values() if one.is_ours and one.name not in self.settings.skip]
        changes = self._changes.rises({one.name: one.changes for one in ours if one.state})
        errors = self._errors.rises({one.name: one.errors for one in ours if one.state})
        for name, count in changes.items():
            self._recent.note(
                observe(f"{name} flaps", f"{name}: its link went down or came up {count} times"), now
            )
        complaints: list[Complaint] = []
        for one in ours:
            was_up, best = self._remembered(one)
            complaints += judge_interface(one, was_up=was_up or one.name in named, best=best)
            complaints += judge_errors(one.name, errors.get(one.name, 0), self.settings.errors)
        if self._ports is None:
            self._ports = PortCheck(self.settings, self.seen, self.infiniband)
        return Look((*complaints, *self._recent.complaints(now), *self._ports.complaints(now)))

    def _remembered(self, one: Interface) -> tuple[bool, float]:
        was_up = self.seen.best(_UP + one.name, float(one.state == "up")) > 0
        return was_up, self.seen.best(_SPEED + one.name, one.speed or 0)


def judge_interface(one: Interface, *, was_up: bool, best: float) -> Iterator[Complaint]:
    """Return what is wrong with an interface as it is; `best` is the greatest speed it had."""
    if was_up and not one.state:
        yield drain(one.name, f"{one.name} is gone")
    elif was_up and one.state in _DOWN:
        yield drain(one.name, f"{one.name} is {one.state}")
    elif one.speed is not None and one.speed < best:
        yield comment(f"{one.name} speed", f"{one.name} runs at {one.speed} Mbit/s and has run at {best:.0f}")


def judge_errors(name: str, risen: int, bound: int) -> Iterator[Complaint]:
    """Return a complaint where errors have risen by `bound` or more since the last look."""
    if risen and risen >= bound:
        said = f"{name}: {risen} errors since the last look"
        yield comment(f"{name} errors", said) if risen >= _MANY * bound else observe(f"{name} errors", said)
