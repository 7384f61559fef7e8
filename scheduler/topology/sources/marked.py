"""YAML and JSON as values that know their lines, so that a message can name one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from json import decoder, scanner
from typing import Any

import yaml

from deeplink.core.errors import DeepLinkError

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
