"""What readers share: names from outside, and a graph in the making with what was wrong on the way."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.core.text import counted
from deeplink.scheduler.slurm.nodeset import at_most, unfold
from deeplink.scheduler.topology.network import Cable, FabricLink, Network, Node, Other, Switch, TopologyCheck

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from deeplink.core.finding import Finding
    from deeplink.core.types import NodeName


MOST_NAMES = 65_533  # names in one set: as many nodes as Slurm can have (MAX_SLURM_NODES of slurm.h is 65533)
MOST_IN_ALL = 16 * MOST_NAMES
"""Names, and cables that are not written one by one, in one text: a few letters can stand for all of one set."""
MOST_LEVEL = 63  # of switches; a fabric has a handful
_MOST_LETTERS = 255  # of a host name: RFC 1123, section 2.1
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Reading:
    """What a reader made of a text."""

    network: Network
    findings: tuple[Finding, ...]


def is_name(text: str) -> bool:
    """Tell whether a text can be the name of a node or switch in Slurm's files."""
    return len(text) <= _MOST_LETTERS and _NAME.fullmatch(text) is not None


def short(text: str) -> str:
    """Return a text from outside, cut to what a message can hold."""
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def without_domains(names: Iterable[str]) -> dict[str, str]:
    """Return what Slurm calls each of some hosts, which may be named with their domain.

    NodeName is what `hostname -s` says (slurm.conf(5)). Hosts of two domains with one name keep theirs; so do
    addresses, which begin with a number.

    >>> without_domains(["a.x", "a", "b.x", "b.y", "10.0.0.1"])
    {'a.x': 'a', 'a': 'a', 'b.x': 'b.x', 'b.y': 'b.y', '10.0.0.1': '10.0.0.1'}
    """
    domains: dict[str, set[str]] = {}
    parts = {name: name.partition(".") for name in names}
    for host, _, domain in parts.values():
        domains.setdefault(host, set()).add(domain)
    return {
        name: name if not host or host.isdigit() or len(domains[host] - {""}) > 1 else host
        for name, (host, _, _) in parts.items()
    }


def heights(below: Mapping[str, Sequence[str]]) -> tuple[dict[str, int], list[str]]:
    """Return each switch's level, 0 for one with nothing below, and those that are above themselves."""
    above: dict[str, list[str]] = {}
    missing = dict.fromkeys(below, 0)
    for name, children in below.items():
        for child in {child: None for child in children if child in below}:
            above.setdefault(child, []).append(name)
            missing[name] += 1
    # Ready are those whose children all have their level: nothing that is above itself ever is.
    waiting = deque(name for name, count in missing.items() if not count)
    levels = dict.fromkeys(waiting, 0)
    while waiting:
        child = waiting.popleft()
        for parent in above.get(child, ()):
            levels[parent] = max(levels.get(parent, 0), levels[child] + 1)
            missing[parent] -= 1
            if not missing[parent]:
                waiting.append(parent)
    return levels, [name for name, count in missing.items() if count]


