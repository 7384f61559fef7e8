"""Who calls the watchdog is proved by a real munged, and a token says no more than was proved."""

from __future__ import annotations

import contextlib
import os
import shutil
import string
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from typing_extensions import override

from deeplink.core.clock import ManualClock
from deeplink.core.config import Config
from deeplink.core.metrics import WatchMetrics
from deeplink.core.types import Attempt, NodeName
from deeplink.rpc.channel import attempt_to_wire, open_channel
from deeplink.rpc.tokens import read_token, write_token
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.liveness.heartbeats import HeartbeatTable, beat_to_wire
from deeplink.scheduler.liveness.probe import TcpProber
from deeplink.scheduler.liveness.watchdog_client import (
    WatchdogClient,
    asked_watchdog,
    job_statement,
    node_statement,
    operator_statement,
)
from deeplink.scheduler.recovery.evidence import WatchPolicy
from deeplink.scheduler.recovery.records import Beat, Phase
from deeplink.scheduler.sitecheck.part import watchdog_answer
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.command import CommandError, CommandTimeoutError, Runner, finish, run
from deeplink.scheduler.slurm.munge import MungeSocket, encoded
from deeplink.scheduler.slurm.parse import parse_nodes
from deeplink.scheduler.watch.authorizer import PROVED_S, Authorizer, Caller, NotAuthorizedError, TokenMint
from deeplink.scheduler.watch.observer import COMMAND_S, OWNER_S, ClusterAnswers, Observer
from deeplink.scheduler.watch.server import WatchServicer, watch_server
from deeplink.v1 import watch_pb2, watch_pb2_grpc
from tests.munged import running_munged, set_munge_socket
from tests.scheduler.watch.callers import ME, MINT, NEVER, TOKEN, AnySite, authorizer
from tests.waiting import LIMIT_S

ATTEMPT = Attempt(17, 1, 0)
BEAT = beat_to_wire(Beat(attempt=ATTEMPT, phase=Phase.RUNNING, user="whoever"))
NOBODY = 65534
callers = st.one_of(
    st.builds(Caller, uid=st.integers(0, 2**32 - 2), operator=st.booleans()),
    st.builds(Caller, uid=st.integers(0, 2**32 - 2), job=st.integers(1, 2**40), restart=st.integers(0, 10**6)),
    st.builds(Caller, uid=st.integers(0, 2**32 - 2), node=st.text(string.printable, min_size=1, max_size=40)),
)


@given(callers, callers, st.integers(0, 200), st.sampled_from(string.ascii_letters + string.digits + ".:"))
def test_a_token_names_its_caller_and_changed_in_any_place_no_other(
    one: Caller, other: Caller, place: int, letter: str
) -> None:
    mint = TokenMint("secret")
    token = mint.token(one, 100.0)
    assert mint.caller(token, 99.9) == one
    assert mint.caller(token, 100.0) is None
    assert TokenMint("another").caller(token, 0.0) is None
    assert (mint.token(other, 100.0) == token) == (one == other)
    changed = token[:place] + letter + token[place + 1 :]
    assert mint.caller(changed, 0.0) in {None, one}
    assert changed == token or mint.caller(changed, 0.0) is None


class Watchdog(NamedTuple):
    address: str
    site: AnySite
    journal: Journal
    munge_socket: str
    clock: ManualClock

    def line(self, speaks_for: Attempt | str) -> WatchdogClient:
        return WatchdogClient(self.address, None, speaks_for)

    def prove(self, credential: str, nonce: str, **whom: Any) -> str:
        with open_channel(self.address, "") as channel:
            request = watch_pb2.ProveRequest(nonce=nonce, credential=credential, **whom)
            return str(watch_pb2_grpc.IdentityStub(channel).Prove(request, timeout=LIMIT_S).token)

    def nonce(self) -> str:
        with open_channel(self.address, "") as channel:
            stub = watch_pb2_grpc.IdentityStub(channel)
            return str(stub.Challenge(watch_pb2.ChallengeRequest(), timeout=LIMIT_S).nonce)


