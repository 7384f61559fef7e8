"""What operators have done through the console: asked of the watchdog, which does it and writes it down.

The console itself changes nothing, and holds no right of its own but where a proxy names its users.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from starlette.responses import Response
from starlette.routing import Route

from deeplink.console.feed import encode
from deeplink.console.request_guard import ConsoleRole, RoleClaim, Roles, foreign_origin
from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.journal.journal import Journal, JournalMissingError
from deeplink.scheduler.journal.operations import OperationLog
from deeplink.scheduler.watch.operator_requests import (
    UNDO,
    OperationError,
    OperatorCallError,
    OperatorClient,
    OperatorRequest,
    OperatorVerb,
    by_hand,
    check_person,
    check_request,
)
from deeplink.v1 import watch_pb2

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from starlette.requests import Request

PLAN, ACT, ROLE = "/api/v1/actions/plan", "/api/v1/actions", "/api/v1/role"
POSTS = frozenset({PLAN, ACT})
LONGEST_BODY = 8_192  # bytes
BODY_S = 5.0
MOST_AT_ONCE = 8
SHOWN = 50  # operations that are listed at once
_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
}
_TEXTS = ("verb", "target", "nodes", "why", "saw", "request")
T = TypeVar("T")


class _RefusedError(DeepLinkError):
    """A request is not passed on."""

    def __init__(self, status: int, problem: str, remedy: str = "", **more: object) -> None:
        super().__init__(problem, remedy=remedy)
        self.status, self.more = status, more


def _answer(value: object, status: int = 200) -> Response:
    return Response(encode(value), status, {"cache-control": "no-store"}, "application/json")


@dataclass(frozen=True, slots=True)
class ConsoleActions:
    """The pages that change something, and those that say who may and who did."""

    watchdog: OperatorClient  # with the console's own credential, for whom a proxy names
    roles: Roles
    journal: Path
    hosts: frozenset[str] = frozenset()  # names that this console is also called by
    _places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_AT_ONCE))
    _roles: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_AT_ONCE))  # of `role` alone

    def routes(self) -> list[Route]:
        """Return where they are."""
        return [
            Route(PLAN, self.plan, methods=["POST"]),
            Route(ACT, self.act, methods=["POST"]),
            Route(ACT, self.listing, methods=["GET"]),
            Route(ROLE, self.role),
        ]

    async def role(self, request: Request) -> Response:
        """Say who asks: a viewer, or an operator whom the watchdog knows."""
        claim = self._claim(request)
        said: dict[str, Any] = {"role": ConsoleRole.VIEWER, "name": "", "why": claim.why, "watchdog": ""}
        if claim.role is ConsoleRole.OPERATOR:
            try:
                found = await self._asked(self._client(claim).role, self._roles)
            except OperatorCallError as problem:
                away = str(problem) if problem.is_away else ""
                said |= {"why": "" if away else str(problem), "watchdog": away}
                if away and not claim.token:  # the proxy has said who it is: it is the watchdog that is not there
                    said |= {"role": ConsoleRole.OPERATOR, "name": claim.name}
            except DeepLinkError as problem:
                said |= {"watchdog": str(problem)}
            else:
                said |= {"role": ConsoleRole.OPERATOR, "name": claim.name or found.user}
                said |= {"acting": found.acting, "paused": found.paused}
        return _answer(said)

    async def listing(self, request: Request) -> Response:
        """List what was done, the newest first, on the targets that are named or on all."""
        targets = request.query_params.getlist("target")[:SHOWN]
        return _answer({"actions": await asyncio.to_thread(self._listed, targets)})

    def _listed(self, targets: list[str]) -> list[dict[str, Any]]:
        try:
            with Journal(self.journal, read_only=True) as journal:
                found = OperationLog(journal).newest(targets, SHOWN)
        except JournalMissingError:  # nothing was ever done
            return []
        return [{**asdict(each), "undo": _undo(each.verb)} for each in found]

    async def plan(self, request: Request) -> Response:
        """Say what would be done, with the commands."""
        return await self._passed(request, self._planned)

    async def act(self, request: Request) -> Response:
        """Have it done."""
        return await self._passed(request, self._done)

    async def _passed(
        self, request: Request, ask: Callable[[OperatorClient, watch_pb2.OperationRequest], dict[str, Any]]
    ) -> Response:
        asked = watch_pb2.OperationRequest()
        try:
            claim = self._operator(request)
            asked = _read(await _body(request), claim)
            return _answer(await self._asked(lambda: ask(self._client(claim), asked), self._places))
        except _RefusedError as problem:
            return _answer({"error": str(problem), "remedy": problem.remedy, **problem.more}, problem.status)
        except OperatorCallError as problem:
            status = _STATUS.get(problem.status, 503)
            more = {"commands": by_hand(asked)} if problem.is_away else {}
            said = f"no watchdog does it: {problem}" if problem.is_away else str(problem)
            return _answer({"error": said, "remedy": problem.remedy, **more}, status)
        except OperationError as problem:
            return _answer({"error": str(problem), "remedy": problem.remedy}, 400)
        except DeepLinkError as problem:  # its own credential, say
            more = {"commands": by_hand(asked)}
            return _answer({"error": f"no watchdog was asked: {problem}", "remedy": problem.remedy, **more}, 503)

    def _claim(self, request: Request) -> RoleClaim:
        return self.roles.claim(request.client.host if request.client else "", request.headers)

    def _operator(self, request: Request) -> RoleClaim:
        if why := foreign_origin(request.headers, self.hosts):
            raise _RefusedError(403, why, "Act from the console's own page.")
        claim = self._claim(request)
        if claim.role is not ConsoleRole.OPERATOR:
            raise _RefusedError(403, f"a viewer changes nothing: {claim.why}", "docs/console.md: operators.")
        return claim

    def _client(self, claim: RoleClaim) -> OperatorClient:
        return replace(self.watchdog, token=claim.token) if claim.token else self.watchdog

    @staticmethod
    async def _asked(ask: Callable[[], T], places: asyncio.Semaphore) -> T:
        if places.locked():
            raise _RefusedError(429, "too many requests at once", "Try again.")
        async with places:
            return await asyncio.to_thread(ask)

    @staticmethod
    def _planned(client: OperatorClient, asked: watch_pb2.OperationRequest) -> dict[str, Any]:
        found = client.plan(asked)
        return {
            "request": secrets.token_hex(16),
            "commands": list(found.commands),
            "saw": found.saw,
            "undo": found.undo,
            "remarks": list(found.remarks),
            "refused": found.refused,
            "remedy": found.remedy,
        }

    @staticmethod
    def _done(client: OperatorClient, asked: watch_pb2.OperationRequest) -> dict[str, Any]:
        check_request(asked.request)
        found = client.act(asked)
        said = {"request": asked.request, "outcome": found.outcome, "result": found.result, "undo": found.undo}
        return {**said, "commands": list(found.commands), "done_unix": found.done_unix}


async def _body(request: Request) -> dict[str, Any]:
    """Return the JSON object that was sent."""
    body = b""
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > LONGEST_BODY:
                    raise _RefusedError(413, f"the request is longer than {LONGEST_BODY} bytes")
    except TimeoutError:
        raise _RefusedError(408, "the request did not come to its end") from None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _RefusedError(400, "the request is no JSON object")
    return found


def _read(said: dict[str, Any], claim: RoleClaim) -> watch_pb2.OperationRequest:
    """Return the request; what the watchdog would refuse for its words alone is refused here."""
    if strange := sorted({*said} - {*_TEXTS, "force"}):
        raise _RefusedError(400, f"unknown: {', '.join(strange)[:200]!r}")
    texts = {name: said.get(name, "") for name in _TEXTS}
    force = said.get("force", False)
    if not all(isinstance(text, str) for text in texts.values()) or not isinstance(force, bool):
        raise _RefusedError(400, "texts are texts, and force is true or false")
    words = {name: texts[name] for name in ("nodes", "why")}
    known = OperatorRequest.of(texts["verb"], texts["target"], force=force, **words)
    person = check_person(claim.name) if claim.name else ""
    texts |= {"target": known.target, "why": known.why}
    try:
        return watch_pb2.OperationRequest(**texts, force=force, person=person)
    except ValueError:  # half of a surrogate pair
        raise _RefusedError(400, "the request is no text") from None


def _undo(verb: str) -> str:
    try:
        return UNDO.get(OperatorVerb(verb), "")
    except ValueError:  # of another release
        return ""