@dataclass(slots=True)
class GraphBuilder:
    """A graph in the making. Everything put into it is checked here, so that no reader can make a broken graph."""

    source: str
    nodes: dict[NodeName, Node] = field(default_factory=dict)
    switches: dict[str, Switch] = field(default_factory=dict)
    cables: dict[tuple[str, str, bool], list[Cable]] = field(default_factory=dict)
    others: list[Other] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    _spent: int = 0

    def say(self, check: TopologyCheck, text: str, line: int = 0) -> None:
        """Note something about a line (0: about the whole source)."""
        self.findings.append(check.finding(text, self.source, line))

    def unreadable(self, text: str, line: int = 0) -> None:
        """Note that something was passed over."""
        self.say(TopologyCheck.UNREADABLE, text, line)

    def duplicate(self, text: str, line: int) -> None:
        """Note that something is there twice."""
        self.say(TopologyCheck.DUPLICATE, text, line)

    def levels_of(
        self, below: Mapping[str, Sequence[str]], lines: Mapping[str, int]
    ) -> tuple[dict[str, int], list[str]]:
        """Return each switch's level, and those that are above themselves: that is noted, and the loop is cut."""
        levels, looped = heights(below)
        for name in looped:
            self.unreadable(f"switch {name} is above itself, or above one that is", lines.get(name, 0))
        for name in looped:
            # Its children that have a level stay.
            levels[name] = 1 + max((levels[child] for child in below[name] if child not in looped), default=-1)
        return levels, looped

    def affordable(self, text: str, line: int) -> bool:
        """Tell whether a set of names may be unfolded; where it is too many that is noted."""
        count = at_most(text)
        if count > MOST_NAMES:
            self.unreadable(f"{short(text)} is more than {counted(MOST_NAMES, 'name')}", line)
            return False
        return self.afford(count, line)

    def afford(self, count: int, line: int) -> bool:
        """Count what a few letters stand for; where it comes to too many in all that is noted, and False."""
        if self._spent + count > MOST_IN_ALL:
            text = f"with this the text stands for more than {MOST_IN_ALL:,} names and cables; it is passed over"
            self.unreadable(text, line)
            return False
        self._spent += count
        return True

    def names(self, text: str, line: int) -> tuple[NodeName, ...]:
        """Unfold a set of names; what is none is noted and left out."""
        try:
            if not self.affordable(text, line):
                return ()
            found = unfold(text)
        except (DeepLinkError, ValueError) as problem:  # ValueError: a number of thousands of digits
            self.unreadable(f"{short(text)} is no set of names: {str(problem)[-120:]}", line)
            return ()
        good = tuple(name for name in found if is_name(name))
        if len(good) < len(found):
            bad = next(name for name in found if not is_name(name))
            self.unreadable(f"{short(bad)} is no name", line)
        return good

    def connect(self, below: str, above: str, *, host: bool, cables: Iterable[Cable]) -> None:
        """Add cables between two devices; both must be there."""
        self.cables.setdefault((below, above, host), []).extend(cables)

    def reading(self) -> Reading:
        """Return what has been gathered."""
        links = tuple(
            FabricLink(below, above, host, tuple(cables))
            for (below, above, host), cables in self.cables.items()
            if cables
        )
        switches = {
            name: replace(switch, level=min(switch.level, MOST_LEVEL)) for name, switch in self.switches.items()
        }
        findings = dict.fromkeys(self.findings)  # of the two ends of one cable one thing may be said twice
        too_high = sum(switch.level > MOST_LEVEL for switch in self.switches.values())
        if too_high:
            text = f"switches above level {MOST_LEVEL} ({too_high:,} of {len(switches):,}) count as on it"
            findings[TopologyCheck.TAKEN.finding(text, self.source)] = None
        return Reading(Network(dict(self.nodes), switches, links, tuple(self.others)), tuple(findings))


def read_names(text: str, source: str) -> Reading:
    """Read names of nodes, folded or not, on one line or many; `#` begins a comment."""
    gathering = GraphBuilder(source)
    lines: dict[NodeName, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        for word in line.partition("#")[0].split():
            again: dict[int, list[NodeName]] = {}
            for name in gathering.names(word.strip(","), number):
                if lines.setdefault(name, number) != number:
                    again.setdefault(lines[name], []).append(name)
            for earlier, names in again.items():
                text = f"{names[0]} is" if len(names) == 1 else f"{counted(len(names), 'name')} of it are"
                gathering.duplicate(f"{text} also on line {earlier}", number)
    return _flat(gathering, lines)


def read_node_names(names: Iterable[NodeName], source: str) -> Reading:
    """Make the graph of nodes of which nothing but the names is known."""
    return _flat(GraphBuilder(source), names)


def _flat(gathering: GraphBuilder, names: Iterable[NodeName]) -> Reading:
    gathering.nodes.update({name: Node(name) for name in names})
    if gathering.nodes:
        gathering.say(
            TopologyCheck.FLAT,
            f"{counted(len(gathering.nodes), 'node')} without a topology: all count as neighbours",
        )
    return gathering.reading()
