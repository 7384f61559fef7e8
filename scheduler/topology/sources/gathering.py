"""What readers share: YAML and JSON that know their lines, names from outside, and a graph in the making."""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass, field, replace
from json import decoder, scanner
from typing import TYPE_CHECKING, Any

import yaml

from deeplink.core.errors import DeepLinkError
from deeplink.core.text import counted
from deeplink.scheduler.slurm.nodeset import at_most, unfold
from deeplink.scheduler.topology.network import Cable, FabricLink, Network, Node, Other, Switch, TopologyCheck

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from deeplink.core.finding import Finding
    from deeplink.core.types import NodeName

_NOTHING = "tag:yaml.org,2002:null"
_MOST_VALUES = 2_000_000  # a minute's worth of reading for the loader; JSON is read without this bound, and faster


class MarkedTextError(DeepLinkError):
    """A text is no YAML, or no JSON."""

    def __init__(self, problem: str, line: int) -> None:
        super().__init__(problem)
        self.problem, self.line = problem, line


@dataclass(frozen=True, slots=True)
class Item:
    """One value: a text (every scalar is one here: the node `0101` is no number), a list or a mapping."""

    value: str | list[Item] | dict[str, Item]
    line: int  # where it begins, from 1
    # the keys of a mapping that were there already, and their lines; the first counts
    twice: tuple[tuple[str, int], ...] = ()

    @property
    def text(self) -> str | None:
        """The text; None for a list or a mapping."""
        return self.value if isinstance(self.value, str) else None

    @property
    def items(self) -> list[Item]:
        """The list; a single text is a list of one, and an empty one none."""
        if isinstance(self.value, list):
            return self.value
        return [self] if isinstance(self.value, str) and self.value else []

    @property
    def fields(self) -> dict[str, Item]:
        """The mapping; empty for anything else."""
        return self.value if isinstance(self.value, dict) else {}


def from_yaml(text: str) -> Item:
    """Read one YAML document."""
    # Composed, not constructed: tags, dates and numbers mean nothing here, and nothing is expanded. The loader in
    # Python, not in C: that one ends the process where brackets are nested too deep.
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return Item("", 1) if root is None else _item(root, {})[0]
    except yaml.reader.ReaderError as problem:
        line = text.count("\n", 0, problem.position) + 1
        raise MarkedTextError(f"{problem.reason}: #x{problem.character:04x}", line) from problem
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        said = str(problem.problem or problem.context)
        raise MarkedTextError(said, mark.line + 1 if mark else 0) from problem
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise MarkedTextError(str(problem).partition("\n")[0], 0) from problem


def _item(node: Any, done: dict[int, tuple[Item, int] | None]) -> tuple[Item, int]:
    """Return a value, and how many values it is for who goes through all of it, aliases again each time."""
    line = node.start_mark.line + 1
    if id(node) in done:
        known = done[id(node)]
        if known is None:
            raise MarkedTextError("a value holds itself", line)
        return known
    done[id(node)] = None
    below: list[tuple[Item, int]] = []
    if isinstance(node, yaml.ScalarNode):
        item = Item("" if node.tag == _NOTHING else node.value, line)
    elif isinstance(node, yaml.SequenceNode):
        below = [_item(one, done) for one in node.value]
        item = Item([one for one, _ in below], line)
    else:
        below = [_item(one, done) for _, one in node.value]
        item = _mapping([(_key(key), one) for (key, _), (one, _) in zip(node.value, below, strict=True)], line)
    size = 1 + sum(count for _, count in below)
    if size > _MOST_VALUES:
        raise MarkedTextError(f"more than {_MOST_VALUES:,} values, counting aliases each time", line)
    done[id(node)] = item, size
    return item, size


def _mapping(pairs: list[tuple[str, Item]], line: int) -> Item:
    fields: dict[str, Item] = {}
    twice: list[tuple[str, int]] = []
    for key, value in pairs:
        if fields.setdefault(key, value) is not value:
            twice.append((key, value.line))
    return Item(fields, line, tuple(twice))


def _key(node: Any) -> str:
    return node.value if isinstance(node, yaml.ScalarNode) else ""


def from_json(text: str) -> Item:
    """Read a JSON text."""
    try:
        return _Marking(text).read()
    except json.JSONDecodeError as problem:
        raise MarkedTextError(problem.msg, problem.lineno) from problem
    except (ValueError, RecursionError) as problem:
        raise MarkedTextError(str(problem).partition("\n")[0], 0) from problem


class _Marking(json.JSONDecoder):
    """Json's own decoder, in Python, which tells where each object begins."""

    def __init__(self, text: str) -> None:
        super().__init__(parse_float=str, parse_int=str, parse_constant=str)
        self.whole = text
        self.parse_object = self._object
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined] # typeshed lacks it
        self._lines = (0, 1)  # the last place asked for, and its line

    def read(self) -> Item:
        return _plain(self.decode(self.whole), 1)

    def _object(self, start: tuple[str, int], *rest: Any) -> tuple[Item, int]:
        line = self._line(start[1])
        strict, scan_once = rest[0], rest[1]
        pairs, end = decoder.JSONObject(start, strict, scan_once, None, list, {})  # type: ignore[attr-defined]
        return _mapping([(key, _plain(value, line)) for key, value in pairs], line), end

    def _line(self, place: int) -> int:
        before, line = self._lines
        self._lines = place, line + self.whole.count("\n", before, place)
        return self._lines[1]


def _plain(value: Any, line: int) -> Item:
    """Give what is no mapping the line of the mapping it is in."""
    if isinstance(value, Item):
        return value
    if isinstance(value, list):
        return Item([_plain(one, line) for one in value], line)
    if value is None:
        return Item("", line)
    return Item(value if isinstance(value, str) else json.dumps(value), line)


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
