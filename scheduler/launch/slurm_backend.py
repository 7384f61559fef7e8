"""A Slurm allocation: agents and ranks are steps of the job we run in. Needs no right but the job owner's."""

from __future__ import annotations

import getpass
import logging
import os
import threading
from dataclasses import dataclass, field, replace
from operator import gt
from typing import TYPE_CHECKING, Self

from typing_extensions import override

from deeplink.core.clock import Clock, SystemClock
from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.launch.agent_monitor import CONNECT_S
from deeplink.scheduler.launch.agent_ranks import AgentRanks
from deeplink.scheduler.launch.backend import (
    Backend,
    HeldRole,
    JobStatus,
    LaunchError,
    NodesStatus,
    NoSlurmdError,
    ports_for,
)
from deeplink.scheduler.launch.container import pyxis_options
from deeplink.scheduler.launch.environment import (
    SEATS_VARIABLE,
    SLOTS_VARIABLE,
    Launch,
    leave_launch,
    leave_seats,
    leave_slots,
)
from deeplink.scheduler.launch.launch_spec import Granted, gpu_options, granted_by
from deeplink.scheduler.launch.process import LEAVE_S, AdoptedProcess, python_command
from deeplink.scheduler.launch.srun import SlotStep, SlurmAgents, SlurmSlots, StepIds, step_environment
from deeplink.scheduler.liveness.probe import TcpProber, slurmd_port
from deeplink.scheduler.recovery.evidence import TAG, ProbeResult
from deeplink.scheduler.recovery.recovery_steps import comment_of, with_our_comment
from deeplink.scheduler.slurm.client import Slurm, standing
from deeplink.scheduler.slurm.command import finish, is_unanswered, real_program
from deeplink.scheduler.slurm.nodeset import fold_for_files, in_order, unfold
from deeplink.scheduler.slurm.sbatch_options import SRUN
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.slurm.submission import is_in_step, not_contradicted
from deeplink.scheduler.topology.sources.slurm_topology import fabric_from_switches

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from deeplink.core.types import Attempt, NodeName
    from deeplink.scheduler.launch.backend import AgentStep, EndOf, RankStep, Reach
    from deeplink.scheduler.launch.environment import NodeFacts
    from deeplink.scheduler.launch.process import StartedAgents, StartedSlots
    from deeplink.scheduler.slurm.parse import JobAddress, JobRow, NodeRow
    from deeplink.scheduler.topology.graph import Fabric

log = logging.getLogger(__name__)

PMI = "pmi2"  # Which plugin of srun's tells MPI who is who: it serves MPICH and its kin. Open MPI wants pmix
EMPTY_STEP_S = 10.0
GIVEN_UP_S, LOOK_AGAIN_S = 20.0, 1.0  # How long, and how often, Slurm is looked at for having given a lost node up
ANSWER_S = 120.0  # For how long it is asked again for what it did not answer
LONG_ANSWER_S = 3600.0  # The same, where ranks run on meanwhile
_ALIVE = frozenset({JobState.RUNNING, JobState.SUSPENDED, JobState.STOPPED, JobState.SIGNALING, JobState.RESIZING})


_OUTLIVING = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")  # one node's death must not end the others' tasks
_AGENT_OPTIONS = ("--overlap", "--gres=none", "--mem=0", "--cpus-per-task=1", *_OUTLIVING)  # nothing of the ranks'


