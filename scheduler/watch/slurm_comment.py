"""DeepLink's part of the comment of a node or a job; the rest stays as others wrote it; pure."""

from __future__ import annotations

import re

from deeplink.scheduler.watch.evidence import TAG
from deeplink.text import printable

LONGEST = 200
"""Characters of ours: squeue and sinfo print a comment on one line."""
_JOINT = " | "
_OURS = re.compile(rf"(?:^|{re.escape(_JOINT)}){re.escape(TAG)}.*\Z", re.DOTALL)


def comment_of(text: str) -> str:
    r"""Return a text as it can stand in a comment: one line, not too long.

    >>> comment_of("two\nlines")
    'two lines'
    """
    line = printable(" ".join(text.split()))
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."


def ours_in_comment(comment: str) -> str:
    """Return what of a comment is ours; empty where nothing is.

    >>> ours_in_comment("mine | deeplink: held"), ours_in_comment("of deeplink: I know nothing")
    ('deeplink: held', '')
    """
    found = _OURS.search(comment)
    return found[0].removeprefix(_JOINT) if found else ""


def with_our_comment(comment: str, ours: str) -> str:
    """Return a comment with our words behind those of others, in place of what we said before.

    >>> with_our_comment("mine | deeplink: old", "deeplink: new"), with_our_comment("", "deeplink: new")
    ('mine | deeplink: new', 'deeplink: new')
    """
    theirs = _OURS.sub("", comment)
    return _JOINT.join(filter(None, (theirs, ours)))
