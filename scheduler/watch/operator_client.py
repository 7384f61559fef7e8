"""What asks the watchdog for an operator: with a person's token, or with this process's own."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from deeplink.core.errors import DeepLinkError
from deeplink.rpc.channel import open_channel
from deeplink.scheduler.liveness.watchdog_client import WatchdogClient
from deeplink.scheduler.watch.operator_requests import OperatorRequest, commands_of
from deeplink.v1 import watch_pb2, watch_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DEFAULT_WATCH = "127.0.0.1:7412"  # where `deeplink watch` listens unless it is told otherwise
PLAN_S = 70.0  # a dataset's plan asks each member; one of Slurm's takes a second
ACT_S = 25.0
ROLE_S = 3.0


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