@dataclass(frozen=True, slots=True)
class SlurmBackend(Backend):
    """The allocation this process runs in."""

    job: int
    restart: int
    user: str
    job_name: str
    nodes: tuple[NodeName, ...]
    env: Mapping[str, str]
    folder: Path
    here: NodeName | None = None
    srun_options: tuple[str, ...] = ()
    slurm: Slurm = field(default_factory=Slurm)
    clock: Clock = field(default_factory=SystemClock)
    granted: Granted = field(default_factory=Granted)
    address: JobAddress | None = None
    # what slots import before their rank is known; empty: what the script begins with
    preload: tuple[str, ...] | None = None
    slots: list[SlurmSlots] = field(default_factory=list)  # what waits for ranks to run; two while it is changed
    name: str = "slurm"
    can_requeue: bool = True
    role: HeldRole = field(default_factory=HeldRole)

    @classmethod
    def from_environment(
        cls, env: Mapping[str, str], state: Path, srun_options: Sequence[str] = ()
    ) -> SlurmBackend:
        """Read what Slurm says about the job we are in."""
        job, listed = env.get("SLURM_JOB_ID", ""), env.get("SLURM_JOB_NODELIST", "")
        problem = ""
        if not (job.isdigit() and listed):
            problem = "this is not inside a Slurm job"
        elif is_in_step(env) and env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
            problem = "this is one task of an srun step; the launcher must be started once, without srun"
        if problem:
            raise LaunchError(
                problem,
                "Call it in a batch script (`deeplink sbatch job.sh`) or under salloc; "
                "or try it without Slurm: `deeplink run --local 2 -- COMMAND`.",
            )
        return cls(
            job=int(job),
            restart=int(env.get("SLURM_RESTART_COUNT", "0")),  # unset, not 0, on the first run
            user=env.get("SLURM_JOB_USER") or getpass.getuser(),
            job_name=env.get("SLURM_JOB_NAME", ""),
            nodes=unfold(listed),
            env=env,
            folder=state / "jobs" / job,
            here=next((node for node in unfold(listed) if node == env.get("SLURMD_NODENAME")), None),
            srun_options=tuple(srun_options),
        )

    @property
    @override
    def label(self) -> str:
        return str(self.address or self.job)

    def with_granted(self, wait_s: float = ANSWER_S) -> Self:
        """Return the same with what Slurm's record tells of the job, asked for as long as nobody answers."""
        tries_end = self.clock.monotonic() + wait_s
        while True:
            try:
                told = self.slurm.allocation(self.job)
                env = not_contradicted(self.env, told, len(self.nodes))
                granted = granted_by(env, told)
                # Slurm sets a count that is not 0 itself: where its record has none, the environment's is an outer
                # job's. Where the record has another one, the job was started elsewhere: we are an older run.
                restart = self.restart if told.restarts else 0
                return replace(self, env=env, granted=granted, restart=restart, address=told.address)
            except DeepLinkError as problem:
                if not is_unanswered(problem) or self.clock.monotonic() >= tries_end:
                    raise
                log.warning("asking Slurm what the job has: %s; trying again", problem)
            self.clock.sleep(LOOK_AGAIN_S)

    @override
    def start_agents(self, secret: str, again: Mapping[NodeName, NodeFacts] | None = None) -> AgentStep:
        gone: frozenset[NodeName] = frozenset()
        if again is not None:
            gone = self._without_slurmd(again)
            again = {node: facts for node, facts in again.items() if node not in gone}
            self._step_ids.add()
        elif passed := self._step_ids.let_pass(self._empty_step):
            log.info("let %d step numbers pass that an earlier run may still be signalled under", passed)
        nodes = tuple(again or self.nodes)
        argv = [*self._agent_step(nodes, "deeplink-agents"), "--ntasks-per-node=1"]
        argv += python_command("deeplink", "node", "--job", "--bind", "0.0.0.0:0")
        env = step_environment(self.env, resources=False)
        if again is not None:
            env |= {SEATS_VARIABLE: str(leave_seats(self.folder, again))}
        return SlurmAgents(argv, env, secret=secret, logfile=self._agents_log, gone=gone)

    @override
    def adopt_agents(self, started: StartedAgents, end_of: EndOf) -> AgentStep:
        return SlurmAgents((), {}, secret="", logfile=self._agents_log, adopted=(started, end_of))

    @property
    def _agents_log(self) -> Path:
        return self.folder / "agents.log"

    def _agent_step(self, nodes: Sequence[NodeName], name: str) -> list[str]:
        """Return the start of the srun of a step of one task per node, beside the ranks."""
        where = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", f"--nodelist={fold_for_files(nodes)}"]
        return [self._srun(), *where, *_AGENT_OPTIONS, "--export=ALL", "--quiet", f"--job-name={name}"]

    def _without_slurmd(self, nodes: Collection[NodeName]) -> frozenset[NodeName]:
        """Return the nodes whose slurmd refuses connections: srun would try for seconds, and start none."""
        answers = self._probed(self.slurm.nodes(nodes))
        gone = frozenset(name for name, answer in answers.items() if answer is ProbeResult.REFUSES)
        if gone >= set(nodes):
            raise NoSlurmdError(gone)
        return gone

    def _probed(self, rows: Sequence[NodeRow]) -> dict[NodeName, ProbeResult]:
        port = slurmd_port(self.slurm) if any(row.port is None for row in rows) else 0
        return TcpProber(self.clock).probe({row.name: (row.address, row.port or port) for row in rows}, CONNECT_S)

    @override
    def rank_command(self, launch: Launch, command: Sequence[str]) -> list[str]:
        return ["srun", *self._slots_command(launch, command, _started(launch))]

    def _slots_command(self, launch: Launch, command: Sequence[str], counts: Mapping[NodeName, int]) -> list[str]:
        # The host file says on how many nodes: from Slurm 24.11 on srun refuses --nodes beside arbitrary.
        argv = [f"--ntasks={sum(counts.values())}", "--distribution=arbitrary", "--overlap", *_OUTLIVING]
        argv += ["--export=ALL", f"--job-name=deeplink-{launch.attempt}"]
        argv += [*self._cpus(launch, counts), *self._gpus(launch, counts)]
        if launch.recipe.mpi and SRUN.alone(self.srun_options).last("mpi") is None:
            argv.append(f"--mpi={PMI}")
        starter = python_command("deeplink.scheduler.launch.slot", "--", *command)
        if launch.container is not None and launch.container.is_entered_by_srun:
            shared = {**launch.passed_on, "DEEPLINK_HOSTFILE": launch.host_file}
            nodes = (*launch.nodes, *launch.spares)
            argv += pyxis_options(launch.container, nodes, shared, exists=os.path.exists)
            starter[0] = "python3"  # the image's own
        return [*argv, *self.srun_options, *starter]

    def _cpus(self, launch: Launch, counts: Mapping[NodeName, int]) -> list[str]:
        there = [self.granted.cpus.get(node, 1) for node in counts]
        if launch.starters:  # one that starts all of the node's ranks needs all of its CPUs
            return [f"--cpus-per-task={min(there)}"]
        each = self.env.get("SLURM_CPUS_PER_TASK", "")
        # Since 22.05 srun does not take it over by itself.
        options = [f"--cpus-per-task={each}"] if each.isdigit() else []
        wanted = [count * (int(each) if each.isdigit() else 1) for count in counts.values()]
        # Else srun refuses more ranks than CPUs.
        return [*options, "--overcommit"] if any(map(gt, wanted, there)) else options

    def _gpus(self, launch: Launch, counts: Mapping[NodeName, int]) -> list[str]:
        return gpu_options(self.granted, counts, starters=launch.starters, by_user=self.srun_options)

    @override
    def start_ranks(self, launch: Launch, command: Sequence[str], reach: Reach) -> RankStep:
        fitting = [one for one in self.slots if one.fit(_started(launch)) and self._are_for_all(launch)]
        nodes = {facts.name for facts in (*launch.nodes, *launch.spares)}
        # Slurm ends a step when a node of it boots again that it has not called down (22.05.8): where one was
        # lost, slots that are there are the second choice, for when slurmctld does not answer.
        safe = next((one for one in fitting if one.beside(_started(launch)) <= nodes), None)
        if self.preload is not None:  # what waits there waits nowhere else
            safe = safe or next(iter(fitting), None)
        if safe is not None:
            return self._ranks(launch, command, reach, safe, are_new=False)
        before = next(iter(fitting), None)
        return self._ranks(launch, command, reach, None, before, are_new=True)

    @override
    def adopt_ranks(self, launch: Launch, command: Sequence[str], reach: Reach) -> RankStep | None:
        if not self.slots:
            return None
        # As new ones: where they end now, the attempt does, for its ranks may have run.
        *before, newest = self.slots
        return self._ranks(launch, command, reach, newest, next(iter(before), None), are_new=True)

    @override
    def started_slots(self) -> tuple[StartedSlots, ...]:
        return tuple(one.started() for one in self.slots)

    @override
    def adopt_slots(self, started: Sequence[StartedSlots], end_of: EndOf) -> None:
        for one in started:
            steps = [self._adopted_step(pid, end_of, counts) for pid, counts in one.steps]
            steps[0].has_begun = one.has_begun
            self.slots.append(SlurmSlots(one.number, steps, self._step_ids.note))

    def _are_for_all(self, launch: Launch) -> bool:
        """Whether slots serve one attempt after the other."""
        # What serves PMI knows the ranks of one attempt. With these options srun tells people the numbers of its
        # own tasks, which are those of the ranks in the first attempt only.
        asked = {option.name for option in SRUN.alone(self.srun_options).options}
        return not (launch.recipe.mpi or asked & {"label", "output", "error", "input"})

    def _ranks(
        self,
        launch: Launch,
        command: Sequence[str],
        reach: Reach,
        slots: SlurmSlots | None,
        before: SlurmSlots | None = None,
        *,
        are_new: bool,
    ) -> RankStep:
        file = leave_launch(launch, self.folder)  # before any step is started: where this fails we are asked again
        if slots is None:
            slots = self._new_slots(launch, command)
            self._use(slots, *filter(None, (before,)))
        return AgentRanks(
            launch,
            file,
            reach,
            slots,
            make=lambda: self._new_slots(launch, command),
            use=self._use,
            before=before,
            are_new=are_new,
            clock=self.clock,
            role=self.role,
        )

    def _use(self, chosen: SlurmSlots, *before: SlurmSlots) -> None:
        """End all slots but these; does not wait."""
        kept = [*before, chosen]
        for one in self.slots:
            if one not in kept:
                threading.Thread(target=one.stop, name="deeplink-slots-end", daemon=True).start()
        self.slots[:] = kept

    def _new_slots(self, launch: Launch, command: Sequence[str]) -> SlurmSlots:
        number = int(self.clock.unix() * 1000)
        # In a file, and for these steps alone: in the script's environment it would bend every other srun.
        in_slurms = in_order(self.env.get("SLURM_JOB_NODELIST", "")) or self.nodes
        # What waits in a slot is outside of a container that each rank's command enters.
        is_inside = launch.container is None or launch.container.is_entered_by_srun
        preload = self.preload if is_inside and self._are_for_all(launch) and not launch.starters else None
        told = leave_slots(self.folder, number, launch, in_slurms, preload, run=self.role.run)
        starts = [self._slot_step(launch, command, _started(launch), f"{number}", told)]
        if launch.spares and self._are_for_all(launch):
            resting = dict.fromkeys((facts.name for facts in launch.spares), max(launch.started))
            try:
                starts.append(self._slot_step(launch, command, resting, f"{number}.spares", told))
            except LaunchError as problem:  # they have fewer GPUs, say: the next attempt on them tells
                log.info("no slots on spares: %s", problem)
        steps: list[SlotStep] = []
        try:
            steps.extend(start() for start in starts)
        except BaseException:  # nobody would know of those that were started
            for one in steps:
                one.stop()
            raise
        return SlurmSlots(number, steps, self._step_ids.note)

    def _slot_step(
        self, launch: Launch, command: Sequence[str], counts: Mapping[NodeName, int], name: str, told: str
    ) -> Callable[[], SlotStep]:
        """Write what a step of slots needs, and return what starts it."""
        argv = [self._srun(), *self._slots_command(launch, command, counts)]
        hosts = self.folder / f"hosts.{name}"
        hosts.write_text("".join(f"{node}\n" * count for node, count in counts.items()), encoding="utf-8")
        env = step_environment(self.env, resources=True, tasks=not launch.starters)
        env |= {"SLURM_HOSTFILE": str(hosts), SLOTS_VARIABLE: told}
        run = (self.job, self.restart)
        return lambda: SlotStep(argv, env, self.slurm, counts=counts, run=run, clock=self.clock)

    def _adopted_step(self, pid: int, end_of: EndOf, counts: Mapping[NodeName, int]) -> SlotStep:
        run, before = (self.job, self.restart), AdoptedProcess(pid, end_of)
        return SlotStep((), {}, self.slurm, counts=counts, run=run, clock=self.clock, adopted=before)

    @override
    def end_slots(self) -> None:
        for one in self.slots:
            one.stop(LEAVE_S)

    @property
    def _step_ids(self) -> StepIds:
        return StepIds(self.folder, self.restart)

    def _empty_step(self) -> int | None:
        argv = [*self._agent_step([self.here or self.nodes[0]], "deeplink-pass"), "printenv", "SLURM_STEP_ID"]
        try:
            done = finish(argv, env=step_environment(self.env, resources=False), timeout_s=EMPTY_STEP_S)
        except DeepLinkError as problem:
            log.warning("%s", problem)
            return None
        return int(done.stdout) if done.stdout.strip().isdigit() else None

    @override
    def ended_whole(self) -> None:
        self._step_ids.forget()

    @override
    def port_for(self, attempt: Attempt) -> int:
        return next(ports_for(attempt))

    def _srun(self) -> str:
        # Not a stand-in of ours: at best it would cost each relaunch the start of one more Python.
        return real_program("srun", self.env.get("PATH", "")) or "srun"

    @override
    def fabric(self) -> Fabric:
        return fabric_from_switches(self.slurm.topology())

    @override
    def requeue_if_down(self, nodes: Collection[NodeName]) -> bool:
        try:
            # Cut off for a while, we may be what is left of an older run: the job has been started again already.
            job = self.slurm.job(self.job)
            if job.restarts != self.restart or self._why_not_now(job, nodes):
                return False
            self.slurm.requeue(job.address)
        except DeepLinkError as problem:
            log.warning("asking Slurm about %s: %s", ", ".join(nodes), problem)
            return False
        return True

    def _why_not_now(self, job: JobRow, lost: Collection[NodeName]) -> str:
        """Return why the job cannot be put back into the queue now; empty where it can."""
        if job.state is JobState.PENDING:  # it runs: a controller that has just come up takes no order
            return "Slurm takes it for one that waits"
        # A requeue while an allocated node is unreachable and not down restarts the job without its GPUs. One
        # that Slurm took from the job may be in service again.
        away = [node for node in lost if node in job.nodes]
        if away and not all(row.down for row in self.slurm.nodes(away)):
            return f"{', '.join(away)} was lost, and Slurm has not given it up"
        return ""

    @override
    def job_status(self) -> JobStatus | None:
        try:
            told = standing(self.slurm, self.job)
        except DeepLinkError as problem:
            log.info("asking Slurm how the job stands: %s", problem)
            return None
        if told.job.state is JobState.OTHER:
            log.info("Slurm has job %d in a state without a name here", self.job)
            return None
        ours = told.job.restarts == self.restart
        # A controller that has just come up takes running jobs for pending (22.05.8). Those that were put back
        # into the queue are pending, too, but their count of restarts has grown.
        return JobStatus(
            ours=ours,
            runs=told.job.state in _ALIVE or (ours and told.job.state is JobState.PENDING),
            left_s=told.left_s,
            preempting=told.preempting or told.job.state is JobState.PREEMPTED,
            requeueable=told.job.requeueable,
            word=f"{told.job.state.value} {told.job.reason}".strip(),
        )

    @override
    def nodes_status(self) -> NodesStatus | None:
        try:
            rows = self.slurm.nodes(self.nodes)
            return NodesStatus.of(self.nodes, rows, self.slurm.job(self.job), self.restart)
        except DeepLinkError as problem:
            log.info("asking Slurm for the states of the nodes: %s", problem)
            return None

    @override
    def unheard(self, nodes: Collection[NodeName]) -> Mapping[NodeName, bool] | None:
        try:
            rows = self.slurm.nodes(nodes)
            answers = self._probed(rows)
        except DeepLinkError as problem:
            log.info("asking Slurm for the states of the nodes: %s", problem)
            return None if is_unanswered(problem) else {}
        # We are sooner than Slurm, which pings its nodes now and then.
        return {row.name: row.down for row in rows if row.down or not row.responding or answers[row.name].away}

    @override
    def requeue(self, lost: Collection[NodeName]) -> bool:
        return self._back_into_the_queue(self.slurm.requeue, lost)

    @override
    def hold(self, because: str, lost: Collection[NodeName]) -> bool:
        def hold(job: JobAddress) -> None:
            try:
                # First: users who find the job held find the reason there.
                text = with_our_comment(self.slurm.comment(self.job), comment_of(f"{TAG}held: {because}"))
                self.slurm.comment_job(job, text)
            except DeepLinkError as problem:
                log.info("the job's comment: %s", problem)
            self.slurm.hold(job)

        return self._back_into_the_queue(hold, lost)

    def _back_into_the_queue(self, order: Callable[[JobAddress], object], lost: Collection[NodeName]) -> bool:
        given_up, unanswered = self.clock.monotonic() + GIVEN_UP_S, self.clock.monotonic() + ANSWER_S
        ordered = False
        while True:
            try:
                job = self.slurm.job(self.job)
                if job.restarts != self.restart:
                    return ordered  # what runs now is not ours; an order without an answer may have been heard
                if not (why := self._why_not_now(job, lost)):
                    ordered = True
                    order(job.address)
                    return True
                if self.clock.monotonic() >= given_up:
                    log.warning("the job stays: %s", why)
                    return False
            except DeepLinkError as problem:
                # A controller that is away for a moment is no reason to let the job fail.
                if not is_unanswered(problem) or self.clock.monotonic() >= unanswered:
                    log.warning("the job could not be put back into the queue: %s", problem)
                    return False
                log.info("putting the job back into the queue: %s; trying again", problem)
                given_up = self.clock.monotonic() + GIVEN_UP_S  # nor has it given up any node meanwhile
            self.clock.sleep(LOOK_AGAIN_S)


def _started(launch: Launch) -> dict[NodeName, int]:
    return {facts.name: count for facts, count in zip(launch.nodes, launch.started, strict=True)}
