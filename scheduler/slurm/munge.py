"""Proof of who a process is: MUNGE credentials, made and decoded by the munged that Slurm uses here."""

from __future__ import annotations

import contextlib
import re
import threading
from dataclasses import dataclass, field

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.slurm import command
from deeplink.scheduler.slurm.settings import parse_settings

MUNGE_S = 2.0  # bound on `munge` and `unmunge`: each asks the host's own munged over a socket
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


@dataclass(frozen=True, slots=True)
class Credential:
    """The facts that MUNGE vouches for."""

    uid: int  # of the process that made it
    hosts: tuple[str, ...]  # names and addresses of the host that it was made on, as far as MUNGE tells
    statement: str  # what it said


@dataclass(slots=True)
class MungeSocket:
    """The place of the munged that Slurm uses here: asked of Slurm until it answers. Thread-safe."""

    run: command.Runner = command.run
    _path: str | None = None
    _asked: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def path(self) -> str:
        """Return its path; empty for MUNGE's own place, which is taken too while Slurm does not tell."""
        # It takes as long as one question: callers that come meanwhile share its answer.
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
    """Return a MUNGE credential of this process's user."""
    return _asked(["munge", *_at(socket)], statement).strip()


def decoded(credential: str, socket: str = "") -> Credential:
    """Return what a MUNGE credential says; each can be decoded once (munged(8), replays)."""
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


_places = [""]
"""Where munged listens, as far as that was found out here; empty for its own place."""


def vouch(statement: str) -> str:
    """Return a credential of this process's user. Slurm is asked for the place where MUNGE's own does not do."""
    try:
        return encoded(statement, _places[0])
    except DeepLinkError:
        if _places[0] or not (place := MungeSocket().path()):
            raise
    made = encoded(statement, place)
    _places[0] = place
    return made