@pytest.fixture
def munge_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A munged of the test's own, which Slurm's settings name."""
    with running_munged() as socket:
        set_munge_socket(tmp_path, socket)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        yield socket


@pytest.fixture
def watchdog(tmp_path: Path, munge_socket: str) -> Iterator[Watchdog]:
    clock, site = ManualClock(), AnySite()
    with Journal(tmp_path / "j.sqlite") as journal:
        metrics = WatchMetrics(CollectorRegistry())
        servicer = WatchServicer(journal, HeartbeatTable(), clock, metrics, authorizer(journal, clock, site))
        bound = watch_server("127.0.0.1:0", servicer)
        bound.server.start()
        yield Watchdog(f"127.0.0.1:{bound.port}", site, journal, munge_socket, clock)
        bound.server.stop(0.5).wait(LIMIT_S)


def refused(code: grpc.StatusCode, call: Any) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert getattr(caught.value, "code")() is code, caught.value  # noqa: B009 - grpc's errors have it
    return str(getattr(caught.value, "details")())  # noqa: B009


def test_a_launcher_proves_whose_job_it_speaks_for_and_for_no_other(watchdog: Watchdog) -> None:
    line = watchdog.line(ATTEMPT)
    assert line.call(lambda stub: stub.Beat(BEAT, timeout=LIMIT_S)).known
    (job,) = watchdog.journal.jobs()
    assert (job.job, job.user) == (17, watchdog.site.user), "the user is who was proved, not who was named"
    other = beat_to_wire(Beat(attempt=Attempt(18, 1, 0), phase=Phase.RUNNING, user=watchdog.site.user))
    refused(grpc.StatusCode.PERMISSION_DENIED, lambda: line.call(lambda stub: stub.Beat(other, timeout=LIMIT_S)))
    line.close()


def test_another_users_job_is_refused_before_anything_is_kept(watchdog: Watchdog) -> None:
    watchdog.site.user = "somebody-else"
    call = watchdog.line(ATTEMPT).call
    said = refused(grpc.StatusCode.PERMISSION_DENIED, lambda: call(lambda stub: stub.Beat(BEAT, timeout=LIMIT_S)))
    assert "job 17 is not of user" in said
    assert watchdog.journal.jobs() == ()


def test_an_operator_proves_himself_and_no_job_of_his_makes_him_one(watchdog: Watchdog) -> None:
    nonce = watchdog.nonce()
    token = watchdog.prove(encoded(operator_statement(nonce), watchdog.munge_socket), nonce, operator=True)
    caller = MINT.caller(token, watchdog.clock.unix())
    assert caller is not None
    assert (caller.uid, caller.operator) == (os.getuid(), True)
    ours = encoded(job_statement(ATTEMPT, nonce), watchdog.munge_socket)
    refused(grpc.StatusCode.PERMISSION_DENIED, lambda: watchdog.prove(ours, nonce, operator=True))


def test_while_slurm_is_silent_the_user_on_record_is_believed_and_no_other(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = watchdog.line(ATTEMPT)
    line.call(lambda stub: stub.Beat(BEAT, timeout=LIMIT_S))

    asked = list[int]()

    def silent(job: int) -> str:
        asked.append(job)
        raise CommandError(["squeue"], 1, "Unable to contact slurm controller")

    monkeypatch.setattr(watchdog.site, "asked_owner", silent)
    watchdog.site.user, watchdog.site.is_silent = "", True
    assert line.call(lambda stub: stub.Beat(BEAT, timeout=LIMIT_S)).known
    assert not asked, "each question to a Slurm that is away holds a thread for seconds"
    watchdog.site.is_silent = False
    assert line.call(lambda stub: stub.Beat(BEAT, timeout=LIMIT_S)).known
    line.close()
    unknown = watchdog.line(Attempt(18, 0, 0))
    refused(grpc.StatusCode.UNAVAILABLE, lambda: unknown.call(lambda stub: stub.Beat(BEAT, timeout=LIMIT_S)))
    assert asked == [17, 18]


def test_slurm_is_asked_once_at_a_time_whose_job_it_is_and_for_a_few_jobs(tmp_path: Path) -> None:
    again = list[str]()

    @dataclass
    class Asked(AnySite):
        user: str = ""

        @override
        def asked_owner(self, job: int) -> str:
            again.append(str(job))
            for other in (job, job + 1):  # as if it came while this one is asked for
                with contextlib.suppress(NotAuthorizedError):
                    asked.owner(TOKEN, Attempt(other, 0, 0))
            return ME

    with Journal(tmp_path / "j.sqlite") as journal:
        asked = authorizer(journal, ManualClock(), Asked())
        assert asked.owner(TOKEN, Attempt(1, 0, 0)) == ME
    assert again == ["1", "2", "3", "4"]


def test_the_question_whose_job_it_is_has_a_bound_of_its_own(watchdog: Watchdog) -> None:
    bounds = list[float]()

    def slow(argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        bounds.append(timeout_s)
        raise CommandTimeoutError(argv, timeout_s)

    site = observer(watchdog.journal, partial(slow, timeout_s=COMMAND_S))
    assert (site.owner(17), site.is_silent) == ("", True)
    with pytest.raises(CommandTimeoutError):
        site.asked_owner(17)
    assert bounds == [OWNER_S]
    site.cluster = ClusterAnswers(1.0)
    assert not site.is_silent
    site.ask()
    assert site.is_silent


def test_a_credential_serves_once_and_for_what_it_says(watchdog: Watchdog) -> None:
    nonce = watchdog.nonce()
    credential = encoded(job_statement(ATTEMPT, nonce), watchdog.munge_socket)
    whom = {"attempt": attempt_to_wire(ATTEMPT)}
    assert watchdog.prove(credential, nonce, **whom)
    again = refused(grpc.StatusCode.PERMISSION_DENIED, lambda: watchdog.prove(credential, nonce, **whom))
    assert "exited 17" in again, "EMUNGE_CRED_REPLAYED: MUNGE remembers it, also where another had the same nonce"
    refused(grpc.StatusCode.PERMISSION_DENIED, lambda: watchdog.prove(credential, watchdog.nonce(), **whom))
    others: list[dict[str, Any]] = [{"attempt": attempt_to_wire(Attempt(18, 1, 0))}, {"node": "n1"}]
    for whom in others:
        nonce = watchdog.nonce()
        credential = encoded(job_statement(ATTEMPT, nonce), watchdog.munge_socket)
        said = refused(
            grpc.StatusCode.PERMISSION_DENIED,
            lambda: watchdog.prove(credential, nonce, **whom),  # noqa: B023
        )
        assert "made for something else" in said
    assert "MUNGE" in refused(
        grpc.StatusCode.PERMISSION_DENIED, lambda: watchdog.prove("MUNGE:no:", watchdog.nonce(), node="n1")
    )


def proof(nonce: str, munge_socket: str) -> watch_pb2.ProveRequest:
    credential = encoded(job_statement(ATTEMPT, nonce), munge_socket)
    return watch_pb2.ProveRequest(nonce=nonce, credential=credential, attempt=attempt_to_wire(ATTEMPT))


def test_challenges_of_strangers_take_the_nonce_of_no_other(tmp_path: Path, munge_socket: str) -> None:
    with Journal(tmp_path / "j.sqlite") as journal:
        asked = authorizer(journal, ManualClock())
        nonce = asked.challenge()
        for _ in range(10_000):
            asked.challenge()
        assert asked.prove(proof(nonce, munge_socket))


def test_a_nonce_is_known_again_for_half_a_minute_by_the_secret_that_made_it() -> None:
    mint, made = TokenMint("secret"), 1_700_000_000.9
    nonce = mint.nonce(made)
    assert [mint.made_lately(nonce, made + age) for age in (0.0, 29.0, 31.0, -2.0)] == [True, True, False, False]
    assert not TokenMint("another").made_lately(nonce, made)
    assert not any(mint.made_lately(other, made) for other in ("", ":", "1700000000:", f"1{nonce}", f"{nonce}é"))
    assert mint.caller(nonce, 0.0) is None


class Turns(threading.Semaphore):
    """Proofs of others under way, which end as soon as somebody waits for them."""

    @override
    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        if blocking:
            self.release()
        return super().acquire(blocking, timeout)


def test_a_proof_waits_for_those_under_way_and_not_many_wait(tmp_path: Path, munge_socket: str) -> None:
    with Journal(tmp_path / "j.sqlite") as journal:
        for callers, served in ((1, True), (0, False)):
            trusted = Authorizer(
                MINT,
                cast("Observer", AnySite()),
                journal,
                ManualClock(),
                _proofs=Turns(0),
                _callers=threading.Semaphore(callers),
            )
            request = proof(trusted.challenge(), munge_socket)
            if served:
                assert trusted.prove(request)
            else:
                with pytest.raises(NotAuthorizedError, match="too many"):
                    trusted.prove(request)


def test_while_slurm_is_away_munges_own_place_serves_and_is_asked_for_again(
    tmp_path: Path, watchdog: Watchdog
) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    told = scontrol.read_text()
    scontrol.write_text("#!/bin/sh\necho 'Unable to contact slurm controller (connect failure)' >&2; exit 1\n")
    for program in ("munge", "unmunge"):  # their own place is compiled into them: here it is the test's munged
        wrapper, real = scontrol.with_name(program), shutil.which(program)
        wrapper.write_text(f'#!/bin/sh\nexec {real} --socket={watchdog.munge_socket} "$@"\n')
        wrapper.chmod(0o755)
    line = watchdog.line("n1")
    said = watch_pb2.AttendRequest(node="n1", boot_id="7")
    assert line.call(lambda stub: stub.Attend(said, timeout=LIMIT_S)).known
    line.close()
    place = MungeSocket()
    assert (place.path(), place.is_known) == ("", False)
    scontrol.write_text(told)
    assert (place.path(), place.is_known) == (watchdog.munge_socket, True)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_credential_of_another_user_speaks_for_no_job_of_ours_and_for_no_node(watchdog: Watchdog) -> None:
    module = "deeplink.scheduler.slurm.munge"
    program = f"import sys; from {module} import encoded; print(encoded(*sys.argv[1:]))"
    for whom, statement in (
        ({"attempt": attempt_to_wire(ATTEMPT)}, job_statement(ATTEMPT, "{}")),
        ({"node": "n1"}, node_statement("n1", "{}")),
        ({"operator": True}, operator_statement("{}")),
    ):
        nonce = watchdog.nonce()
        argv = ["setpriv", f"--reuid={NOBODY}", "--clear-groups", sys.executable, "-c", program]
        made = finish([*argv, statement.format(nonce), watchdog.munge_socket])
        assert made.code == 0, made
        said = refused(
            grpc.StatusCode.PERMISSION_DENIED,
            lambda: watchdog.prove(made.stdout.strip(), nonce, **whom),  # noqa: B023
        )
        assert any(word in said for word in ("not of user", "does not report", "is no operator"))


def test_a_standing_agent_proves_itself_and_reports_for_its_node_alone(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = watchdog.line("n1")
    said = watch_pb2.AttendRequest(node="n1", boot_id="7")
    assert line.call(lambda stub: stub.Attend(said, timeout=LIMIT_S)).known
    other = watch_pb2.AttendRequest(node="n2", boot_id="7")
    refused(grpc.StatusCode.PERMISSION_DENIED, lambda: line.call(lambda stub: stub.Attend(other, timeout=LIMIT_S)))
    line.close()
    for at, code in (
        ({"n2"}, grpc.StatusCode.PERMISSION_DENIED),
        ({"n0", "n1"}, None),
        (None, grpc.StatusCode.UNAVAILABLE),
    ):
        monkeypatch.setattr(watchdog.site, "nodes_at", lambda _hosts: at)  # noqa: B023
        again = watchdog.line("n1")
        if code is None:
            assert again.call(lambda stub: stub.Attend(said, timeout=LIMIT_S)).known
        else:
            refused(code, lambda: again.call(lambda stub: stub.Attend(said, timeout=LIMIT_S)))  # noqa: B023
        again.close()
    assert [node.name for node in watchdog.journal.nodes()] == ["n1"]


def observer(journal: Journal, run: Runner) -> Observer:
    clock = ManualClock()
    return Observer(
        slurm=Slurm(run),
        prober=TcpProber(clock),
        heartbeats=HeartbeatTable(),
        journal=journal,
        clock=clock,
        policy=WatchPolicy(),
    )


def test_all_nodes_of_a_host_are_known_by_its_names_and_none_before_slurm_was_heard(watchdog: Watchdog) -> None:
    site = observer(watchdog.journal, run)
    assert site.nodes_at(("box",)) is None
    said = "".join(
        f"NodeName=n{i} NodeAddr=10.0.0.{i // 2} NodeHostName=box{i // 2} State=IDLE\n" for i in range(4)
    )
    site.cluster = ClusterAnswers(0.0, {}, {row.name: row for row in parse_nodes(said)})
    for hosts in (("box0", "127.0.1.1"), ("box0.site", "10.0.0.0"), ("other", "10.0.0.0"), ("n0", "n1")):
        assert site.nodes_at(hosts) == frozenset(map(NodeName, ("n0", "n1")))
    assert site.nodes_at(("login", "10.0.0.9")) == frozenset()


def test_without_munge_a_token_of_the_operators_proves_its_user(watchdog: Watchdog, tmp_path: Path) -> None:
    mint = TokenMint("the secret of the watchdogs in tests")
    for uid, code in ((os.getuid(), None), (NOBODY, grpc.StatusCode.PERMISSION_DENIED)):
        file = tmp_path / f"token-{uid}"
        file.write_text(mint.token(Caller(uid=uid), NEVER))
        file.chmod(0o600)
        line = WatchdogClient(watchdog.address, file, replace(ATTEMPT, job=17))
        if code is None:
            assert line.call(lambda stub: stub.Beat(BEAT, timeout=LIMIT_S)).known
        else:
            refused(code, lambda: line.call(lambda stub: stub.Beat(BEAT, timeout=LIMIT_S)))  # noqa: B023
        line.close()


def test_whom_munge_proved_proves_himself_anew_once_the_token_has_ended(watchdog: Watchdog) -> None:
    line = watchdog.line(ATTEMPT)
    assert line.call(lambda stub: stub.Beat(BEAT, timeout=LIMIT_S)).known
    watchdog.clock.sleep(PROVED_S)
    refused(grpc.StatusCode.UNAUTHENTICATED, lambda: line.call(lambda stub: stub.Beat(BEAT, timeout=LIMIT_S)))
    assert line.call(lambda stub: stub.Beat(BEAT, timeout=LIMIT_S)).known
    line.close()


def test_a_token_that_has_ended_is_refused_with_the_remedy(watchdog: Watchdog, tmp_path: Path) -> None:
    file = tmp_path / "token"
    for end in (NEVER, 1.0):
        write_token(file, MINT.token(Caller(uid=os.getuid()), end))
        line = WatchdogClient(watchdog.address, file, replace(ATTEMPT, job=17))
        if end == NEVER:
            assert line.call(lambda stub: stub.Beat(BEAT, timeout=LIMIT_S)).known
        else:
            said = refused(
                grpc.StatusCode.UNAUTHENTICATED,
                lambda: line.call(lambda stub: stub.Beat(BEAT, timeout=LIMIT_S)),  # noqa: B023
            )
            assert "has ended" in said
            assert "deeplink watch --mint" in said
            assert "has ended" in asked_watchdog(watchdog.address, read_token(file))
        line.close()


def test_the_doctor_proves_who_asks_as_launchers_do(
    watchdog: Watchdog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(store=tmp_path, state=tmp_path, catalog=tmp_path, watch=watchdog.address, node="n0")
    assert watchdog_answer(config, ManualClock()) == ""
    monkeypatch.setattr(watchdog.site, "nodes_at", lambda _hosts: frozenset({NodeName("n5")}))
    assert watchdog_answer(config, ManualClock()) == "", "MUNGE has vouched for who asks"
    with running_munged() as other:
        set_munge_socket(tmp_path, other)
        assert "MUNGE: " in (watchdog_answer(config, ManualClock()) or ""), "it has another key"
    assert "MUNGE: " in (watchdog_answer(config, ManualClock()) or ""), "it runs no longer"
