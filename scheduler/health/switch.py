"""The kill switch: a file that an operator touches at three in the morning.

An empty `health-off` turns every check off; with names in it, those checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.config import SITE_FILE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from deeplink.config import Config

FILE = "health-off"
_LONGEST = 64 << 10


@dataclass(frozen=True, slots=True)
class Off:
    """What is turned off.

    Attributes:
        everything: all checks.
        names: these.
    """

    everything: bool = False
    names: frozenset[str] = frozenset()

    def __contains__(self, name: str) -> bool:
        return self.everything or name in self.names


def parse_switch(text: str) -> Off:
    """Return what a switch file turns off: all where it names nothing.

    >>> parse_switch("").everything, sorted(parse_switch("gpu, mount  # broken driver").names)
    (True, ['gpu', 'mount'])
    """
    lines = [line.partition("#")[0] for line in text.splitlines()]
    names = frozenset(" ".join(lines).replace(",", " ").split())
    return Off(everything=not names, names=names)


def switch_paths(config: Config) -> tuple[Path, ...]:
    """Return where switch files are looked for: beside the site's configuration, and in our state folder."""
    return (SITE_FILE.parent / FILE, config.state / FILE)


def read_switch(paths: Sequence[Path]) -> Off:
    """Return what the switch files turn off together; one that is there and cannot be read turns all off.

    May hang where a folder does.
    """
    everything, names = False, frozenset[str]()
    for path in paths:
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                off = parse_switch(file.read(_LONGEST))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            if not _is_there(path):
                continue
            off = Off(everything=True)
        except OSError:
            continue
        everything, names = everything or off.everything, names | off.names
    return Off(everything, names)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # we may not even look into its folder
        return False
