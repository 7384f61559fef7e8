"""Proves to the watchdog who speaks: a MUNGE credential is exchanged for a token that names its user.

A token names a user and when it ends (`u1000.e1767225600`), and a job (`u1000.e1767225600.j17.0`: job 17 after 0
restarts) or a node (`u0.e1767225600.nn3`) besides. It carries a keyed digest of that, which the watchdog's secret
makes and checks: nothing has to be remembered.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import re
import threading
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from deeplink.errors import DeepLinkError
from deeplink.scheduler.slurm import command
from deeplink.scheduler.slurm.settings import parse_settings

if TYPE_CHECKING:
    from deeplink.types import Attempt, NodeName

MUNGE_S = 2.0
"""Bound on `munge` and `unmunge`: each asks the host's own munged over a socket."""
NONCE_S = 30.0
PROVED_S = 86_400.0
"""How long a token lasts that MUNGE was shown for; its holder proves himself anew then."""
_SECOND = re.compile(r"\d{1,12}", re.ASCII)
_CLAIMS = re.compile(
    r"u(?P<uid>\d{1,10})\.e(?P<until>\d{1,12})(?:\.j(?P<job>\d{1,18})\.(?P<restart>\d{1,9})|\.n(?P<node>[^:]{1,1024}))?",
    re.ASCII,
)
_UID = re.compile(r"^UID:\s+(?:\S+ \()?(\d+)\)?\s*$", re.MULTILINE)
_HOST = re.compile(r"^ENCODE_HOST:\s+(\S+)(?: \((\S+)\))?\s*$", re.MULTILINE)


class CredentialError(DeepLinkError):
    """MUNGE refused to make or to decode a credential."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"MUNGE: {problem}",
            remedy="Is munged running here, with the cluster's key? `munge -n | unmunge` tries it. "
            "Without MUNGE: `deeplink watch --mint USER` makes a token for DEEPLINK_WATCH_TOKEN_FILE.",
        )
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whom a token names.

    Attributes:
        uid: the user's.
        job: the one job that he may speak for, with its restart count; 0: any job of his.
        node: the one node that he may speak for; empty: none, or any.
    """

    uid: int
    job: int = 0
    restart: int = 0
    node: str = ""

    def speaks_for(self, attempt: Attempt) -> bool:
        """Return whether the token was made for this attempt's job; whose job that is, Slurm knows."""
        return not self.node and (not self.job or (self.job, self.restart) == (attempt.job, attempt.restart))

    def speaks_for_node(self, node: NodeName) -> bool:
        """Return whether the token was made for this node, or for none in particular."""
        return not self.job and self.node in {"", node}


@dataclass(frozen=True, slots=True)
class TokenMint:
    """Makes tokens and reads them back; whoever has the secret makes the same ones."""

    secret: str

    def token(self, caller: Caller, until: float) -> str:
        """Return the token that names this caller until a moment, seconds since 1970.

        >>> TokenMint("s").token(Caller(uid=1000, job=17), 99.0)[:14]
        'u1000.e99.j17.'
        """
        claims = f"u{caller.uid}.e{int(until)}"
        if caller.job:
            claims += f".j{caller.job}.{caller.restart}"
        elif caller.node:
            claims += f".n{quote(caller.node, safe='')}"
        return f"{claims}:{self._digest(claims)}"

    def caller(self, token: str, unix: float) -> Caller | None:
        """Return whom a token names; None where it was not made here, or has ended by `unix`."""
        claims, _, digest = token.partition(":")
        found = _CLAIMS.fullmatch(claims)
        if not found or not hmac.compare_digest(digest.encode(), self._digest(claims).encode()):
            return None
        if unix >= int(found["until"]):
            return None
        return Caller(
            uid=int(found["uid"]),
            job=int(found["job"] or 0),
            restart=int(found["restart"] or 0),
            node=unquote(found["node"] or ""),
        )

    def nonce(self, unix: float) -> str:
        """Return a nonce of this second, which the secret knows again: it does not have to be remembered."""
        return self._nonce(str(int(unix)))

    def made_lately(self, nonce: str, unix: float) -> bool:
        """Return whether a nonce was made here within the last half minute.

        Many callers may have the same one: MUNGE itself decodes no credential a second time.
        """
        second = nonce.partition(":")[0]
        return (
            _SECOND.fullmatch(second) is not None
            and hmac.compare_digest(nonce.encode(), self._nonce(second).encode())
            and 0.0 <= unix - int(second) <= NONCE_S
        )

    def _nonce(self, second: str) -> str:
        return f"{second}:{self._digest(f'nonce {second}')}"

    def _digest(self, claims: str) -> str:
        digest = hmac.new(self.secret.encode(), f"deeplink watch {claims}".encode(), sha256).digest()
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class Credential:
    """The facts that MUNGE vouches for.

    Attributes:
        uid: of the process that made it.
        hosts: names and addresses of the host that it was made on, as far as MUNGE tells.
        statement: what it said.
    """

    uid: int
    hosts: tuple[str, ...]
    statement: str


def job_statement(attempt: Attempt, nonce: str) -> str:
    """Return what a job's launcher has MUNGE vouch for."""
    return f"deeplink watch job {attempt} {nonce}"


def node_statement(node: str, nonce: str) -> str:
    """Return what a standing agent has MUNGE vouch for."""
    return f"deeplink watch node {quote(node, safe='')} {nonce}"


@dataclass(slots=True)
class MungeSocket:
    """The place of the munged that Slurm uses here: asked of Slurm until it answers. Thread-safe."""

    run: command.Runner = command.run
    _path: str | None = None
    _asked: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def path(self) -> str:
        """Return its path; empty for MUNGE's own place, which is taken too while Slurm does not tell.

        It takes as long as one question: callers that come meanwhile share its answer.
        """
        before = self._asked
        if self._path is None:
            with self._lock:
                if self._asked == before:
                    self._ask()
        return self._path or ""

    def _ask(self) -> None:
        with contextlib.suppress(DeepLinkError):
            said = self.run(["scontrol", "show", "config"], timeout_s=MUNGE_S)
            self._path = parse_settings(said).item("AuthInfo", "socket") or ""
        self._asked += 1

    @property
    def is_known(self) -> bool:
        """Whether Slurm told the place."""
        return self._path is not None


def encoded(statement: str, socket: str = "") -> str:
    """Return a MUNGE credential of this process's user.

    Raises:
        CommandMissingError: MUNGE is not installed here.
        CommandTimeoutError: munged does not answer.
        CredentialError: it refused.
    """
    return _asked(["munge", *_at(socket)], statement).strip()


def decoded(credential: str, socket: str = "") -> Credential:
    """Return what a MUNGE credential says; each can be decoded once (munged(8), replays).

    Raises:
        CommandMissingError: MUNGE is not installed here.
        CommandTimeoutError: munged does not answer.
        CredentialError: it is none, it is too old, or it was decoded before.
    """
    head, _, statement = _asked(["unmunge", "--keys=UID,ENCODE_HOST", *_at(socket)], credential).partition("\n\n")
    uid, host = _UID.search(head), _HOST.search(head)
    if uid is None:
        raise CredentialError(f"unmunge names no user: {head[:200]!r}")
    return Credential(int(uid[1]), tuple(filter(None, host.groups())) if host else (), statement)


def _at(socket: str) -> list[str]:
    return [f"--socket={socket}"] if socket else []


def _asked(argv: list[str], text: str) -> str:
    done = command.finish(argv, timeout_s=MUNGE_S, stdin=text)
    if done.code:
        raise CredentialError(done.stderr.strip() or f"{argv[0]} exited {done.code}")
    return done.stdout
