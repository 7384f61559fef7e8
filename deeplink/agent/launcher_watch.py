"""An agent of a job whose launcher's host has died: takes the launcher's role, or has Slurm start the job again.

The ranks go on meanwhile: agents run them. Where nobody may take the role, the job is put back into the queue as
soon as Slurm has taken the batch host from it. With `--no-kill` it would run on without a script, until its time
limit; any node of the job may requeue it then, by its owner's right alone.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import grpc

from deeplink.core.errors import DeepLinkError
from deeplink.core.timeouts import call_with_timeout
from deeplink.core.types import NodeName
from deeplink.rpc.channel import agent_channel
from deeplink.rpc.resolving import split_address
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.launch.launcher_role import AGREED_S, SILENT_S, RoleClaims, left_role, may_take, run_of
from deeplink.scheduler.launch.process import python_command
from deeplink.scheduler.liveness.probe import TcpProber
from deeplink.scheduler.recovery.evidence import ProbeResult
from deeplink.scheduler.recovery.records import Action, Incident, IncidentKind, end_id
from deeplink.scheduler.slurm.client import SLURMD_PORT
from deeplink.scheduler.slurm.command import PIPE, spawn
from deeplink.scheduler.slurm.nodeset import unfold
from deeplink.scheduler.slurm.states import JobState
from deeplink.v1 import node_pb2, node_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deeplink.core.clock import Clock
    from deeplink.core.types import Attempt
    from deeplink.scheduler.launch.launcher_role import LauncherPlace, LeftRole
    from deeplink.scheduler.liveness.probe import Prober
    from deeplink.scheduler.slurm.client import Slurm

log = logging.getLogger(__name__)

LOOK_S = 0.5
TURN_S = 2.0  # between two nodes that try for the role
FIRST = 16  # nodes that try: a thousand would be a burden to each other, and to slurmctld
START_S = 30.0  # within which a launcher that has claimed the role asks the agents
STORAGE_S = 3.0  # how long the job's folder may take
ANSWER_S, PROBE_S = 1.0, 1.0
GONE_S, ASK_S = 30.0, 4.0  # since when, and how often, Slurm is asked whether it has given the batch host up
SELDOM_S = 60.0  # how often by nodes that are not among the first
JOURNAL = "journal.sqlite"
ELSEWHERE = Path("/tmp")  # noqa: S108 - as srun


class LauncherWatch:
    """Looks from `start` to `stop`, in a thread."""

    def __init__(
        self,
        env: Mapping[str, str],
        silent_s: Callable[[], float],
        newest: Callable[[int], Attempt | None],
        *,
        node: str,
        secret: str,
        token: Callable[[], str],
        slurm: Slurm,
        clock: Clock,
        state: Path,
        prober: Prober | None = None,
    ) -> None:
        """`env` is that of a step of the job; `silent_s`: since the launcher's last question."""
        self.job, self.node, self.environ = int(env["SLURM_JOB_ID"]), node, env
        self.nodes = unfold(env.get("SLURM_JOB_NODELIST", ""))  # that the job began with
        self.number = int(env["SLURM_NODEID"])  # of this node among them
        self.silent_s = silent_s
        self.newest: Callable[[], Attempt | None] = lambda: newest(self.job)
        self.secret, self.token, self.slurm, self.clock = secret, token, slurm, clock
        self.folder, self.prober = state / "jobs" / str(self.job), prober or TcpProber(clock)
        self._ending = threading.Event()
        self._claimed = 0, 0.0  # the newest term that was claimed and does not ask, and since when
        # How the launcher that was started here last ended, None while it lives; and its term.
        self._started: tuple[Callable[[], int | None], int] = (lambda: 0, 0)
        self._ask_at, self._trouble = 0.0, ""

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name="deeplink-launcher-watch", daemon=True).start()

    def stop(self) -> None:
        """Look no more; does not wait."""
        self._ending.set()

    def _run(self) -> None:
        while not self._ending.wait(LOOK_S if self.number < 4 * FIRST else ASK_S):
            try:
                self.look()
            except Exception:  # else nobody here would look any more
                log.exception("looking for the launcher")

    def look(self) -> None:
        """Take the role if it is this node's to take; have the job requeued if nobody did."""
        silent_s = self.silent_s()
        if silent_s < SILENT_S or self.newest() is None:
            return
        try:
            left = call_with_timeout(lambda: left_role(self.folder, run_of(self.secret)), STORAGE_S)
            if left is not None and self._is_turn(left, silent_s) and self._may_take(left):
                self._take(left)
        except FileNotFoundError:
            pass  # of a run without a launcher that could be followed
        except (OSError, ValueError) as problem:  # a TimeoutError, too
            if str(problem) != self._trouble:  # once, not at each look
                log.warning("the launcher's role: %s", problem)
            self._trouble = str(problem)
        pause_s = ASK_S if self.number < FIRST else SELDOM_S
        if self.silent_s() >= GONE_S + pause_s - ASK_S and self.clock.monotonic() >= self._ask_at:
            self._ask_at = self.clock.monotonic() + pause_s
            self._requeue()

    # The launcher's role.

    @property
    def _claims(self) -> RoleClaims:
        return RoleClaims(self.folder, run_of(self.secret))

    def _is_turn(self, left: LeftRole, silent_s: float) -> bool:
        """Whether those before this node have had their time."""
        others = [node for node in left.nodes if node != left.place.host]
        turn = others.index(self.node) if self.node in others else FIRST
        return left.place.host in left.nodes and turn < FIRST and silent_s >= SILENT_S + TURN_S * turn

    def _may_take(self, left: LeftRole) -> bool:
        """Whether the launcher's host is dead, and enough nodes say that no launcher asks them."""
        host, port = split_address(left.nodes[left.place.host])
        places = {NodeName("agent"): (host, port), NodeName("slurmd"): (host, SLURMD_PORT)}
        answers = self.prober.probe(places, PROBE_S)
        # On the batch host a launcher that dies is started again by its parent. Elsewhere both end with the agent.
        is_ended = left.place.term > 0 and answers[NodeName("agent")] is ProbeResult.REFUSES
        if not is_ended and not all(answer is ProbeResult.SILENT for answer in answers.values()):
            return False
        others = {node: where for node, where in left.nodes.items() if node not in {self.node, left.place.host}}
        return may_take(len(left.nodes), 1 + self._agreeing(others))

    def _agreeing(self, others: Mapping[str, str]) -> int:
        with ExitStack() as stack:
            calls = []
            for address in others.values():
                channel = stack.enter_context(agent_channel(address, self.token()))
                stub: Any = node_pb2_grpc.NodeStub(channel)
                with suppress(grpc.RpcError):
                    calls.append(stub.Status.future(node_pb2.StatusRequest(), timeout=ANSWER_S))
            answers = []
            for call in calls:
                with suppress(grpc.RpcError, grpc.FutureCancelledError):
                    answers.append(call.result())
        return sum(answer.unasked_s >= AGREED_S for answer in answers)

    def _take(self, left: LeftRole) -> None:
        if self._has_launcher(left.place):
            return
        newest = max(left.place.term, call_with_timeout(self._claims.newest, STORAGE_S))
        now = self.clock.monotonic()
        if newest > left.place.term:
            if newest != self._claimed[0]:
                self._claimed = newest, now
            if now - self._claimed[1] < START_S:
                return  # another one has taken it, and is about to begin
        term, silent_s = newest + 1, self.silent_s()
        with ExitStack() as stack:
            # First: a claim without a launcher would keep all others waiting.
            stdout, stderr = (stack.enter_context(self._output(path)) for path in left.place.output)
            folder = call_with_timeout(lambda: self._folder(left.place), STORAGE_S)
            if silent_s < SILENT_S or not call_with_timeout(
                lambda: self._claims.claim(term, self.node), STORAGE_S
            ):
                return
            log.warning("%s is silent for %.1f s: this node takes the launcher's role", left.place.host, silent_s)
            self._claimed = term, now
            self._begin(left.place, term, folder, stdout, stderr)

    def _has_launcher(self, place: LauncherPlace) -> bool:
        """Whether one that was started here is to come up still, or has the role."""
        # It may wait for slurmctld. Once a later one has acted it only holds its place.
        ended, term = self._started
        return ended() is None and place.term <= term

    def _begin(self, place: LauncherPlace, term: int, folder: Path, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Start a launcher, and what starts it again; both end with this job's step."""
        since = self.clock.monotonic() - self.silent_s()
        module = "deeplink.scheduler.launch.launcher_process"
        argv = python_command(module, str(term), str(since), *place.command)
        env = place.environment(self.environ, self.node)
        running = spawn(argv, env=env, cwd=folder, stdin=PIPE, stdout=stdout, stderr=stderr)
        self._started = running.poll, term
        if running.stdin is not None:
            with running.stdin:
                running.stdin.write(f"{self.secret}\n".encode())
        threading.Thread(target=running.wait, name="deeplink-launcher-end", daemon=True).start()

    def _folder(self, place: LauncherPlace) -> Path:
        """Return the folder that the script works in; where this node has none, what srun falls back to."""
        if os.access(place.folder, os.X_OK) and Path(place.folder).is_dir():
            return Path(place.folder)
        log.warning("the script's folder %r is not here: the launcher works in %s", place.folder, ELSEWHERE)
        return ELSEWHERE

    def _output(self, path: str) -> IO[bytes]:
        """Return the file of the job's output; one in the job's folder where that is not on this node."""
        try:
            return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND), "wb")  # made anew it would be another one
        except OSError:
            kept = self.folder / f"launcher.{self.node}.out"
            log.warning("the job's output %r is not here: from now on it is in %s", path, kept)
            return kept.open("ab")

    # Slurm.

    def _requeue(self) -> None:
        """Have the job put back into the queue, if Slurm has taken its batch host from it."""
        silent_s, attempt = self.silent_s(), self.newest()
        if attempt is None:
            return
        try:
            job = self.slurm.job(self.job)
            # Its name may be kept (22.05.8). That of salloc, for whom there is no requeue, was none of its nodes.
            is_gone = job.batch_host is None or job.batch_host in {*self.nodes} - {*job.nodes}
            if job.restarts != attempt.restart or job.state is not JobState.RUNNING:
                return
            if is_gone and job.requeueable:
                self._record(attempt, silent_s)  # first: the requeue ends us
                self.slurm.requeue(job.address)
        except DeepLinkError as problem:
            log.warning("job %d has lost its batch host: %s", self.job, problem)

    def _record(self, attempt: Attempt, silent_s: float) -> None:
        now = self.clock.unix()
        incident = Incident(
            id=end_id(attempt),
            kind=IncidentKind.LAUNCHER_LOST,
            attempt=attempt,
            began_unix=now - silent_s,
            detected_unix=now,
            acted_unix=now,
            action=Action.REQUEUE,
            evidence="Slurm has taken the batch host from the job, and nothing is heard of the launcher; an agent "
            "asked for the job to be started again",
        )

        def record() -> None:
            with Journal(self.folder / JOURNAL, shared_file_system=True) as journal:
                journal.record_incident(incident)

        try:
            call_with_timeout(record, STORAGE_S)
        except (DeepLinkError, OSError) as problem:  # a TimeoutError, too
            log.warning("the job's journal: %s", problem)
