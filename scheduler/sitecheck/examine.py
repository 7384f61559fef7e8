"""Gathering the evidence: from Slurm, from this host or from a step on some nodes, from the watchdog."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from deeplink.core.errors import DeepLinkError
from deeplink.core.timeouts import call_with_timeout
from deeplink.rpc.daemon import is_loopback
from deeplink.scheduler.launch.process import end_process, python_command
from deeplink.scheduler.launch.srun import step_environment
from deeplink.scheduler.sitecheck.cluster_rules import services_of
from deeplink.scheduler.sitecheck.host_rules import scripts_of
from deeplink.scheduler.sitecheck.part import NodePart, sweep, watchdog_answer
from deeplink.scheduler.sitecheck.site_evidence import (
    HostFacts,
    Measured,
    Messages,
    NodeProbePlan,
    NodeReport,
    Offset,
    SiteEvidence,
)
from deeplink.scheduler.slurm import command as processes
from deeplink.scheduler.slurm.command import COMMAND_TIMEOUT_S, real_program
from deeplink.scheduler.slurm.nodeset import NodeSetError, at_most, unfold
from deeplink.scheduler.slurm.parse import parse_nodes, parse_partitions, parse_topology
from deeplink.scheduler.slurm.settings import parse_settings
from deeplink.scheduler.slurm.states import LASTING_FLAGS, NodeState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deeplink.core.clock import Clock
    from deeplink.core.config import Config
    from deeplink.core.types import NodeName
    from deeplink.scheduler.slurm.command import Runner

MOST_NODES = 4  # how many nodes are looked at by default
HERE_S = 60.0
SWEEP_S = 5.0
_IMMEDIATE_S = 30
_STEP_MINUTES = 5
# Beside a job's own steps, and taking nothing from them; one node's death must not end it on the others.
_INSIDE = ("--overlap", "--gres=none", "--mem=0", "--cpus-per-task=1")
_OUTSIDE = (f"--immediate={_IMMEDIATE_S}", f"--time={_STEP_MINUTES}", "--mem=1024M")
_ALWAYS = ("--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL", "--quiet")
START_S = 90.0  # how long the first node may take: a queue, and Python on a cold shared file system
GRACE_S = 20.0  # how long the others may take then
PING_S = 5.0
MEASURE_S = 60.0
END_S = 5.0
_PINGS = 5
_POLL_S = 0.25
_MOST_LINES = 1 << 16
_MOST_PEERS = 16
_OVER = re.compile(r"srun: error: (\S+): tasks? [\d,-]+: (?!Starting|Running)", re.ASCII)


def _nodes_of_lines(text: str) -> list[NodeName]:
    return [node for line in text.splitlines() for node in unfold(line.strip())]


_QUESTIONS: Mapping[str, tuple[Sequence[str], Callable[[str], Any]]] = {
    "settings": (("scontrol", "show", "config"), parse_settings),
    "nodes": (("scontrol", "--details", "show", "node", "--oneliner"), parse_nodes),
    "partitions": (("scontrol", "--all", "show", "partition", "--oneliner"), parse_partitions),
    "topology": (("scontrol", "show", "topology"), parse_topology),
    "suspended jobs": (("squeue", "-h", "-a", "--states=SUSPENDED", "-o", "%N"), _nodes_of_lines),
}


def asked_slurm(config: Config, run: Runner, clock: Clock) -> SiteEvidence:
    """Return what Slurm says of itself; what it does not say is in `problems`."""
    answers: dict[str, Any] = {}
    problems: dict[str, str] = {}
    asked: list[tuple[float, float]] = []

    def ask(what: str) -> None:
        argv, parse = _QUESTIONS[what]
        began = clock.unix()
        try:
            said = run(argv, timeout_s=COMMAND_TIMEOUT_S)
            if what == "settings":
                asked.append((began, clock.unix()))
            parsed = parse(said)
            answers[what] = tuple(parsed) if isinstance(parsed, list) else parsed
        except DeepLinkError as problem:
            problems[what] = str(problem)

    with ThreadPoolExecutor(len(_QUESTIONS)) as pool:
        list(pool.map(ask, _QUESTIONS))
    return SiteEvidence(
        config=config,
        settings=answers.get("settings"),
        nodes=answers.get("nodes"),
        partitions=answers.get("partitions"),
        switches=answers.get("topology"),
        suspended=answers.get("suspended jobs"),
        asked=asked[0] if asked else (0.0, 0.0),
        problems=problems,
    )


def nodes_to_look_at(evidence: SiteEvidence) -> int:
    """Return how many nodes to look at by default: as many as are idle, up to `MOST_NODES`."""
    idle = [row for row in evidence.nodes or () if row.state is NodeState.IDLE and row.flags <= LASTING_FLAGS]
    return min(len(idle), MOST_NODES)


def step_command(
    count: int, *, inside: bool, options: Sequence[str], program: Sequence[str], name: str = "deeplink-doctor"
) -> list[str]:
    """Return the srun that starts `program` once on each of so many nodes."""
    where = _INSIDE if inside else _OUTSIDE
    sizes = [f"--nodes={count}", f"--ntasks={count}", f"--job-name={name}"]
    return ["srun", *sizes, *_ALWAYS, *where, *options, *program]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRequest:
    """What is to be looked at besides Slurm."""

    nodes: int | None = None  # how many nodes; None for all of the allocation, else a few idle ones
    here: bool = False  # this host instead
    quick: bool = False  # neither
    disk_bytes: int = 0  # how much to write and read in each store; 0 for nothing
    srun_options: tuple[str, ...] = ()  # of the user's, for the step


@dataclass(frozen=True, slots=True)
class Examination:
    """One run of the doctor."""

    config: Config
    request: DoctorRequest
    run: Runner
    clock: Clock
    say: Callable[[str], None]
    env: Mapping[str, str]

    def evidence(self) -> SiteEvidence:
        """Return everything that could be had, and why the rest could not."""
        self.say("asking Slurm")
        evidence = asked_slurm(self.config, self.run, self.clock)
        watch = self.config.watch
        if watch and not is_loopback(watch.rpartition(":")[0].strip("[]")):
            evidence = replace(evidence, watch_answer=watchdog_answer(self.config, self.clock))
        everyone = NodeProbePlan(
            services=services_of(self.config.watch, self.config.members),
            scripts=scripts_of(evidence.settings) if evidence.settings else (),
            disk_bytes=self.request.disk_bytes,
        )
        if self.request.here:
            return self._this_host(evidence, everyone)
        if self.request.quick:
            return _without(evidence, "no node was looked at (--quick)")
        return self._step(evidence, everyone)

    def _this_host(self, evidence: SiteEvidence, plan: NodeProbePlan) -> SiteEvidence:
        self.say("looking at this host")
        part = NodePart(self.config, secrets.token_hex(4), self.clock)

        def examined() -> NodeReport:
            with part.host() as host:
                return NodeReport(host=host, measured=part.measure(host, plan))

        try:
            report = call_with_timeout(examined, HERE_S)
        except TimeoutError:
            return _without(evidence, f"this host's folders did not answer within {HERE_S:g} s: is a mount dead?")
        finally:
            self._sweep(part.run)
        return replace(evidence, reports={report.host.node: report})

    def _sweep(self, run: str) -> None:
        with contextlib.suppress(TimeoutError):
            call_with_timeout(partial(sweep, self.config, run), SWEEP_S)

    def _step(self, evidence: SiteEvidence, everyone: NodeProbePlan) -> SiteEvidence:
        inside = _allocation(self.env)
        count = self.request.nodes or len(inside) or nodes_to_look_at(evidence)
        if not count:
            why = "no node is idle: run it in an allocation, or wait for nodes with --nodes N"
            return _without(evidence, why if evidence.nodes is not None else evidence.why_not("nodes"))
        if inside and count > len(inside):
            return _without(evidence, f"this allocation has {len(inside)} nodes, not {count}")
        run = secrets.token_hex(4)
        program = python_command("deeplink", "doctor", "--as-node", run)
        # Not a stand-in of ours, as `deeplink sbatch --deeplink-shim` puts it on PATH.
        srun = real_program("srun", self.env.get("PATH", "")) or "srun"
        name = f"deeplink-doctor-{run}"
        argv = step_command(
            count, inside=bool(inside), options=self.request.srun_options, program=program, name=name
        )
        env = step_environment(self.env, resources=False) if inside else dict(self.env)
        expected = inside if count == len(inside) else ()
        # In an allocation the step ends with its input, and the allocation is not ours to end.
        cancel = partial(self._cancel, name) if not inside else lambda: None
        step = RunningStep([srun, *argv[1:]], env, count, self.clock, self.say, expected, cancel)
        try:
            result = step.run(partial(plans_for, everyone=everyone))
        except DeepLinkError as failed:
            return _without(evidence, str(failed))
        finally:
            self._sweep(run)
        problems = {**evidence.problems, **({"hosts": result.problem} if result.problem else {})}
        return replace(evidence, reports=result.reports, silent=result.silent, problems=problems)

    def _cancel(self, name: str) -> None:
        with contextlib.suppress(DeepLinkError):  # the step's own time limit ends it then
            self.run(["scancel", "--quiet", f"--name={name}"])


def _without(evidence: SiteEvidence, why: str) -> SiteEvidence:
    return replace(evidence, problems={**evidence.problems, "hosts": why})


def _allocation(env: Mapping[str, str]) -> tuple[NodeName, ...]:
    listed = env.get("SLURM_JOB_NODELIST", "")
    return unfold(listed) if listed and env.get("SLURM_JOB_ID", "").isdigit() else ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of the step: reports by node, nodes that said nothing, and why there is less than asked for."""

    reports: Mapping[str, NodeReport]
    silent: tuple[str, ...] = ()
    problem: str = ""


