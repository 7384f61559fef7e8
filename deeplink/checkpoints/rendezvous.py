"""How ranks that save on their own nodes' disks exchange messages: through the first node's agent.

What `parts.Exchange` does with files of a shared folder, so that a save waits for no shared storage. Each node has
a draft of its own on its disk; its ranks write there.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from typing_extensions import override

from deeplink.checkpoints.fetching import SERVICE
from deeplink.checkpoints.multirank_save import Exchange, RankFailedError, SaveAbandonedError
from deeplink.checkpoints.wordboard import FAILED, MOST_PIECE
from deeplink.errors import DeepLinkError
from deeplink.plainrpc import PlainBusyError, PlainSilentError
from deeplink.v1 import keep_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from deeplink.checkpoints.agents import JobAgents

_CALL_S: Final = 5.0
_RETRY_S: Final = 20.0
"""An agent that does not answer for so long is gone."""
_AGAIN_S = 0.2


@dataclass(frozen=True, slots=True)
class Board(Exchange):
    """How the ranks of one save tell each other something, by way of an agent.

    Attributes:
        agents: of the job.
        name: of the save, the same on all ranks and of no other save.
    """

    agents: JobAgents | None = field(default=None, kw_only=True)
    name: str = field(default="", kw_only=True)

    @override
    def __enter__(self) -> Self:
        """Make this node's draft, unless another of its ranks was quicker."""
        self.draft.mkdir(exist_ok=True)
        return self

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell the others of a failure, so that they do not wait for what will not come."""
        if error is None:
            return
        with suppress(DeepLinkError, OSError):
            self.put(FAILED, str(error).encode())
        shutil.rmtree(self.draft, ignore_errors=True)

    @override
    def put(self, kind: str, data: bytes) -> None:
        """Tell the others something; whole or not at all.

        Raises:
            PlainCallError: the agent does not take it.
        """
        pieces = max(1, -(-len(data) // MOST_PIECE))
        for piece in range(pieces):
            request = keep_pb2.TellRequest(
                board=self.name,
                kind=kind,
                rank=self.group.rank,
                piece=piece,
                pieces=pieces,
                data=data[piece * MOST_PIECE : (piece + 1) * MOST_PIECE],
            )
            self._called("Tell", request.SerializeToString())

    @override
    def _said(self, kind: str, rank: int) -> bytes:
        reply = self._heard(keep_pb2.HearRequest(board=self.name, kind=kind, ranks=[rank]))
        if not reply.words:
            raise SaveAbandonedError(self.draft, "the agent began anew, and forgot what ranks said")
        return reply.words[0]

    def _heard(self, request: keep_pb2.HearRequest) -> keep_pb2.HearReply:
        return keep_pb2.HearReply.FromString(self._called("Hear", request.SerializeToString()))

    @override
    def _missing(self, kind: str, ranks: Sequence[int]) -> list[int]:
        reply = self._heard(keep_pb2.HearRequest(board=self.name, kind=kind))
        missing = sorted(set(ranks).difference(reply.spoke))
        if missing and reply.failed:
            raise RankFailedError(self.draft, f"rank {reply.failed[0]} failed: {reply.failure}")
        return missing

    def _called(self, method: str, message: bytes) -> bytes:
        if self.agents is None:
            raise SaveAbandonedError(self.draft, "there is no agent to tell")
        until = self.clock.monotonic() + _RETRY_S
        while True:
            try:
                with self.agents.connection(self.agents.first) as connection:
                    return connection.call(f"{SERVICE}{method}", message, self.clock.monotonic() + _CALL_S)
            except (PlainSilentError, PlainBusyError):
                if self.clock.monotonic() > until:
                    raise
            self.clock.sleep(_AGAIN_S)
