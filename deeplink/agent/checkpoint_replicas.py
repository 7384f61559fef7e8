"""The agent's checkpoint service: serves its node's, keeps replicas of other nodes', passes posts on.

Only agents of a job do: they run as its user, so that no user reads the files of another.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
from typing_extensions import override

from deeplink.cache.source.opening import TokenBucket
from deeplink.checkpoints.agents import OWN, NotFetchedError, fetch_files, held_by
from deeplink.checkpoints.claims import NO_CLAIM, Claim, claim_of, is_newer, wire_claim
from deeplink.checkpoints.copies import Copies, NoRoomError
from deeplink.checkpoints.manifest import CheckpointDamagedError
from deeplink.checkpoints.multirank_save import Boards
from deeplink.core.config import Config
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import FencedError
from deeplink.rpc.channel import attempt_from_wire, attempt_to_wire
from deeplink.rpc.plain import PlainConnection
from deeplink.rpc.tokens import shown
from deeplink.v1 import keep_pb2, keep_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from deeplink.agent.agent import AgentSettings
    from deeplink.checkpoints.agents import There
    from deeplink.checkpoints.manifest import FileEntry
    from deeplink.core.clock import Clock
    from deeplink.core.types import Attempt, NodeName
    from deeplink.rpc.tokens import RunTokens

log = logging.getLogger(__name__)

HOLD: Final = "/deeplink.v1.Keep/Hold"
FOLDER: Final = "checkpoints"
"""Below an agent's store."""
_PIECE = 1 << 20
_SAY_EVERY_S = 2.0
"""A rank that waits for a copy hears so often that it goes on; it asks again after `_SAYS` answers."""
_SAYS = 5


@dataclass(slots=True)
class _Taking:
    """One copy on its way here; it goes on though the rank that asked for it has died."""

    bytes: int = 0
    outcome: int = keep_pb2.TAKE_OUTCOME_UNDER_WAY
    problem: str = ""
    ended: threading.Event = field(default_factory=threading.Event)

    def reply(self) -> keep_pb2.TakeReply:
        return keep_pb2.TakeReply(
            outcome=keep_pb2.TakeOutcome.ValueType(self.outcome), bytes=self.bytes, problem=self.problem
        )


