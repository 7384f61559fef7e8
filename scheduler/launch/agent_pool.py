"""The agents of a job and their heartbeats (answers to Status)."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from deeplink.core.admission import STRANGERS
from deeplink.core.finding import Severity
from deeplink.core.publish import leave_members
from deeplink.core.store_place import shared_store
from deeplink.core.text import listed
from deeplink.core.timeouts import LastAnswer
from deeplink.core.types import format_members
from deeplink.rpc.channel import agent_channel, allow_descriptors, attempt_to_wire
from deeplink.scheduler.launch.agent_monitor import ANSWER_S, GAP_S, POLL_S, AgentMonitor, GatherPoll
from deeplink.scheduler.launch.backend import HeldRole, LaunchError, NodesLostError
from deeplink.scheduler.launch.environment import NodeFacts
from deeplink.scheduler.launch.process import OUR_WORDS
from deeplink.v1 import node_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path
    from typing import Any

    from deeplink.core.clock import Clock
    from deeplink.core.finding import Finding
    from deeplink.core.types import Attempt, NodeName
    from deeplink.scheduler.launch.agent_monitor import Unheard
    from deeplink.scheduler.launch.agent_restart import AgentRestart
    from deeplink.scheduler.launch.backend import AgentStep, Reach
    from deeplink.scheduler.recovery.relaunch import Silence
    from deeplink.v1 import common_pb2

log = logging.getLogger(__name__)

START_S = 120.0  # for the agents that are needed to come up (Python on a cold shared file system is slow)
QUIET_S = 10.0  # after so long without any agent we say what we wait for
GRACE_S = 10.0  # how long the others may take then
# Whoever took the role found that nothing answers at the host for longer than the first. Of that no more counts
# than leaves the second for a question: a host that is back is heard first, and one that refuses now has lost its
# agent alone (`GAP_S`).
SILENT_BEFORE_S, ASKED_ONCE_S = 1.4, 1.1
GONE_S = 1.0  # a machine that refuses connections for so long has lost its agent; at a job's end all of them do
# Each agent is a connection, two where it is silent: for more, 1,024 open files may be too few. Of more, one on
# each leaf is asked for all there.
FEW = 128
STALL_S = 1.0  # if we ourselves did nothing for longer than this, the time does not count against any node


class AgentPool:
    """The agents of one run. Not thread-safe: the supervising thread alone uses it."""

    def __init__(
        self,
        step: AgentStep,
        token: Callable[[Attempt], str],
        clock: Clock,
        restarts: AgentRestart | None = None,
        folder: Path | None = None,
        *,
        role: HeldRole | None = None,
        output_gone: bool = False,
    ) -> None:
        """`folder` is the job's, where agents find the list of them all; None: they are told of no others.

        `output_gone`: we are elsewhere than the srun of the ranks that we took over.
        """
        self._role, self._output_gone = role or HeldRole(), output_gone
        self.token = token  # of an attempt: what its agents take from then on
        self._step, self._clock, self._restarts = step, clock, restarts
        self._nodes: dict[NodeName, AgentMonitor] = {}
        self._members = None if folder is None else MemberList(folder, clock)
        self._leaves, self._are_as_before = GatherPoll(), False  # whether the leaves have the agents as they are
        self._ticked = clock.monotonic()
        self._ask_at = float("-inf")
        self._said_ended = False
        self._of_first: set[NodeName] = set()  # who came up in the first step of agents, and is of it
        self._came_first = False  # whether any did
        self.boots: dict[NodeName, str] = {}  # of each node's kernel as the attempt began
        self.save_at = 0  # the step the ranks are to be told to save at; 0: none
        self._is_over = False

    @property
    def facts(self) -> dict[NodeName, NodeFacts]:
        """Every node whose agent came up."""
        return {name: one.facts for name, one in self._nodes.items()}

    def reach(self, attempt: Attempt) -> Reach:
        """Return what opens channels to the agents with this attempt's token; any thread may."""
        token = self.token(attempt)
        return lambda node: agent_channel(self._nodes[node].facts.address, token)

    @property
    def restarted(self) -> tuple[int, ...]:
        """The processes that started agents once more."""
        return self._restarts.pids if self._restarts is not None else ()

    def store_of(self, node: NodeName) -> node_pb2.StoreStatus:
        """Return what the node last said of its store."""
        return self._nodes[node].store

    def gather(
        self,
        nodes: Collection[NodeName],
        need: int,
        *,
        logs: str,
        told_to_end: Callable[[], bool],
        unheard: Unheard,
    ) -> bool:
        """Wait until an agent of every node is up; go on without the late ones once `need` are."""
        if len(nodes) > FEW:
            allow_descriptors()
        began = self._clock.monotonic()
        enough: float | None = None
        said = False
        while not told_to_end():
            self._hear_of(nodes)
            now = self._clock.monotonic()
            missing = {*nodes} - {*self._nodes}
            if not missing:
                return True
            if enough is None and len(self._nodes) >= need:
                enough = now
            if enough is not None and now - enough > GRACE_S:
                words = self._step.last_words()
                log.warning("going on without agents on %s%s", listed(sorted(missing)), words and f": {words}")
                return True
            if enough is None:
                self._check(missing, len(nodes) - need, now - began, logs, unheard)
            if not said and not self._nodes and now - began > QUIET_S:
                said = True
                starter, doubt = self._step.starter, self._step.doubt
                log.warning("%s has not started the agents yet, after %.0f s. %s", starter, now - began, doubt)
            self._clock.sleep(0.02)
        return False

    def _check(self, missing: set[NodeName], spare: int, waited_s: float, logs: str, unheard: Unheard) -> None:
        """Raise if these nodes' agents do not come up any more."""
        is_over = self._step.ended() is not None and not self._is_tried_again
        lost = unheard.lost(missing, spare, late=waited_s > START_S or is_over)
        if lost:
            raise NodesLostError(lost, waited_s)
        if lost is not None:
            raise self._none_came(missing, waited_s, logs)
        if is_over and not self._said_ended:
            self._said_ended = True
            words = self._step.last_words() or "it says nothing"
            log.warning(
                "%s has ended: %s. Waiting for Slurm's answer about %s",
                self._step.starter,
                words,
                listed(sorted(missing)),
            )

    def _hear_of(self, nodes: Collection[NodeName]) -> None:
        """Take in who came up by now, and start agents again that were ended before all had come up."""
        for facts in self._step.announced():
            if facts.node in nodes:
                self._admit(facts)
                self._of_first.add(facts.name)
                self._came_first = True
        if self._restarts is None:
            return
        for facts in self._restarts.announced():
            if facts.node in nodes:
                self._admit(facts)
                self._of_first.discard(facts.name)
        gone = self._step.killed()
        if {*nodes} - {*self._nodes} and self._step.ended() is not None and self._is_tried_again:
            # Slurm ends all of a step when a slurmd goes away while it is launched (22.05.8).
            gone = frozenset(nodes)
            for name in self._of_first:
                self._nodes.pop(name).close()
            self._of_first.clear()
        again = {node: NodeFacts(node=node, address="") for node in gone - {*self._nodes}}
        if again and (begun := self._restarts.begin(again)):
            words = self._step.last_words()
            log.warning("agents on %s were ended (%s): starting once more", listed(sorted(begun)), words)

    @property
    def _is_tried_again(self) -> bool:
        """Whether agents that were ended are started again: not where none began, or where they said why."""
        began = self._came_first or bool(self._step.killed())
        return began and self._restarts is not None and not self._step.last_words().startswith(OUR_WORDS)

    def _none_came(self, missing: set[NodeName], waited_s: float, logs: str) -> LaunchError:
        names, code, words = listed(sorted(missing)), self._step.ended(), self._step.last_words()
        remedy = f"{logs} has the agents' own words; `srun -w NODE true` shows whether Slurm reaches the node."
        if code is not None:
            words = words or "(it said nothing)"
            problem = f"{self._step.starter} exited {code} before an agent came up on {names}: {words}"
        else:
            problem = f"no node agent came up on {names} within {waited_s:.0f} s"
            if self._nodes:
                problem += f": {words}" if words else ""
            else:
                problem += f"; {self._step.starter} still hangs"
                remedy = f"{self._step.doubt} {logs} has what was said."
        return LaunchError(problem, remedy, exit_code=1)

    def _admit(self, facts: NodeFacts) -> None:
        if facts.shares_store:
            raise shared_store(facts.store, f"{facts.node} and {facts.shares_store}")
        STRANGERS.forget(facts.address)
        self._nodes[facts.name] = AgentMonitor(facts, self._clock.monotonic())
        self._are_as_before = False
        if self._members is not None:
            self._members.outdated()

    def adopt(self, facts: Iterable[NodeFacts]) -> None:
        """Go on with agents that came up under a launcher before this one."""
        nodes = tuple(facts)
        if len(nodes) > FEW:
            allow_descriptors()
        for one in nodes:
            self._admit(one)

    def count_silence(self, node: NodeName, silence_s: float) -> None:
        """Count some of a node's silence before its launcher's role was taken; after `silence_s` it is lost."""
        if node in self._nodes:
            counted_s = max(0.0, min(SILENT_BEFORE_S, silence_s - ASKED_ONCE_S))
            self._nodes[node].forgive(-counted_s, self._clock.monotonic())

    def readdress(self, facts: Mapping[NodeName, NodeFacts]) -> None:
        """Reach these nodes, which came up, by other addresses from here on."""
        for name, one in facts.items():
            self._nodes[name].close()
            self._admit(one)

    def restart(self, nodes: Collection[NodeName]) -> tuple[NodeName, ...]:
        """Start agents again on nodes that lost theirs, at their ports; returns those it is tried on now."""
        # Agents that come up answer as before. Does not wait.
        if self._restarts is None or not nodes:
            return ()
        return self._restarts.begin({node: self._nodes[node].facts for node in nodes})

    def without_agent(self, among: Collection[NodeName]) -> tuple[NodeName, ...]:
        """Return those of these nodes whose machine answers, and tells that no agent is there any more."""
        # None while all of them are silent and their starter has not ended: then it is ending them itself.
        now = self._clock.monotonic()
        if self._step.ended() is None and self._are_all_silent(now):
            return ()
        refused = {node: self._nodes[node].refused_since for node in among}
        return tuple(node for node, since in refused.items() if since is not None and now - since >= GONE_S)

    def _are_all_silent(self, now: float) -> bool:
        return all(now - one.heard >= GAP_S for one in self._nodes.values())

    def _readmit(self) -> None:
        for new in self._restarts.announced() if self._restarts is not None else ():
            old = self._nodes.get(new.name)
            if old is None or self._clock.monotonic() - old.heard < POLL_S:
                continue  # one that answers is enough
            log.info("the agent of %s is there again", new.name)
            # All else was settled for the whole run: which network, which cards, what fails together.
            address = f"{old.facts.address.rpartition(':')[0]}:{new.address.rpartition(':')[2]}"
            old.close()
            same = {"token_file": new.token_file, "pid": new.pid}
            self._admit(replace(old.facts, address=address, **same))  # type: ignore[arg-type] # NodeFacts' own
            # That it is there answers nothing: it may be on another boot, with nothing left of what ran before.
            self._nodes[new.name].asked_and_answered = old.asked_and_answered

    def rebooted(self) -> set[NodeName]:
        """Return the nodes that run another boot of their kernel than when the attempt began."""
        known = {node: boot for node, boot in self.boot_ids().items() if boot}
        return {node for node, boot in known.items() if self.boots.setdefault(node, boot) != boot}

    def ask_at(self, moment: float) -> None:
        """Ask every agent at this moment or soon after, whenever it was asked before."""
        self._ask_at = moment

    def tick(self, attempt: Attempt) -> list[common_pb2.Progress]:
        """Take in what has come back, ask again where it is time; does not wait. Returns new progress reports."""
        now = self._clock.monotonic()
        stall, self._ticked = now - self._ticked, now
        reports: list[common_pb2.Progress] = []
        self._readmit()
        # Without somebody who starts agents again, one that is gone is as good as its node.
        deserted = self._restarts.deserted if self._restarts is not None else frozenset(self._nodes)
        members = "" if self._members is None else self._members.value(lambda: self.facts)
        token = self.token(attempt)
        for one in self._nodes.values():
            one.token = token
            if stall > STALL_S:
                one.forgive(stall, now)
        request = node_pb2.StatusRequest(
            attempt=attempt_to_wire(attempt),
            members=members,
            save_at=self.save_at,
            over=self._is_over,
            term=self._role.term,
            output_gone=self._output_gone,
        )
        if not self._are_as_before:
            self._leaves.use(self._nodes.values() if len(self._nodes) > FEW else (), now)
            self._are_as_before = True
        fallen = self._leaves.harvest(now, reports)
        by_leaf = self._leaves.ask(request, now, self._ask_at, stall)
        for name, one in self._nodes.items():
            if name in by_leaf and name not in fallen and one.is_settled(now):
                continue  # nearly all of them: of thousands, all that follows would take too long
            failed = one.harvest(now, reports) or name in fallen
            if one.probe(now, failed=failed, may_be_gone=name not in deserted):
                is_back = one.reached_since == now
                if is_back or now - max(one.heard, one.opened) > 2 * ANSWER_S:
                    # In contact, but not by the connection we have: that one may wait long before it is tried.
                    one.reopen(now)
            if name not in by_leaf and one.is_due(now, self._ask_at):
                own = node_pb2.StatusRequest(after_report=one.after_report)
                own.MergeFrom(request)
                one.ask(own, now)
        return reports

    def let_slots_leave(self, attempt: Attempt) -> None:
        """Tell all nodes that the run has ended, and what waits there for ranks is to end; does not wait."""
        self._is_over = True
        self.ask_at(self._clock.monotonic())
        self.tick(attempt)

    @property
    def has_lost_role(self) -> bool:
        """Whether an agent knows of a launcher that has taken the role after us."""
        return any(one.term > self._role.term for one in self._nodes.values())

    def silence(self) -> dict[NodeName, Silence]:
        """Return how long each node has been silent."""
        now = self._clock.monotonic()
        return {name: one.silence(now) for name, one in self._nodes.items()}

    def health(self) -> dict[NodeName, tuple[Finding, ...]]:
        """Return what was wrong with each node, by its own checks, when it last answered."""
        return {name: one.health for name, one in self._nodes.items()}

    def unix(self) -> dict[NodeName, float]:
        """Return what each node's clock shows by now, within seconds; those that did not tell are left out."""
        now = self._clock.monotonic()
        return {name: one.unix[0] + now - one.unix[1] for name, one in self._nodes.items() if one.unix[0]}

    def sick(self) -> set[NodeName]:
        """Return the nodes that are unfit for ranks by their own checks."""
        error = Severity.ERROR
        return {name for name, found in self.health().items() if any(one.severity is error for one in found)}

    def boot_ids(self) -> dict[NodeName, str]:
        """Return which boot of its kernel each node runs; empty where it does not say."""
        return {name: one.boot_id for name, one in self._nodes.items()}

    def stubs(self, nodes: Iterable[NodeName]) -> dict[NodeName, Any]:
        """Return what calls these nodes' agents directly, as long as they are reached by the same addresses."""
        return {node: self._nodes[node].stub for node in nodes if node in self._nodes}

    @property
    def is_gone(self) -> bool:
        """Whether all agents have ended, and none was started again."""
        return self._step.ended() is not None and self._are_all_silent(self._clock.monotonic())

    def abandon(self) -> None:
        """Let go of the agents, where they are not ours to end any more."""
        self._step.abandon()
        if self._restarts is not None:
            self._restarts.abandon()

    def close(self) -> None:
        """End the agents and close every connection; returns in bounded time."""
        for one in self._nodes.values():
            one.close()
        if self._restarts is not None:
            self._restarts.close()
        self._step.stop()


