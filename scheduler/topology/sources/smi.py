"""The inside of a node, as `nvidia-smi topo -m` prints it.

A matrix of GPUs and network cards, then each GPU's CPUs and NUMA node, a legend of the words, and where the cards
are called NIC0, NIC1, ... a legend of their devices. Between drivers the columns at its right differ, and whether
cells are parted by tabs; the words do not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile

from deeplink.scheduler.topology.finding import TopologyFinding, TopologyFindingKind
from deeplink.scheduler.topology.inside import Gpu, Inside, Join, Joined, Nic
from deeplink.scheduler.topology.sources.gathering import short

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines its header, also into a file
_GPU = re.compile(r"GPU\d{1,4}", re.ASCII)
_DEVICE = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)
_CARD = re.compile(r"\s*(NIC\d+)\s*:\s*(\S+)\s*", re.ASCII)
_CPUS = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*", re.ASCII)
_FORMER = {"SOC": Join.SYS.value}  # drivers before 2017
_MOST = 1024  # devices; a node has a few dozen


@dataclass(frozen=True, slots=True)
class InsideReading:
    """What was made of a matrix; None where there is none."""

    inside: Inside | None
    findings: tuple[TopologyFinding, ...]


def is_header(line: str) -> bool:
    """Tell whether a line is the head of a matrix."""
    return bool(_header(line))


def read_matrix(text: str, source: str) -> InsideReading:
    """Read what `nvidia-smi topo -m` printed. A cell or line that cannot be read is noted and passed over."""
    matrix = _Matrix(source)
    cards: dict[str, str] = {}
    for number, raw in enumerate(text.split("\n"), start=1):
        line = _COLOUR.sub("", raw)
        words = line.split()
        if not matrix.devices:
            matrix.devices, matrix.head = _header(line), number
        elif words and words[0] in matrix.devices:
            matrix.row(words, number)
        elif found := _CARD.fullmatch(line):
            cards[found[1]] = found[2]
    if not matrix.devices:
        return InsideReading(
            None, (TopologyFinding(TopologyFindingKind.NO_TOPOLOGY, "no matrix of GPUs is in it", source),)
        )
    gpus = [name for name in matrix.devices if _GPU.fullmatch(name)]
    for name in gpus:
        if name not in matrix.gpus:
            matrix.say(TopologyFindingKind.UNREADABLE, f"{name} is in the head and has no line", matrix.head)
    inside = Inside(
        tuple(matrix.gpus.get(name, Gpu(name)) for name in gpus),
        tuple(Nic(name, cards.get(name, name)) for name in matrix.devices if name not in gpus),
        matrix.pairs(),
    )
    return InsideReading(inside, tuple(matrix.findings))


class _Matrix:
    """The matrix being read."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.devices: tuple[str, ...] = ()
        self.head = 0  # its line
        self.gpus: dict[str, Gpu] = {}
        self.findings: list[TopologyFinding] = []
        self._cells: dict[tuple[str, str], tuple[Joined, int]] = {}
        self._lines: dict[str, int] = {}

    def say(self, kind: TopologyFindingKind, text: str, line: int) -> None:
        self.findings.append(TopologyFinding(kind, text, self.source, line))

    def row(self, words: list[str], line: int) -> None:
        """Take in the line of one device."""
        name, *cells = words
        if self._lines.setdefault(name, line) != line:
            self.say(TopologyFindingKind.DUPLICATE, f"{name} is also on line {self._lines[name]}", line)
            return
        if _GPU.fullmatch(name):
            self.gpus[name] = _gpu(name, cells[len(self.devices) :])
        for other, word in zip(self.devices, cells, strict=False):
            joined = _joined(word)
            if joined and other != name:
                self._cells[name, other] = joined, line
            elif word != "X" or other != name:
                self.say(
                    TopologyFindingKind.UNREADABLE,
                    f"{name} to {other}: {short(word)} is no way to be joined",
                    line,
                )
        if len(cells) < len(self.devices):
            self.say(TopologyFindingKind.UNREADABLE, f"{name} has too few cells", line)

    def pairs(self) -> dict[tuple[str, str], Joined]:
        """Make one of the two cells of each pair; where they differ, the farther way counts."""
        pairs: dict[tuple[str, str], Joined] = {}
        place = {name: number for number, name in enumerate(self.devices)}
        for (one, other), (joined, line) in self._cells.items():
            back = self._cells.get((other, one), (joined, line))
            in_order = place[one] < place[other]
            if back[0] != joined and in_order:
                text = f"{one} to {other} is {joined}, and back {back[0]} on line {back[1]}; the farther counts"
                self.say(TopologyFindingKind.UNREADABLE, text, line)
            pair = (one, other) if in_order else (other, one)
            pairs[pair] = max(joined, back[0], key=lambda way: (way.join.distance, -way.nvlinks))
        return dict(sorted(pairs.items(), key=lambda item: (place[item[0][0]], place[item[0][1]])))


def _header(line: str) -> tuple[str, ...]:
    words = _COLOUR.sub("", line).split()
    if not words or not _GPU.fullmatch(words[0]):
        return ()
    devices = list(takewhile(lambda word: word not in {"CPU", "NUMA"}, words[:_MOST]))
    # A line of the matrix begins with a GPU too, but goes on with how that is joined.
    known = all(_DEVICE.fullmatch(word) and not _joined(word) and word != "X" for word in devices)
    return tuple(devices) if known and len(set(devices)) == len(devices) else ()


def _joined(word: str) -> Joined | None:
    return Joined.of(_FORMER.get(word, word))


def _gpu(name: str, behind: list[str]) -> Gpu:
    cpus = behind[0] if behind and _CPUS.fullmatch(behind[0]) else ""
    numa = behind[1] if len(behind) > 1 and re.fullmatch("[0-9]{1,6}", behind[1]) else None
    return Gpu(name, cpus, int(numa) if numa is not None else None)
