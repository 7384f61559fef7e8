"""Names and small frozen values that the cache and the scheduler both speak of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NewType, Self
from urllib.parse import quote, unquote

from typing_extensions import override

from deeplink.core.errors import DeepLinkError

NodeName = NewType("NodeName", str)
JobId = NewType("JobId", int)
SampleKey = NewType("SampleKey", str)
ShardId = NewType("ShardId", str)
"""Hexadecimal digest of a shard's ordered logical content and format version."""
Version = NewType("Version", str)
"""Hexadecimal digest of a dataset's index."""
DATASET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class AttemptFormatError(DeepLinkError):
    """A text that should name an attempt does not."""

    def __init__(self, text: str) -> None:
        super().__init__(
            f"{text!r} is not an attempt (job.restart.relaunch, three whole numbers)",
            remedy="DEEPLINK_ATTEMPT is set by `deeplink run`; unset it outside of a job.",
        )
        self.text = text


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """One incarnation of a job's ranks; also the fencing token.

    Within one job a later attempt compares greater. Attempts of different jobs have no meaningful order.

    >>> Attempt.parse("17.0.2")
    Attempt(job=17, restart=0, relaunch=2)
    >>> str(Attempt(job=17, restart=1, relaunch=0)) > str(Attempt(job=17, restart=0, relaunch=2))
    True
    """

    job: int
    restart: int
    relaunch: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` wrote."""
        parts = text.split(".")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):  # noqa: PLR2004
            raise AttemptFormatError(text)
        return cls(*(int(part) for part in parts))

    @override
    def __str__(self) -> str:
        return f"{self.job}.{self.restart}.{self.relaunch}"


class FencedError(DeepLinkError):
    """A newer attempt has taken over: this process must stop, and what it would have written is not wanted.

    Attributes:
        attempt: who was refused; None for a process outside of a job.
        newest: the attempt that took over; None for a process outside of a job.
    """

    exit_code = 77

    def __init__(self, attempt: Attempt | None, newest: Attempt | None, where: str) -> None:
        super().__init__(
            f"attempt {attempt or '(outside of a job)'} is fenced: "
            f"{newest or 'a process outside of a job'} has taken over {where}",
            remedy="Nothing to do when DeepLink restarted the job: the newer attempt carries on.",
        )
        self.attempt, self.newest, self.where = attempt, newest, where


_MOST_WEIGHT = 1 << 30


@dataclass(frozen=True, slots=True)
class Member:
    """A node that serves shards."""

    name: NodeName  # its name
    address: str  # the `host:port` of its agent
    weight: int = 1  # how large a share of the shards it is to hold, against the others: see `cache.membership`
    domain: str = ""  # that fails together with it, a leaf switch or a rack; empty: unknown


_PLAIN = "-._~/:+#;|()"
_DOMAIN = re.compile(rf"(?:[A-Za-z0-9{re.escape(_PLAIN)}]|%[0-9A-Fa-f]{{2}})+")
"""Switches are called all sorts of things (`MF0;sw1:SX6036/U1`, with spaces and commas): the rest is %XX."""


def parse_members(text: str) -> tuple[Member, ...]:
    """Read `n0=10.77.0.10:4000*1024,n1=10.77.0.11:4000*2048`, the value of DEEPLINK_MEMBERS.

    The weights are part of the list, so that all who have the list agree on who holds what. So are the failure
    domains, `n0=10.77.0.10:4000*1024@leaf0`. They stand behind a weight only: who does not know of them yet
    refuses such a weight, instead of taking them for a part of the address.

    >>> parse_members("n0=10.77.0.10:4000")
    (Member(name='n0', address='10.77.0.10:4000', weight=1, domain=''),)
    >>> parse_members("n0=10.77.0.10:4000*512")[0].weight
    512
    >>> parse_members("n0=10.77.0.10:4000*512@rack%207")[0].domain
    'rack 7'
    >>> parse_members("")
    ()
    """
    members: list[Member] = []
    weighted: set[bool] = set()
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, address = item.partition("=")
        if not (name and equals and address):
            raise ValueError(f"{item!r} is not NAME=HOST:PORT")
        address, star, weight = address.partition("*")
        if "@" in address:
            raise ValueError(f"{item!r}: a domain stands behind a weight, NAME=HOST:PORT*WEIGHT@DOMAIN")
        weight, at, written = weight.partition("@")
        domain = _domain(item, written) if at else ""
        if star and not (weight.isascii() and weight.isdigit() and 0 < int(weight) <= _MOST_WEIGHT):
            raise ValueError(f"{item!r}: the weight is not a whole number from 1 to {_MOST_WEIGHT}")
        members.append(Member(NodeName(name), address, int(weight) if star else 1, domain))
        weighted.add(bool(star))
    if len(weighted) > 1:
        raise ValueError(f"give every member a weight, or none: {text!r}")
    if len({member.name for member in members}) != len(members):
        raise ValueError(f"a member is named twice in {text!r}")
    return tuple(members)


def _domain(item: str, written: str) -> str:
    if not _DOMAIN.fullmatch(written):
        raise ValueError(f"{item!r}: {written!r} is no domain: letters, digits and {_PLAIN}, the rest as %XX")
    try:
        return unquote(written, errors="surrogatepass")
    except UnicodeDecodeError as problem:
        raise ValueError(f"{item!r}: {written!r} is no domain: its %XX are not UTF-8") from problem


def format_members(members: tuple[Member, ...]) -> str:
    """Write what `parse_members` reads; weights and domains only where they differ."""
    is_parted = len({member.domain for member in members}) > 1
    is_weighted = is_parted or len({member.weight for member in members}) > 1

    def written(member: Member) -> str:
        weight = f"*{member.weight}" if is_weighted else ""
        domain = f"@{quote(member.domain, _PLAIN, errors='surrogatepass')}" if is_parted and member.domain else ""
        return f"{member.name}={member.address}{weight}{domain}"

    return ",".join(map(written, members))
