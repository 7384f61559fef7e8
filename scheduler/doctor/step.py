"""One short step over some nodes: each tells of itself, they try each other, and all of it ends in time.

The nodes are spoken to over srun's standard input and output, so that nothing is taken for granted of the network
that is to be examined.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from deeplink.scheduler.doctor.frames import Messages
from deeplink.scheduler.doctor.reach import peers_of
from deeplink.scheduler.doctor.report import (
    HostFacts,
    Measured,
    NodeProbePlan,
    NodeReport,
    Offset,
    ReportFormatError,
)
from deeplink.scheduler.launch.process import end_process
from deeplink.scheduler.slurm import command as processes
from deeplink.scheduler.slurm.nodeset import NodeSetError, at_most, unfold

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deeplink.clock import Clock

START_S = 90.0
"""How long the first node may take: a queue, and Python on a cold shared file system."""
GRACE_S = 20.0
"""How long the others may take then."""
PING_S = 5.0
MEASURE_S = 60.0
END_S = 5.0
_PINGS = 5
_POLL_S = 0.25
_MOST_LINES = 1 << 16


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of the step: reports by node, nodes that said nothing, and why there is less than asked for."""

    reports: Mapping[str, NodeReport]
    silent: tuple[str, ...] = ()
    problem: str = ""


@dataclass(slots=True)
class RunningStep:
    """A running step.

    Args:
        argv: srun and what it starts.
        env: its environment.
        count: how many nodes there will be.
        clock: time.
        say: told what is going on.
        expected: the nodes there will be, where that is known.
        cancel: ends the step in Slurm; asked where srun does not end by itself.
    """

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
        """Start the step, examine, end it, and return what was learnt.

        Args:
            plan: what each node is to do, of what all told.

        Raises:
            CommandMissingError: there is no srun.
        """
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
        self._ask(process, {"plans": {node: one.as_dict() for node, one in plans.items()}})
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
                process.stdin.write(json.dumps(asked).encode() + b"\n")
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
        except ReportFormatError as problem:
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


_OVER = re.compile(r"srun: error: (\S+): tasks? [\d,-]+: (?!Starting|Running)", re.ASCII)


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
    """Return what each node is to do: `everyone`'s part, and the peers it is to try.

    Args:
        hosts: what the nodes told.
        everyone: what is the same for all.
    """
    nodes = sorted(hosts)

    def target(node: str) -> tuple[str, tuple[int, ...]]:
        host = hosts[node]
        return host.address, tuple(port for ports in host.listening.values() for port in ports)

    return {
        node: NodeProbePlan(
            peers={peer: target(peer) for peer in peers_of(node, nodes)},
            services=everyone.services,
            scripts=everyone.scripts,
            disk_bytes=everyone.disk_bytes,
        )
        for node in nodes
    }