# The list of a job's agents, in a file of its folder that is named by its digest.

WRITE_AGAIN_S = 10.0  # after the list could not be written


class MemberList:
    """Writes the list whenever it is another one, in a thread: supervision never waits for the shared folder.

    Heartbeats carry the file's name; an agent that does not know it yet reads it.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder, self._clock = folder, clock
        self._facts: Mapping[NodeName, NodeFacts] = {}
        self._is_outdated, self._again_at = True, float("-inf")
        self._written = LastAnswer(self._leave, clock, "deeplink-members")

    def outdated(self) -> None:
        """The agents are others from here on, or are reached elsewhere."""
        self._is_outdated = True

    def value(self, facts: Callable[[], Mapping[NodeName, NodeFacts]]) -> str:
        """Return what stands for the list of these agents; empty while it is not written. Does not wait."""
        now = self._clock.monotonic()
        if self._written.is_under_way:
            return ""
        if self._is_outdated:
            self._is_outdated, self._facts = False, facts()
            self._written = LastAnswer(self._leave, self._clock, "deeplink-members")
            self._again_at = float("-inf")
        if self._written.value is None and now >= self._again_at:
            self._again_at = now + WRITE_AGAIN_S
            self._written.ask()
        return self._written.value or ""

    def _leave(self) -> str | None:
        try:
            return leave_members(self._folder, format_members(tuple(one.member for one in self._facts.values())))
        except OSError as problem:
            log.warning("the agents cannot be told of each other: %s: %s", self._folder, problem)
            return None
