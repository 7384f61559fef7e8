"""What an operator may ask of the watchdog, the commands that do it, what takes it back, and the client for it."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import grpc

from deeplink.core.errors import DeepLinkError
from deeplink.rpc.channel import open_channel
from deeplink.scheduler.liveness.watchdog_client import WatchdogClient
from deeplink.scheduler.slurm.nodeset import MOST_NODES, at_most
from deeplink.scheduler.slurm.parse import JobAddress
from deeplink.v1 import watch_pb2, watch_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

DEFAULT_WATCH = "127.0.0.1:7412"  # where `deeplink watch` listens unless it is told otherwise
PLAN_S = 70.0  # a dataset's plan asks each member; one of Slurm's takes a second
ACT_S = 25.0
ROLE_S = 3.0
LONGEST_WHY = 200  # characters: Slurm prints a reason on one line
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)
_NODES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,\[\]-]{0,4095}", re.ASCII)
_INCIDENT = re.compile(r"[A-Za-z0-9][^\x00-\x20\x7f]{0,511}")
_REQUEST = re.compile(r"[A-Za-z0-9-]{8,64}", re.ASCII)
_PERSON = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+ -]{0,99}", re.ASCII)


class OperatorVerb(StrEnum):
    """One thing that an operator may ask for."""

    ACKNOWLEDGE = "acknowledge"  # an incident: somebody looks after it
    REOPEN = "reopen"
    DRAIN = "drain"  # a node
    RESUME = "resume"
    REQUEUE = "requeue"  # a job
    RELEASE = "release"
    CANCEL = "cancel"
    WARM = "warm"  # a dataset, onto nodes
    EVICT = "evict"
    PAUSE = "pause-watchdog"  # no action of its own is begun
    UNPAUSE = "resume-watchdog"


OF_NODES = frozenset({OperatorVerb.DRAIN, OperatorVerb.RESUME})
OF_JOBS = frozenset({OperatorVerb.REQUEUE, OperatorVerb.RELEASE, OperatorVerb.CANCEL})
OF_DATASETS = frozenset({OperatorVerb.WARM, OperatorVerb.EVICT})
OF_INCIDENTS = frozenset({OperatorVerb.ACKNOWLEDGE, OperatorVerb.REOPEN})
OF_THE_WATCHDOG = frozenset({OperatorVerb.PAUSE, OperatorVerb.UNPAUSE})
WATCHDOG = "watchdog"
"""The target of what is about the watchdog itself."""
UNDO = {
    OperatorVerb.DRAIN: OperatorVerb.RESUME,
    OperatorVerb.RESUME: OperatorVerb.DRAIN,
    OperatorVerb.PAUSE: OperatorVerb.UNPAUSE,
    OperatorVerb.UNPAUSE: OperatorVerb.PAUSE,
    OperatorVerb.ACKNOWLEDGE: OperatorVerb.REOPEN,
    OperatorVerb.REOPEN: OperatorVerb.ACKNOWLEDGE,
}
"""Verb -> the one that takes it back."""


class OperationError(DeepLinkError):
    """A request of an operator cannot be understood."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRequest:
    """One thing asked for. `of` checks its words, which come from outside."""

    verb: OperatorVerb
    target: str
    nodes: str = ""
    why: str = ""
    force: bool = False

    @classmethod
    def of(cls, verb: str, target: str, *, nodes: str = "", why: str = "", force: bool = False) -> OperatorRequest:
        """Return the request, or raise `OperationError`."""
        try:
            known = OperatorVerb(verb)
        except ValueError:
            raise OperationError(f"{verb!r} is no action", remedy=f"One of {', '.join(OperatorVerb)}.") from None
        if known in OF_THE_WATCHDOG:
            target = WATCHDOG
        if not _is_target(known, target):
            raise OperationError(f"{verb}: {target!r} is not the name of one {_thing(known)}")
        if bool(nodes) != (known is OperatorVerb.WARM) or (
            nodes and (not _NODES.fullmatch(nodes) or at_most(nodes) > MOST_NODES)
        ):
            raise OperationError(
                f"{verb}: nodes {nodes!r}", remedy="Only warm takes nodes, and needs them: n[0-3]."
            )
        why = " ".join(why.split())
        if len(why) > LONGEST_WHY or not why.isprintable():
            raise OperationError(f"{verb}: the reason is over {LONGEST_WHY} characters, or not printable")
        return cls(verb=known, target=target, nodes=nodes, why=why, force=force)


def _thing(verb: OperatorVerb) -> str:
    if verb in OF_NODES:
        return "node"
    if verb in OF_JOBS:
        return "job"
    return "dataset" if verb in OF_DATASETS else "incident"


def _is_target(verb: OperatorVerb, target: str) -> bool:
    if verb in OF_JOBS:
        try:
            JobAddress.of_label(target)
        except DeepLinkError:
            return False
        return True
    if verb in OF_INCIDENTS:
        return _INCIDENT.fullmatch(target) is not None and target.isprintable()
    name = target.replace("@", "-", 1) if verb in OF_DATASETS else target
    return _NAME.fullmatch(name) is not None


def check_request(request: str) -> str:
    """Return the id of a request that is one; it is written down, and found again by it."""
    if not _REQUEST.fullmatch(request):
        raise OperationError("the request has no id", remedy="8 to 64 letters and digits, new for each request.")
    return request


def check_person(person: str) -> str:
    """Return a name that can stand in Slurm's reason and in the record."""
    if not _PERSON.fullmatch(person):
        raise OperationError(f"{person[:100]!r} is no name of a person")
    return person