@dataclass(slots=True)
class RunningStep:
    """A running step."""

    argv: Sequence[str]
    env: Mapping[str, str]
    count: int
    clock: Clock
    say: Callable[[str], None]
    expected: tuple[str, ...] = ()
    cancel: Callable[[], None] = lambda: None
    _lines: queue.Queue[str] = field(default_factory=lambda: queue.Queue(_MOST_LINES))
    _messages: Messages = field(default_factory=Messages)
    _hosts: dict[str, HostFacts] = field(default_factory=dict)
    _measured: dict[str, Measured] = field(default_factory=dict)
    _offsets: dict[str, Offset] = field(default_factory=dict)
    _bad: dict[str, str] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)  # nodes whose part srun says is over

    def run(self, plan: Callable[[Mapping[str, HostFacts]], Mapping[str, NodeProbePlan]]) -> StepResult:
        """Start the step, examine, end it, and return what was learnt."""
        process = processes.spawn(
            self.argv, env=self.env, stdin=processes.PIPE, stdout=processes.PIPE, stderr=processes.PIPE
        )
        readers = [
            threading.Thread(target=self._read, args=(pipe,), name="deeplink-doctor", daemon=True)
            for pipe in (process.stdout, process.stderr)
        ]
        for reader in readers:
            reader.start()
        try:
            self._examine(process, plan)
        finally:
            self._end(process)
            for reader in readers:
                reader.join(END_S)  # they end with what srun held open
        return self._result(process.poll())

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                with contextlib.suppress(queue.Full):
                    self._lines.put_nowait(line.decode(errors="replace"))

    def _examine(
        self,
        process: processes.Process[bytes],
        plan: Callable[[Mapping[str, HostFacts]], Mapping[str, NodeProbePlan]],
    ) -> None:
        self.say(f"starting {self.count} nodes")
        self._listen(process, START_S, lambda: len(self._hosts) > 0)
        self._listen(process, GRACE_S, lambda: len(self._hosts.keys() | self._ended) >= self.count)
        good = {node: host for node, host in self._hosts.items() if not host.problem}
        if not good:
            return
        self.say("asking for their clocks")
        for number in range(_PINGS):
            self._ping(process, number, set(good))
        plans = plan(good)
        self.say("connecting, writing, reading")
        self._ask(process, {"plans": plans})
        self._listen(
            process, MEASURE_S, lambda: plans.keys() <= self._measured.keys() | self._bad.keys() | self._ended
        )

    def _ping(self, process: processes.Process[bytes], number: int, nodes: set[str]) -> None:
        answered: set[str] = set()
        unix, asked = self.clock.unix(), self.clock.monotonic()

        def take(node: str, message: Mapping[str, Any]) -> None:
            if message.get("pong") != number:
                return
            took = self.clock.monotonic() - asked
            answered.add(node)
            offset = Offset(float(message["unix"]) - (unix + took / 2), took / 2)
            known = self._offsets.get(node)
            if known is None or offset.error_s < known.error_s:
                self._offsets[node] = offset

        self._ask(process, {"ping": number})
        self._listen(process, PING_S, lambda: answered | self._ended >= nodes, take)

    @staticmethod
    def _ask(process: processes.Process[bytes], asked: Mapping[str, Any]) -> None:
        if process.stdin is not None:
            with contextlib.suppress(OSError):  # srun ended; the silence tells
                process.stdin.write(json.dumps(asked, default=asdict).encode() + b"\n")
                process.stdin.flush()

    def _listen(
        self,
        process: processes.Process[bytes],
        within_s: float,
        enough: Callable[[], bool],
        take: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        deadline = self.clock.monotonic() + within_s
        while not enough() and (left := deadline - self.clock.monotonic()) > 0:
            over = process.poll() is not None
            try:
                line = self._lines.get(timeout=min(_POLL_S, left))
            except queue.Empty:
                if over:
                    return
                continue
            taken = self._messages.take(line)
            if taken is None:
                self._ended |= ended_nodes(line)
            else:
                self._keep(*taken)
                if take is not None:
                    take(*taken)

    def _keep(self, node: str, message: Mapping[str, Any]) -> None:
        try:
            if "host" in message:
                self._hosts[node] = HostFacts.of(message["host"])
            elif "measured" in message:
                self._measured[node] = Measured.of(message["measured"])
        except DeepLinkError as problem:
            self._bad[node] = str(problem)
            self._hosts[node] = HostFacts(node=node, problem=str(problem))

    def _end(self, process: processes.Process[bytes]) -> None:
        self._ask(process, {"end": True})
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        with contextlib.suppress(processes.TimeoutExpired):
            process.wait(END_S)
        if process.poll() is None:
            self.cancel()  # an srun that is killed leaves its allocation until the time limit (measured)
        end_process(process)

    def _result(self, code: int | None) -> StepResult:
        silent = tuple(node for node in self._all_nodes() or sorted(self._ended) if node not in self._hosts)
        late = [node for node, host in self._hosts.items() if not host.problem and node not in self._measured]
        words = next((line for line in reversed(self._messages.strange) if line.strip()), "")
        problem = ""
        if not self._hosts:
            problem = f"no node answered: {words or f'srun ended with {code} and said nothing'}"
        elif silent:
            problem = f"{len(silent)} of {self.count} nodes said nothing: {words or 'srun said nothing either'}"
        elif late:
            problem = f"not measured in time on {', '.join(sorted(late))}"
        reports = {
            node: NodeReport(host=host, measured=self._measured.get(node), offset=self._offsets.get(node))
            for node, host in self._hosts.items()
        }
        return StepResult(reports, silent, problem)

    def _all_nodes(self) -> tuple[str, ...]:
        if self.expected:
            return self.expected
        try:
            return next((unfold(host.step_nodes) for host in self._hosts.values() if host.step_nodes), ())
        except NodeSetError:
            return ()


def ended_nodes(line: str) -> set[str]:
    """Return the nodes that srun says are no longer part of the step.

    >>> sorted(ended_nodes("srun: error: n[1-2]: tasks 1-2: Exited with exit code 1"))
    ['n1', 'n2']
    """
    found = _OVER.match(line)
    try:
        return set(unfold(found[1])) if found and at_most(found[1]) <= _MOST_LINES else set()
    except NodeSetError:
        return set()


def plans_for(hosts: Mapping[str, HostFacts], everyone: NodeProbePlan) -> dict[str, NodeProbePlan]:
    """Return what each node is to do: `everyone`'s part, and the peers it is to try."""
    nodes = sorted(hosts)

    def target(node: str) -> tuple[str, tuple[int, ...]]:
        host = hosts[node]
        return host.address, tuple(port for ports in host.listening.values() for port in ports)

    return {
        node: replace(everyone, peers={peer: target(peer) for peer in peers_of(node, nodes)}) for node in nodes
    }


def peers_of(node: str, nodes: Sequence[str]) -> list[str]:
    """Return the peers that a node tries: all of a few; of many those 1, 2, 4, ... places on."""
    here = nodes.index(node)
    others = [nodes[(here + step) % len(nodes)] for step in range(1, len(nodes))]
    if len(others) <= _MOST_PEERS:
        return others
    return [others[(1 << power) - 1] for power in range(_MOST_PEERS) if (1 << power) <= len(others)]
