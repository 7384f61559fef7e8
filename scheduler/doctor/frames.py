"""Messages of many nodes in one stream of lines, as srun hands it on; pure.

srun passes lines on in pieces of at most 1,024 bytes, those of several nodes in turn. A message is cut into short
lines that say whose they are; what is no line of ours (a login banner, a warning of Python's) is left aside.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_TAG = "deeplink-doctor"
_PIECE = 600  # characters, far below srun's bound
_MOST_PIECES = 2000
_MOST_BYTES = 4 << 20  # of one message, unpacked


def to_lines(node: str, message: Mapping[str, Any]) -> list[str]:
    """Return the lines that carry a message of a node's, which JSON can hold.

    >>> messages = Messages()
    >>> [messages.take(line) for line in to_lines("n1", {"a": 1})]
    [('n1', {'a': 1})]
    """
    text = base64.b64encode(zlib.compress(json.dumps(message).encode())).decode()
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    return [f"{_TAG} {node} {number} {len(pieces)} {piece}" for number, piece in enumerate(pieces)]


@dataclass(slots=True)
class Messages:
    """Puts messages together again; pieces of one come in their order, those of different nodes mixed."""

    strange: list[str] = field(default_factory=list)
    """The last lines that are none of ours."""
    _begun: dict[str, list[str]] = field(default_factory=dict)

    def take(self, line: str) -> tuple[str, dict[str, Any]] | None:
        """Take one line; return the node and its message where that is whole now."""
        words = line.strip().split(" ")
        numbers = words[2:4]
        if len(words) != 5 or words[0] != _TAG or not all(one.isascii() and one.isdigit() for one in numbers):  # noqa: PLR2004
            self.strange = [*self.strange, line.rstrip()][-20:]
            return None
        node, piece = words[1], words[4]
        number, count = int(numbers[0][:9]), int(numbers[1][:9])
        begun = self._begun.setdefault(node, [])
        if number == 0:
            begun.clear()
        if number != len(begun) or count > _MOST_PIECES:
            begun.clear()
            return None
        begun.append(piece)
        if len(begun) < count:
            return None
        del self._begun[node]
        message = _unpacked("".join(begun))
        return None if message is None else (node, message)


def _unpacked(text: str) -> dict[str, Any] | None:
    try:
        unpacking = zlib.decompressobj()
        message = json.loads(unpacking.decompress(base64.b64decode(text, validate=True), _MOST_BYTES))
    except (binascii.Error, zlib.error, ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
