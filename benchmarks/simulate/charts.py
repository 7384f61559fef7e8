"""Small plots as SVG: bars with intervals, and lines; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

COLOURS = ("#4477aa", "#ee6677", "#bbbbbb", "#228833")
"""Paul Tol's bright scheme: told apart with most kinds of colour blindness."""
_WIDTH, _HEIGHT = 760, 318
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 10, 48, 46
_TICKS = 5


@dataclass(frozen=True, slots=True)
class Bar:
    """A value with the half of its interval; 0 for none."""

    value: float
    half: float = 0.0


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its name, and points from left to right."""

    name: str
    points: Sequence[tuple[float, float]]


def bars(title: str, groups: Sequence[str], series: Sequence[tuple[str, Sequence[Bar | None]]], unit: str) -> str:
    """Return grouped bars.

    Args:
        title: above them.
        groups: names below.
        series: name and a bar for each group.
        unit: of the values.
    """
    tops = [bar.value + bar.half for _, row in series for bar in row if bar is not None]
    high = _nice(max([*tops, 0.0]))
    parts = [*_frame(title, unit, [name for name, _ in series]), *_rises(high)]
    across = (_WIDTH - _LEFT - _RIGHT) / max(len(groups), 1)
    wide = 0.8 * across / max(len(series), 1)
    for place, group in enumerate(groups):
        left = _LEFT + place * across + 0.1 * across
        parts.append(_text(left + 0.4 * across, _HEIGHT - _BOTTOM + 16, group, "middle"))
        for number, (_, row) in enumerate(series):
            if (bar := row[place]) is not None:
                parts.extend(_bar(left + number * wide, wide, bar, high, COLOURS[number % len(COLOURS)]))
    return _svg(title, parts)


def _bar(left: float, wide: float, bar: Bar, high: float, colour: str) -> list[str]:
    top, foot = _y(bar.value, high), _y(0.0, high)
    found = [
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{0.92 * wide:.1f}" height="{foot - top:.1f}" fill="{colour}"/>'
    ]
    if bar.half:
        middle = left + 0.46 * wide
        low, upper = _y(max(bar.value - bar.half, 0.0), high), _y(bar.value + bar.half, high)
        found.append(f'<path d="M{middle:.1f} {low:.1f}V{upper:.1f}" stroke="#222" fill="none"/>')
    return found


def lines(title: str, series: Sequence[Series], across: str, unit: str, *, powers: bool = False) -> str:
    """Return lines.

    Args:
        title: above them.
        series: one each.
        across: what runs from left to right, from 0 or less.
        unit: of what rises.
        powers: whether a point's place across is a power of ten, by its exponent.
    """
    far = max((x for one in series for x, _ in one.points), default=0.0) or 1.0
    high = _nice(max((y for one in series for _, y in one.points), default=1.0))
    parts = [*_frame(title, unit, [one.name for one in series]), *_rises(high)]
    step = math.ceil(far / (2 * _TICKS)) if powers else _nice(far / _TICKS)
    for tick in range(int(far / step) + 1):
        value = tick * step
        anchor = "end" if value > 0.95 * far else "middle"
        parts.append(_text(_x(value, far), _HEIGHT - _BOTTOM + 16, _said(10**value if powers else value), anchor))
    parts.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - _BOTTOM + 34, across, "middle"))
    for number, one in enumerate(series):
        at = " ".join(f"{_x(x, far):.1f},{_y(y, high):.1f}" for x, y in one.points)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
    return _svg(title, parts)


def _frame(title: str, unit: str, names: Sequence[str]) -> list[str]:
    heading = f'{escape(title)} <tspan font-weight="normal">({escape(unit)})</tspan>'
    parts = [f'<text x="{_LEFT}" y="18" font-weight="bold">{heading}</text>']
    left = float(_LEFT)
    for number, name in enumerate(names if len(names) > 1 else ()):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{left:.0f}" y="27" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(left + 15, 36, name, "start"))
        left += 7.5 * len(name) + 30
    return parts


def _rises(high: float) -> list[str]:
    parts = []
    for tick in range(_TICKS + 1):
        value = high * tick / _TICKS
        where = _y(value, high)
        parts.append(f'<path d="M{_LEFT} {where:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, where + 4, _said(value), "end"))
    return parts


def _said(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004 - three digits


def _x(value: float, far: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / far


def _y(value: float, high: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / high


def _nice(value: float) -> float:
    """Return a round number that is no smaller."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(step * size for step in (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0) if step * size >= value * 0.9999)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, *parts, "</svg>"])