class KeepServicer(keep_pb2_grpc.KeepServicer):
    """Answers ranks and other agents of the job about checkpoints."""

    def __init__(
        self,
        node: NodeName,
        copies: Copies,
        token: str | RunTokens,
        learn: Callable[[Attempt], Attempt],
        *,
        clock: Clock,
        bytes_per_s: float,
    ) -> None:
        self._node, self._copies, self._token = node, copies, token
        self._learn, self._clock = learn, clock
        self._bucket = TokenBucket(bytes_per_s, 0)
        self._boards = Boards()
        self._lock = threading.Lock()  # of `_said_by` and `_takings`
        self._keeping = threading.Lock()
        self._said_by: dict[str, Attempt] = {}
        self._takings: dict[tuple[str, str, str], _Taking] = {}

    @override
    def Hold(self, request: keep_pb2.HoldRequest, context: grpc.ServicerContext) -> keep_pb2.HoldReply:
        """Take note of where this node's checkpoints lie and of who holds the run; say who does."""
        attempt = attempt_from_wire(request.attempt)
        newest = self._learn(attempt)
        try:
            if newest == attempt and request.folder:
                self._copies.own(request.run, Path(request.folder))
                with self._lock:
                    self._said_by[request.run] = attempt
            if newest == attempt and request.claim:
                self._copies.learn(request.run, claim_of(request.claim))
            return self._holding(request.run, newest)
        except (LookupError, ValueError) as problem:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        except OSError as problem:
            context.abort(grpc.StatusCode.INTERNAL, f"this node's disk: {problem}")

    def _holding(self, run: str, newest: Attempt | None) -> keep_pb2.HoldReply:
        with self._lock:
            said_by = self._said_by.get(run)
        return keep_pb2.HoldReply(
            newest=None if newest is None else attempt_to_wire(newest),
            claim=wire_claim(self._copies.claim(run)),
            said_by=None if said_by is None else attempt_to_wire(said_by),
            has_own=self._copies.own_folder(run) is not None,
        )

    @override
    def Held(self, request: keep_pb2.HeldRequest, context: grpc.ServicerContext) -> keep_pb2.HeldReply:
        """Say what this node has of a run."""
        try:
            found = self._copies.held(request.run, name=request.name, contents=request.contents)
            return keep_pb2.HeldReply(node=self._node, hold=self._holding(request.run, None), checkpoints=found)
        except LookupError as problem:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        except OSError as problem:
            context.abort(grpc.StatusCode.INTERNAL, f"this node's disk: {problem}")

    @override
    def Fetch(
        self, request: keep_pb2.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[keep_pb2.FetchReply]:
        """Send a file."""
        try:
            left = request.length
            with self._copies.open(request.run, request.name, request.origin, request.path) as file:
                file.seek(request.offset)
                while left and (chunk := file.read(min(left, _PIECE))):
                    left -= len(chunk)
                    yield keep_pb2.FetchReply(chunk=chunk)
        except (LookupError, CheckpointDamagedError, OSError) as problem:
            context.abort(grpc.StatusCode.NOT_FOUND, str(problem))

    @override
    def Take(self, request: keep_pb2.TakeRequest, context: grpc.ServicerContext) -> Iterator[keep_pb2.TakeReply]:
        """Fetch a checkpoint and keep it; say now and then that it goes on."""
        key = (request.run, request.node, request.name)
        with self._lock:
            taking = self._takings.get(key)
            if taking is None:
                taking = _Taking()
                work = threading.Thread(
                    target=self._take, args=(key, taking, request), name="deeplink-copy", daemon=True
                )
                work.start()  # noted only once it runs: it strikes itself out, under this lock
                self._takings[key] = taking
        for _ in range(_SAYS):
            if taking.ended.wait(_SAY_EVERY_S):
                break
            yield taking.reply()
        yield taking.reply()

    def _take(self, key: tuple[str, str, str], taking: _Taking, request: keep_pb2.TakeRequest) -> None:
        try:
            with self._keeping:
                self._kept(taking, request)
            taking.outcome = keep_pb2.TAKE_OUTCOME_KEPT
        except FencedError as fenced:
            taking.outcome, taking.problem = keep_pb2.TAKE_OUTCOME_FENCED, str(fenced.newest or "")
        except NoRoomError as full:
            taking.outcome, taking.problem = keep_pb2.TAKE_OUTCOME_NO_ROOM, str(full)
        except (DeepLinkError, LookupError, OSError, ValueError) as problem:
            log.warning("no copy of %s for %s: %s", request.name, request.node, problem)
            taking.outcome, taking.problem = keep_pb2.TAKE_OUTCOME_FAILED, str(problem)
        except BaseException:
            taking.outcome, taking.problem = keep_pb2.TAKE_OUTCOME_FAILED, "an error of the agent's; see its log"
            raise
        finally:
            with self._lock:
                del self._takings[key]
            taking.ended.set()

    def _kept(self, taking: _Taking, request: keep_pb2.TakeRequest) -> None:
        claim = claim_of(request.claim) if request.claim else NO_CLAIM

        check = partial(self._refuse_if_fenced, request, claim)
        check()
        self._copies.learn(request.run, claim)
        there = self._there(request)

        def came(size: int) -> None:
            taking.bytes += size
            self._clock.sleep(max(0.0, self._bucket.take(self._clock.monotonic(), size)))

        def fetch(files: Iterable[FileEntry], into: Path) -> None:
            fetch_files(
                there, files, into, run=request.run, token=shown(self._token), clock=self._clock, came=came
            )

        self._copies.keep(request.run, there, claim, fetch, check)

    def _refuse_if_fenced(self, request: keep_pb2.TakeRequest, claim: Claim) -> None:
        attempt = attempt_from_wire(request.attempt)
        newest = self._learn(attempt)
        if newest > attempt:
            raise FencedError(attempt, newest, f"job {attempt.job}")
        holder = self._copies.claim(request.run)
        if is_newer(holder, claim):
            raise FencedError(attempt, holder.attempt, f"run {request.run}")

    def _there(self, request: keep_pb2.TakeRequest) -> There:
        with PlainConnection(request.source, shown(self._token), self._clock) as connection:
            found = held_by(connection, request.run, self._clock.monotonic, name=request.name)
        there = next((one for one in found.whole if one.origin == OWN), None)
        if there is None or found.node != request.node:
            raise NotFetchedError(request.name, f"{request.node} has it no more")
        return there

    @override
    def Tell(self, request: keep_pb2.TellRequest, context: grpc.ServicerContext) -> keep_pb2.TellReply:
        """Keep what a rank posts for the others."""
        try:
            self._boards.tell(request)
        except OverflowError as full:
            context.abort(grpc.StatusCode.OUT_OF_RANGE, str(full))
        except ValueError as problem:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
        return keep_pb2.TellReply()

    @override
    def Hear(self, request: keep_pb2.HearRequest, context: grpc.ServicerContext) -> keep_pb2.HearReply:
        """Return what ranks posted."""
        return self._boards.hear(request)


def served(settings: AgentSettings, server: grpc.Server, learn: Callable[[Attempt], Attempt], clock: Clock) -> str:
    """Serve the Keep service on `server`; return its full name, for health and reflection."""
    config = settings.config or Config()
    copies = Copies(settings.store / FOLDER, config.copies_bytes, clock)
    threading.Thread(target=copies.forget, name="deeplink-forget", daemon=True).start()
    servicer = KeepServicer(
        settings.node, copies, settings.token, learn, clock=clock, bytes_per_s=config.fill_bytes_per_s
    )
    keep_pb2_grpc.add_KeepServicer_to_server(servicer, server)
    return keep_pb2.DESCRIPTOR.services_by_name["Keep"].full_name
