"""Takes operators' requests over gRPC: every call needs a token of that role."""

from __future__ import annotations

import contextlib
import shlex
import threading
from typing import TYPE_CHECKING

import grpc
from typing_extensions import override

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.watch.operator_actions import TooManyOperationsError
from deeplink.scheduler.watch.operator_requests import UNDO, OperationError, OperatorRequest, check_person
from deeplink.scheduler.watch.server import aborting, token_in
from deeplink.v1 import watch_pb2, watch_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.scheduler.watch.operator_actions import OperatorActor
    from deeplink.scheduler.watch.server import Authorizer

MOST_CALLS = 4
"""Requests looked at, or waited for, at once: the rest of the server's threads are left to heartbeats."""


class OperationsServicer(watch_pb2_grpc.OperationsServicer):
    """Answers operators. Thread-safe.

    INVALID_ARGUMENT where a request cannot be understood, RESOURCE_EXHAUSTED where there are too many, UNAVAILABLE
    where Slurm or the journal does not answer.
    """

    def __init__(self, actor: OperatorActor, authorizer: Authorizer) -> None:
        self._actor, self._authorizer = actor, authorizer
        self._places = threading.Semaphore(MOST_CALLS)

    @override
    def Plan(self, request: watch_pb2.OperationRequest, context: grpc.ServicerContext) -> watch_pb2.OperationPlan:
        """Return what would be done now, and the commands."""
        person, _ = self._persons(request, context)
        with self._answering(context):
            plan = self._actor.planner.plan(_asked(request), person)
        return watch_pb2.OperationPlan(
            commands=list(map(shlex.join, plan.commands)),
            saw=plan.saw,
            undo=plan.undo,
            remarks=plan.remarks,
            refused=plan.refused,
            remedy=plan.remedy,
        )

    @override
    def Act(self, request: watch_pb2.OperationRequest, context: grpc.ServicerContext) -> watch_pb2.OperationReply:
        """Have it done, and return how it stands after a while."""
        person, via = self._persons(request, context)
        with self._answering(context):
            asked = _asked(request)
            record = self._actor.submit(request.request, asked, request.saw, person, via=via)
        return watch_pb2.OperationReply(
            outcome=record.outcome,
            result=record.result,
            undo=UNDO.get(asked.verb, ""),
            asked_unix=record.asked_unix,
            done_unix=record.done_unix,
            commands=record.commands,
        )

    @override
    def Role(self, request: watch_pb2.RoleRequest, context: grpc.ServicerContext) -> watch_pb2.RoleReply:
        """Return the operator's name, and whether the watchdog acts."""
        with aborting(context):
            user = self._authorizer.operator(token_in(context))
        return watch_pb2.RoleReply(user=user, acting=self._actor.planner.acts, paused=self._actor.paused)

    def _persons(self, request: watch_pb2.OperationRequest, context: grpc.ServicerContext) -> tuple[str, str]:
        """Return who asks, and whose token it is where that is another."""
        with aborting(context):
            user = self._authorizer.operator(token_in(context), request.person)
        if request.person in {"", user}:
            return user, ""
        with self._answering(context):
            return check_person(request.person), user

    @contextlib.contextmanager
    def _answering(self, context: grpc.ServicerContext) -> Iterator[None]:
        if not self._places.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests at once; try again")
        try:
            yield
        except OperationError as problem:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, _said(problem))
        except TooManyOperationsError as problem:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, _said(problem))
        except DeepLinkError as problem:
            context.abort(grpc.StatusCode.UNAVAILABLE, _said(problem))
        finally:
            self._places.release()


def _asked(request: watch_pb2.OperationRequest) -> OperatorRequest:
    return OperatorRequest.of(
        request.verb, request.target, nodes=request.nodes, why=request.why, force=request.force
    )


def _said(problem: DeepLinkError) -> str:
    return f"{problem}. {problem.remedy}" if problem.remedy else str(problem)
