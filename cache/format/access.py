"""Who may read what was packed, by owner, group and modes of the source; as text `uid:gid:mode`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from typing_extensions import override

if TYPE_CHECKING:
    import os
    from collections.abc import Collection
    from pathlib import Path

_NOBODY = -1
"""An owner that no process has: what is packed belongs to several."""
_READS, _ENTERS = 0o4, 0o5


@dataclass(frozen=True, slots=True)
class SourceAccess:
    """What a source's folder and all that is packed of it have in common."""

    owner: int  # the user's number
    group: int  # its number
    mode: int  # of files: 0o644, 0o640 or 0o600

    @override
    def __str__(self) -> str:
        return f"{self.owner}:{self.group}:{self.mode:04o}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the access that a text means. Raises ValueError.

        >>> str(SourceAccess.parse("1000:100:0640"))
        '1000:100:0640'
        """
        owner, group, mode = text.split(":")
        return cls(int(owner), int(group), int(mode, 8))

    @classmethod
    def of_folder(cls, folder: Path) -> Self | None:
        """Return the access that a folder gives, with those that lead to it; None where it cannot be looked at."""
        try:
            here, *above = (path.stat() for path in (folder, *folder.parents))
        except OSError:
            return None
        # A folder's group is shut out by the group's bits, whatever others may do.
        shut = [one for one in above if ~one.st_mode & 0o011]
        mode = 0o600
        if not (~here.st_mode & 0o055 or shut):
            mode = 0o644
        elif not ~here.st_mode & 0o050 and all(one.st_mode & 0o010 and one.st_gid == here.st_gid for one in shut):
            mode = 0o640
        return cls(here.st_uid, here.st_gid, mode)

    @property
    def is_for_group(self) -> bool:
        """Whether the group may read it, and others may not."""
        return bool(self.mode & 0o040) and not self.mode & 0o004

    def narrowed(self, facts: os.stat_result, *, folder: bool = False) -> Self:
        """Return what is left of it where this file, or this folder, is among what is packed."""
        bits = _ENTERS if folder else _READS
        if facts.st_mode & bits * 0o11 == bits * 0o11:
            return self
        is_for_group = facts.st_gid == self.group and facts.st_mode & bits << 3 == bits << 3
        owner = self.owner if facts.st_uid == self.owner else _NOBODY
        return replace(self, owner=owner, mode=self.mode & (0o640 if is_for_group else 0o600))

    def allows(self, user: int, groups: Collection[int]) -> bool:
        """Tell whether a user, who is in these groups, may read it."""
        return bool(user in {0, self.owner} or self.mode & 0o004 or (self.mode & 0o040 and self.group in groups))
