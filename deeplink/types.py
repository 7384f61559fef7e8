"""Names and small frozen values that the cache and the scheduler both speak of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Self

from typing_extensions import override

from deeplink.errors import DeepLinkError

NodeName = NewType("NodeName", str)
JobId = NewType("JobId", int)
SampleKey = NewType("SampleKey", str)
ShardId = NewType("ShardId", str)
"""Hexadecimal digest of a shard's ordered logical content and format version."""
Version = NewType("Version", str)
"""Hexadecimal digest of a dataset's index."""


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
        """Read what `str` wrote.

        Raises:
            AttemptFormatError: the text is not three whole numbers joined by dots.
        """
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


@dataclass(frozen=True, slots=True)
class Member:
    """A node that serves shards: its name and the `host:port` of its agent."""

    name: NodeName
    address: str


def parse_members(text: str) -> tuple[Member, ...]:
    """Read `n0=10.77.0.10:4000,n1=10.77.0.11:4000`, the value of DEEPLINK_MEMBERS.

    >>> parse_members("n0=10.77.0.10:4000")
    (Member(name='n0', address='10.77.0.10:4000'),)
    >>> parse_members("")
    ()

    Raises:
        ValueError: an item lacks its name or its address, or a name occurs twice.
    """
    members = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, address = item.partition("=")
        if not (name and equals and address):
            raise ValueError(f"{item!r} is not NAME=HOST:PORT")
        members.append(Member(NodeName(name), address))
    if len({member.name for member in members}) != len(members):
        raise ValueError(f"a member is named twice in {text!r}")
    return tuple(members)


def format_members(members: tuple[Member, ...]) -> str:
    """Write what `parse_members` reads."""
    return ",".join(f"{member.name}={member.address}" for member in members)
