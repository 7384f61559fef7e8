"""The tokens of the watchdog's callers: each names a user, and what he may speak for."""

from __future__ import annotations

import base64
import hmac
import re
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from deeplink.core.types import Attempt, NodeName

NONCE_S = 30.0
_SECOND = re.compile(r"\d{1,12}", re.ASCII)
_CLAIMS = re.compile(
    r"u(?P<uid>\d{1,10})\.e(?P<until>\d{1,12})(?:(?P<operator>\.o)|\.j(?P<job>\d{1,18})\.(?P<restart>\d{1,9})|\.n(?P<node>[^:]{1,1024}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The holder of a token."""

    uid: int  # the user's
    job: int = 0  # the one job that he may speak for, with its restart count; 0: any job of his
    restart: int = 0
    node: str = ""  # the one node that he may speak for; empty: none, or any
    operator: bool = False  # he asks for what people decide, and speaks for no job or node

    def speaks_for(self, attempt: Attempt) -> bool:
        """Return whether the token was made for this attempt's job; whose job that is, Slurm knows."""
        return not (self.node or self.operator) and (
            not self.job or (self.job, self.restart) == (attempt.job, attempt.restart)
        )

    def speaks_for_node(self, node: NodeName) -> bool:
        """Return whether the token was made for this node, or for none in particular."""
        return not (self.job or self.operator) and self.node in {"", node}


@dataclass(frozen=True, slots=True)
class TokenMint:
    """Makes tokens and reads them back; whoever has the secret makes the same ones."""

    secret: str

    def token(self, caller: Caller, until: float) -> str:
        """Return the token that names this caller until a moment, seconds since 1970.

        >>> TokenMint("s").token(Caller(uid=1000, job=17), 99.0)[:14]
        'u1000.e99.j17.'
        """
        claims = f"u{caller.uid}.e{int(until)}{'.o' * caller.operator}"
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
            operator=bool(found["operator"]),
        )

    def nonce(self, unix: float) -> str:
        """Return a nonce of this second, which the secret knows again: it does not have to be remembered."""
        return self._nonce(str(int(unix)))

    def made_lately(self, nonce: str, unix: float) -> bool:
        """Return whether a nonce was made here within the last half minute."""
        # Many callers may have the same one: MUNGE itself decodes no credential a second time.
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
