"""Operators' requests over real gRPC: who may ask, and what is answered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from deeplink.core.types import Attempt
from deeplink.rpc.channel import open_channel
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.liveness.heartbeats import beat_to_wire
from deeplink.scheduler.recovery.records import Beat, Phase
from deeplink.scheduler.watch.authorizer import Caller
from deeplink.v1 import watch_pb2, watch_pb2_grpc
from tests.scheduler.watch.callers import ME, MINT, NEVER, TOKEN
from tests.scheduler.watch.operator_desk import EXPIRED, FORGED, OPERATORS, Desk, listening
from tests.waiting import LIMIT_S

OF_A_JOB = MINT.token(Caller(uid=0, job=17), NEVER)
BEAT = beat_to_wire(Beat(attempt=Attempt(17, 0, 0), phase=Phase.RUNNING, user=ME))
DRAIN = watch_pb2.OperationRequest(verb="drain", target="n3", why="fan")


class Served(NamedTuple):
    address: str
    desk: Desk


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Journal(tmp_path / "j.sqlite") as journal:
        desk = Desk(journal)
        with listening(desk) as address:
            yield Served(address, desk)


def asked(served: Served, token: str, call: str, request: Any) -> Any:
    with open_channel(served.address, token) as channel:
        return getattr(watch_pb2_grpc.OperationsStub(channel), call)(request, timeout=LIMIT_S)


def code(served: Served, token: str, call: str, request: Any) -> Any:
    with pytest.raises(grpc.RpcError) as refused:
        asked(served, token, call, request)
    return getattr(refused.value, "code")()  # noqa: B009 - grpc's errors have it, its annotations do not


@pytest.mark.parametrize(
    ("token", "status"),
    [
        ("", "UNAUTHENTICATED"),
        (FORGED, "UNAUTHENTICATED"),
        (EXPIRED, "UNAUTHENTICATED"),
        (TOKEN, "PERMISSION_DENIED"),  # of root's, or of a launcher's user: on every node there is one
        (OF_A_JOB, "PERMISSION_DENIED"),
    ],
)
def test_only_an_operators_token_plans_or_acts(served: Served, token: str, status: str) -> None:
    act = watch_pb2.OperationRequest(request="request-0", verb="drain", target="n3", why="fan", saw="{}")
    for call, request in (("Plan", DRAIN), ("Act", act), ("Role", watch_pb2.RoleRequest())):
        assert code(served, token, call, request).name == status
    assert not served.desk.machine.orders
    assert not served.desk.log.newest()


def test_an_operators_token_speaks_for_no_job_and_no_node(served: Served) -> None:
    with open_channel(served.address, OPERATORS) as channel:
        stub = watch_pb2_grpc.WatchStub(channel)
        for call in (
            lambda: stub.Beat(BEAT, timeout=LIMIT_S),
            lambda: stub.Attend(watch_pb2.AttendRequest(node="n3"), timeout=LIMIT_S),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert getattr(refused.value, "code")().name == "PERMISSION_DENIED"  # noqa: B009 - as above


def test_asked_agreed_done_and_for_whom(served: Served) -> None:
    role = asked(served, OPERATORS, "Role", watch_pb2.RoleRequest())
    assert (role.user, role.acting, role.paused) == (ME, True, "")
    plan = asked(served, OPERATORS, "Plan", DRAIN)
    assert list(plan.commands) == [f"scontrol update nodename=n3 state=drain 'reason=operator {ME}: fan'"]
    assert plan.undo == "resume"
    request = watch_pb2.OperationRequest(
        request="request-1", verb="drain", target="n3", why="fan", person="ada", saw=plan.saw
    )
    done = asked(served, OPERATORS, "Act", request)
    assert (done.outcome, done.undo) == ("done", "resume"), done
    assert asked(served, OPERATORS, "Act", request) == done
    (record,) = served.desk.log.newest()
    assert (record.person, record.via) == ("ada", ME)
    assert served.desk.machine.reasons["n3"] == "operator ada: fan"


def test_only_the_watchdogs_own_user_asks_in_the_name_of_another(served: Served) -> None:
    theirs = MINT.token(Caller(uid=65534, operator=True), NEVER)
    user = asked(served, theirs, "Role", watch_pb2.RoleRequest()).user
    assert user != ME
    other = watch_pb2.OperationRequest(
        request="request-1", verb="drain", target="n3", why="fan", person="ada", saw="{}"
    )
    for call in ("Plan", "Act"):
        assert code(served, theirs, call, other) is grpc.StatusCode.PERMISSION_DENIED
    assert not served.desk.log.newest()
    for person in ("", user):
        own = watch_pb2.OperationRequest(verb="drain", target="n3", why="fan", person=person)
        assert f"operator {user}: fan" in asked(served, theirs, "Plan", own).commands[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"verb": "reboot"},
        {"target": "n[0-3]"},
        {"target": "-v"},
        {"target": "n99"},
        {"why": "x" * 201},
        {"person": "a\nb"},
        {"nodes": "n1"},
    ],
)
def test_what_cannot_be_understood_is_said_and_written_nowhere(served: Served, wrong: dict[str, Any]) -> None:
    request = watch_pb2.OperationRequest(**{"verb": "drain", "target": "n3", "why": "fan", **wrong})
    assert code(served, OPERATORS, "Plan", request) is grpc.StatusCode.INVALID_ARGUMENT
    request.request = "short"
    assert code(served, OPERATORS, "Act", request) is grpc.StatusCode.INVALID_ARGUMENT
    assert not served.desk.log.newest()
