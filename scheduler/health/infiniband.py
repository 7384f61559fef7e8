"""InfiniBand and RoCE ports as the kernel shows them below /sys/class/infiniband."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.scheduler.health.look import Complaint, comment, drain, observe
from deeplink.scheduler.health.reading import number_of, text_of
from deeplink.scheduler.health.recent import Counters, Recent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from deeplink.scheduler.health.seen import HighWaterMarks
    from deeplink.scheduler.health.settings import NetworkSettings

DOWNED_HELD_S = 600.0
_ERRORS = (
    "symbol_error",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
_DOWNED = ("link_downed", "link_error_recovery")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*Gb/sec")
_ACTIVE = "ACTIVE"
UNREADABLE = "?"
_MANY = 100


@dataclass(frozen=True, slots=True)
class Port:
    """What was seen of a port.

    Attributes:
        name: device and port, `mlx5_0/1`.
        state: DOWN, INIT, ARMED, ACTIVE; empty where it is not there any more, `UNREADABLE` where it does not say.
        phys_state: LinkUp, Polling, Disabled, ...
        rate: Gbit/s; 0 where unknown.
        counters: of errors, since the driver was loaded.
    """

    name: str
    state: str = ""
    phys_state: str = ""
    rate: float = 0.0
    counters: Mapping[str, int] = field(default_factory=dict)


def read_ports(folder: Path) -> dict[str, Port]:
    """Return all ports; none where there is no such hardware."""
    found = {}
    for path in sorted(folder.glob("*/ports/*")):
        name = f"{path.parent.parent.name}/{path.name}"
        counts = {name: number_of(path / "counters" / name) for name in (*_ERRORS, *_DOWNED)}
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


@dataclass(slots=True)
class PortCheck:
    """Looks at the ports; what they were at their best is in `seen`."""

    settings: NetworkSettings
    seen: HighWaterMarks
    folder: Path
    _counters: Counters = field(default_factory=Counters)
    _recent: Recent = field(default_factory=lambda: Recent(DOWNED_HELD_S))

    def complaints(self, now: float) -> Iterator[Complaint]:
        """Look once, and yield what is wrong."""
        ports = read_ports(self.folder)
        for name in self.seen.names("port "):
            ports.setdefault(name, Port(name))
        ours = [port for port in ports.values() if port.name not in self.settings.skip]
        risen = self._counters.rises(
            {f"{port.name} {name}": count for port in ours for name, count in port.counters.items()}
        )
        for port in ours:
            was_active = self.seen.best(f"port {port.name}", float(port.state == _ACTIVE)) > 0
            best = self.seen.best(f"rate {port.name}", port.rate if port.state == _ACTIVE else 0.0)
            yield from judge_port(port, was_active=was_active, best=best)
            self._note_downed(port.name, risen, now)
            errors = {name: risen.get(f"{port.name} {name}", 0) for name in _ERRORS}
            yield from judge_port_errors(port.name, errors, self.settings.errors)
        yield from self._recent.complaints(now)

    def _note_downed(self, port: str, risen: Mapping[str, int], now: float) -> None:
        for name in _DOWNED:
            count = risen.get(f"{port} {name}", 0)
            if count:
                said = f"{port}: {name} rose by {count}"
                self._recent.note(comment(f"{port} {name}", said, certain=True), now)


def judge_port(port: Port, *, was_active: bool, best: float) -> Iterator[Complaint]:
    """Return what is wrong with a port as it is; one that never was active is nobody's."""
    if was_active and port.state not in {_ACTIVE, UNREADABLE}:
        how = f"{port.state} ({port.phys_state})" if port.state else "gone"
        yield drain(port.name, f"port {port.name} is {how}")
    elif was_active and 0 < port.rate < best:
        yield comment(
            f"{port.name} rate", f"port {port.name} runs at {port.rate:g} Gbit/s and has run at {best:g}"
        )


def judge_port_errors(name: str, risen: Mapping[str, int], bound: int) -> Iterator[Complaint]:
    """Return a complaint of each error counter that rose by `bound` or more since the last look."""
    for counter, count in risen.items():
        if count and count >= bound:
            said = f"port {name}: {counter} rose by {count} since the last look"
            subject = f"{name} {counter}"
            yield comment(subject, said) if count >= _MANY * bound else observe(subject, said)