def reason_of(person: str, why: str) -> str:
    """Return what stands as a node's reason in Slurm. Not with the watchdog's tag: it resumes what bears that.

    >>> reason_of("ada", "fan is loud")
    'operator ada: fan is loud'
    """
    return f"operator {person}: {why}"


def commands_of(request: OperatorRequest, person: str) -> tuple[tuple[str, ...], ...]:  # noqa: PLR0911 - one return for each verb
    """Return the commands that do it, as far as can be said without asking; none for what only the journal takes.

    >>> commands_of(OperatorRequest.of("resume", "n7"), "ada")
    (('scontrol', 'update', 'nodename=n7', 'state=resume'),)
    """
    target = request.target
    match request.verb:
        case OperatorVerb.DRAIN:
            reason = f"reason={reason_of(person, request.why)}"
            return (("scontrol", "update", f"nodename={target}", "state=drain", reason),)
        case OperatorVerb.RESUME:
            return (("scontrol", "update", f"nodename={target}", "state=resume"),)
        case OperatorVerb.REQUEUE:
            return (("scontrol", "requeue", target), ("scontrol", "update", f"jobid={target}", "StartTime=now"))
        case OperatorVerb.RELEASE:
            return (("scontrol", "release", target),)
        case OperatorVerb.CANCEL:
            return (("scancel", "--quiet", target),)
        case OperatorVerb.WARM:
            return (("deeplink", "prefetch", "--nodes", request.nodes, target),)
        case OperatorVerb.EVICT:
            return (("deeplink", "evict", target, *["--force"] * request.force),)
        case _:
            return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPlan:
    """What would be done now, and on what that rests."""

    request: OperatorRequest  # with the target's own name
    saw: str  # JSON of what it depends on
    commands: tuple[tuple[str, ...], ...] = ()
    remarks: tuple[str, ...] = ()
    refused: str = ""  # why it would not be done now
    remedy: str = ""

    @property
    def undo(self) -> str:
        """The verb that takes it back; empty where none does."""
        return UNDO.get(self.request.verb, "")


def seen(facts: Mapping[str, str]) -> str:
    """Return facts as the one JSON text that stands for them."""
    return json.dumps(dict(facts), sort_keys=True)


def changes(before: str, now: str) -> str:
    """Return what has changed between two texts of `seen`, in words; empty where nothing has.

    >>> changes('{"state": "in service"}', '{"state": "drained"}')
    'state was in service and is drained'
    """
    if before == now:
        return ""
    try:
        was = dict(json.loads(before))
    except (ValueError, TypeError):
        return "what was seen before cannot be read"
    facts = json.loads(now)
    words = [
        f"{name} was {was.get(name) or 'empty'} and is {facts.get(name) or 'empty'}"
        for name in sorted({*was, *facts})
        if was.get(name) != facts.get(name)
    ]
    return "; ".join(words) or "it is written otherwise"


class OperatorCallError(DeepLinkError):
    """The watchdog did not do, or did not hear, what an operator asked for."""

    def __init__(self, status: grpc.StatusCode, problem: str, remedy: str = "") -> None:
        super().__init__(problem, remedy=remedy)
        self.status, self.problem = status, problem

    @property
    def is_away(self) -> bool:
        """Whether no watchdog was reached that knows of such requests."""
        return self.status in {
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.UNIMPLEMENTED,
        }


def by_hand(asked: watch_pb2.OperationRequest) -> list[str]:
    """Return the commands to run where no watchdog does. Raises OperationError where the request is none."""
    request = OperatorRequest.of(asked.verb, asked.target, nodes=asked.nodes, why=asked.why, force=asked.force)
    return [shlex.join(argv) for argv in commands_of(request, asked.person or "by hand")]


@dataclass(frozen=True, slots=True)
class OperatorClient:
    """Asks the watchdog at an address. Thread-safe: each call has a connection of its own."""

    address: str
    token: str = field(default="", repr=False)  # a person's; empty: this process's own
    token_file: Path | None = None  # with this process's own; None: MUNGE proves it

    def plan(self, request: watch_pb2.OperationRequest) -> watch_pb2.OperationPlan:
        """Return what would be done."""
        found: watch_pb2.OperationPlan = self._call(lambda stub: stub.Plan(request, timeout=PLAN_S))
        return found

    def act(self, request: watch_pb2.OperationRequest) -> watch_pb2.OperationReply:
        """Have it done."""
        found: watch_pb2.OperationReply = self._call(lambda stub: stub.Act(request, timeout=ACT_S))
        return found

    def role(self) -> watch_pb2.RoleReply:
        """Return whose token it is; OperatorCallError where it is no operator's."""
        found: watch_pb2.RoleReply = self._call(lambda stub: stub.Role(watch_pb2.RoleRequest(), timeout=ROLE_S))
        return found

    def _call(self, say: Callable[[Any], Any]) -> Any:
        try:
            if self.token:
                with open_channel(self.address, self.token) as channel:
                    return say(watch_pb2_grpc.OperationsStub(channel))
            line = WatchdogClient(self.address, self.token_file, None)
            try:
                return line.call(say)
            finally:
                line.close()
        except grpc.RpcError as problem:
            status = problem.code()
            said = problem.details() or status.name
            remedy = ""
            if status in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}:
                remedy = "`deeplink watch --mint USER --operator` makes an operator's token."
            elif status is grpc.StatusCode.UNIMPLEMENTED:
                said = "that watchdog is of an older release, and takes no requests"
            raise OperatorCallError(status, said, remedy) from problem
