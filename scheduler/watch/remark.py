"""Our words in the comment of a node or of a job, beside what others wrote there; pure."""

from __future__ import annotations

import re

from deeplink.scheduler.watch.evidence import TAG
from deeplink.wording import printable

LONGEST = 200
"""Characters of ours: squeue and sinfo print a comment on one line."""
_JOINT = " | "
_OURS = re.compile(rf"(?:^|{re.escape(_JOINT)}){re.escape(TAG)}.*\Z", re.DOTALL)


def remark(text: str) -> str:
    r"""Return a text as it can stand in a comment: one line, not too long.

    >>> remark("two\nlines")
    'two lines'
    """
    line = printable(" ".join(text.split()))
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."


def ours_in(comment: str) -> str:
    """Return what of a comment is ours; empty where nothing is.

    >>> ours_in("mine | deeplink: held"), ours_in("of deeplink: I know nothing")
    ('deeplink: held', '')
    """
    found = _OURS.search(comment)
    return found[0].removeprefix(_JOINT) if found else ""


def with_ours(comment: str, ours: str) -> str:
    """Return a comment with our words behind those of others, in place of what we said before.

    >>> with_ours("mine | deeplink: old", "deeplink: new"), with_ours("", "deeplink: new")
    ('mine | deeplink: new', 'deeplink: new')
    """
    theirs = _OURS.sub("", comment)
    return _JOINT.join(filter(None, (theirs, ours)))
