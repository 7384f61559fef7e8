"""What `scontrol show config` says of the running slurmctld: its settings by name, whatever the version; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.states import SlurmTextError

if TYPE_CHECKING:
    from collections.abc import Mapping

_HEAD = re.compile(r"Configuration data as of (\S+)")
_NUMBER = re.compile(r"(\d{1,18})(?:\s*(?:sec|min|usec|percent|nodes/min))?", re.ASCII)
_SWITCHES = {"no": 0, "yes": 1}
_NOTHING = frozenset({"", "(null)", "n/a", "none", "unset"})
NO_ACCOUNTING = ("", "accounting_storage/none")
"""AccountingStorageType of a Slurm that keeps no record of users or ended jobs."""
_LIST = re.compile(r",(?![^\[]*\])")
_COMMAND = "scontrol show config"


@dataclass(frozen=True, slots=True)
class SlurmSettings:
    """The settings slurmctld runs with. Names are looked up without regard to case, as Slurm reads them."""

    values: Mapping[str, str]
    # the controller's own clock when it answered, to the second, in this host's time zone; None where the text
    # does not tell
    as_of: datetime | None = None

    def text(self, name: str) -> str | None:
        """Return a setting as Slurm prints it; empty where it is not set, None where this Slurm tells nothing."""
        found = self.values.get(name.casefold())
        if found is None:
            return None
        return "" if found.casefold() in _NOTHING else found

    def number(self, name: str) -> int | None:
        """Return a setting's number without its unit, 0 or 1 of a switch; None where it is none (`INFINITE`)."""
        said = (self.text(name) or "").strip()
        if said.casefold() in _SWITCHES:
            return _SWITCHES[said.casefold()]
        found = _NUMBER.fullmatch(said)
        return int(found[1]) if found else None

    def words(self, name: str) -> tuple[str, ...]:
        """Return the items of a list that commas separate; empty where it is not told."""
        return tuple(word.strip() for word in _LIST.split(self.text(name) or "") if word.strip())

    def item(self, name: str, key: str) -> str | None:
        """Return the value of `key=value` in such a list; empty for a bare `key`, None where it is not there."""
        for word in self.words(name):
            found, _, value = word.partition("=")
            if found.casefold() == key.casefold():
                return value
        return None

    def listed(self, name: str) -> tuple[str, ...]:
        """Return a setting that newer Slurms number (`Epilog[0]`), and do not tell where none is set."""
        wanted = re.compile(rf"{re.escape(name.casefold())}(?:\[\d+\])?", re.ASCII)
        found = [self.text(key) for key in self.values if wanted.fullmatch(key)]
        return tuple(filter(None, found))

    @property
    def version(self) -> str:
        """The version of slurmctld (`22.05.8`); empty where it is not told."""
        return self.text("SLURM_VERSION") or ""


def parse_settings(text: str) -> SlurmSettings:
    """Read `scontrol show config`."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and name.strip() and " " not in name.strip():
            values.setdefault(
                name.strip().casefold(), value.strip()
            )  # a value may hold `=`; a later part repeats none
    if not values:
        raise SlurmTextError(_COMMAND, text)
    head = _HEAD.search(text)
    return SlurmSettings(values, _moment(head[1]) if head else None)


def _moment(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError, OSError):
        return None  # SLURM_TIME_FORMAT may name any other form
