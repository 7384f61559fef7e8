"""What readers share: names that nobody vouches for, and a graph in the making with what was wrong on the way."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.slurm.nodeset import at_most, unfold
from deeplink.scheduler.topology.finding import TopologyFinding, TopologyFindingKind
from deeplink.scheduler.topology.network import Cable, FabricLink, Network, Node, Other, Switch
from deeplink.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from deeplink.types import NodeName

MOST_NAMES = 65_533
"""Names in one set: as many nodes as Slurm can have (MAX_SLURM_NODES of slurm.h is 65533)."""
MOST_IN_ALL = 16 * MOST_NAMES
"""Names, and cables that are not written one by one, in one text: a few letters can stand for all of one set."""
MOST_LEVEL = 63
"""Of switches; a fabric has a handful."""
_MOST_LETTERS = 255  # of a host name: RFC 1123, section 2.1
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Reading:
    """What a reader made of a text."""

    network: Network
    findings: tuple[TopologyFinding, ...]


def is_name(text: str) -> bool:
    """Tell whether a text can be the name of a node or switch in Slurm's files."""
    return len(text) <= _MOST_LETTERS and _NAME.fullmatch(text) is not None


def short(text: str) -> str:
    """Return a text that somebody wrote, cut to what a message can hold."""
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
    """Return each switch's level, 0 for one with nothing below, and those that are above themselves.

    >>> heights({"core": ["a", "b"], "a": ["x"], "b": [], "x": []})
    ({'b': 0, 'x': 0, 'core': 2, 'a': 1}, [])
    """
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
    findings: list[TopologyFinding] = field(default_factory=list)
    _spent: int = 0

    def say(self, kind: TopologyFindingKind, text: str, line: int = 0) -> None:
        """Note something about a line (0: about the whole source)."""
        self.findings.append(TopologyFinding(kind, text, self.source, line))

    def affordable(self, text: str, line: int) -> bool:
        """Tell whether a set of names may be unfolded; where it is too many that is noted."""
        count = at_most(text)
        if count > MOST_NAMES:
            self.say(
                TopologyFindingKind.UNREADABLE, f"{short(text)} is more than {counted(MOST_NAMES, 'name')}", line
            )
            return False
        return self.afford(count, line)

    def afford(self, count: int, line: int) -> bool:
        """Count what a few letters stand for; where it comes to too many in all that is noted, and False."""
        if self._spent + count > MOST_IN_ALL:
            text = f"with this the text stands for more than {MOST_IN_ALL:,} names and cables; it is passed over"
            self.say(TopologyFindingKind.UNREADABLE, text, line)
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
            self.say(
                TopologyFindingKind.UNREADABLE, f"{short(text)} is no set of names: {str(problem)[-120:]}", line
            )
            return ()
        good = tuple(name for name in found if is_name(name))
        if len(good) < len(found):
            bad = next(name for name in found if not is_name(name))
            self.say(TopologyFindingKind.UNREADABLE, f"{short(bad)} is no name", line)
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
            findings[TopologyFinding(TopologyFindingKind.TAKEN, text, self.source)] = None
        return Reading(Network(dict(self.nodes), switches, links, tuple(self.others)), tuple(findings))
