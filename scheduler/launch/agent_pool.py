"""The agents of a job and their heartbeats: an answer to Status is one."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from deeplink.scheduler.launch.agent_monitor import ANSWER_S, GAP_S, POLL_S, AgentMonitor
from deeplink.scheduler.launch.backend import AgentsFailedError, NodesLostError
from deeplink.scheduler.watch.records import HealthSeverity
from deeplink.strangers import STRANGERS
from deeplink.text import listed
from deeplink.types import NodeName, format_members
from deeplink.v1 import node_pb2
from deeplink.wire import allow_descriptors, attempt_to_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from typing import Any

    from deeplink.clock import Clock
    from deeplink.scheduler.launch.agent_monitor import Silence
    from deeplink.scheduler.launch.agent_restart import AgentRestart
    from deeplink.scheduler.launch.backend import AgentStep
    from deeplink.scheduler.launch.environment import NodeFacts
    from deeplink.scheduler.launch.unheard import Unheard
    from deeplink.scheduler.watch.records import HealthFinding
    from deeplink.types import Attempt
    from deeplink.v1 import common_pb2

log = logging.getLogger(__name__)

START_S = 120.0
"""How long the agents that are needed may take to come up (Python on a cold shared file system is slow)."""
QUIET_S = 10.0
"""After so long without any agent we say what we wait for."""
GRACE_S = 10.0
"""How long the others may take then."""
GONE_S = 1.0
"""A machine that has refused connections for so long has lost its agent; while a job ends all of them do."""
FEW = 128
"""Each agent is a connection, and two where it is silent: for more, 1,024 open files may be too few."""
STALL_S = 1.0
"""If we ourselves did nothing for longer than this, the time does not count against anybody."""


class AgentPool:
    """The agents of one run. Not thread-safe: the supervising thread alone uses it.

    Attributes:
        save_at: the step the ranks are to be told to save at; 0: none.

    Args:
        step: the running agents.
        token: what every call carries while an attempt runs.
        clock: for all durations.
        revival: starts agents once more; None where that cannot be.
    """

    def __init__(
        self, step: AgentStep, token: Callable[[Attempt], str], clock: Clock, revival: AgentRestart | None = None
    ) -> None:
        self._step, self._token, self._clock, self._revival = step, token, clock, revival
        self._nodes: dict[NodeName, AgentMonitor] = {}
        self._ticked = clock.monotonic()
        self._pressed = float("-inf")
        self._said_ended = False
        self.save_at = 0

    @property
    def facts(self) -> dict[NodeName, NodeFacts]:
        """Every node whose agent came up."""
        return {name: watched.facts for name, watched in self._nodes.items()}

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
        """Wait until an agent of every node is up; go on without the late ones once `need` are.

        Args:
            nodes: all nodes of the allocation.
            need: how many are needed at least.
            logs: where the agents log, for the error.
            told_to_end: asked all the while; once true, the waiting ends and False is returned.
            unheard: tells of the nodes that Slurm does not hear of.

        Raises:
            AgentsFailedError: fewer than `need` came up.
            NodesLostError: so it is, since Slurm does not hear of the others either.
        """
        if len(nodes) > FEW:
            allow_descriptors()
        began = self._clock.monotonic()
        enough: float | None = None
        said = False
        while not told_to_end():
            for facts in self._step.announced():
                if facts.node in nodes:
                    self._admit(facts)
            now = self._clock.monotonic()
            if len(self._nodes) == len(nodes):
                return True
            if enough is None and len(self._nodes) >= need:
                enough = now
            if enough is not None and now - enough > GRACE_S:
                late, words = sorted(set(nodes) - set(self._nodes)), self._step.last_words()
                log.warning("going on without agents on %s%s", listed(late), words and f": {words}")
                return True
            if enough is None:
                missing = {*nodes} - {*self._nodes}
                self._check(missing, len(nodes) - need, now - began, logs, unheard)
            if not said and not self._nodes and now - began > QUIET_S:
                said = True
                starter, doubt = self._step.starter, self._step.doubt
                log.warning("%s has not started the agents yet, after %.0f s. %s", starter, now - began, doubt)
            self._clock.sleep(0.02)
        return False

    def _check(self, missing: set[NodeName], spare: int, waited_s: float, logs: str, unheard: Unheard) -> None:
        """Raise if these nodes' agents do not come up any more."""
        late = waited_s > START_S or self._step.ended() is not None
        lost = unheard.lost(missing, spare, late=late)
        if lost:
            raise NodesLostError(lost, waited_s)
        if lost is not None:
            raise AgentsFailedError(missing, waited_s, logs, step=self._step, none=not self._nodes)
        if self._step.ended() is not None and not self._said_ended:
            self._said_ended = True
            starter, names, words = self._step.starter, listed(sorted(missing)), self._step.last_words()
            log.warning(
                "%s has ended: %s. Waiting for Slurm's word on %s", starter, words or "it says nothing", names
            )

    def _admit(self, facts: NodeFacts) -> None:
        STRANGERS.forget(facts.address)
        self._nodes[facts.name] = AgentMonitor.begun(facts, self._clock.monotonic())

    def readdress(self, facts: Mapping[NodeName, NodeFacts]) -> None:
        """Reach these nodes, which came up, by other addresses from here on."""
        for name, one in facts.items():
            self._nodes[name].close()
            self._admit(one)

    def revive(self, nodes: Collection[NodeName]) -> tuple[NodeName, ...]:
        """Start agents once more on nodes that lost theirs, in their places; returns those it is tried on now.

        Who comes up answers as before. Does not wait.
        """
        if self._revival is None or not nodes:
            return ()
        return self._revival.begin({node: self._nodes[node].facts for node in nodes})

    def bereft(self, among: Collection[NodeName]) -> tuple[NodeName, ...]:
        """Return those of these nodes whose machine answers, and tells that no agent is there any more.

        Nobody while all of them are silent and their starter has not ended: then it is ending them itself.
        """
        now = self._clock.monotonic()
        if self._step.ended() is None and all(now - one.heard >= GAP_S for one in self._nodes.values()):
            return ()
        return tuple(
            node
            for node in among
            if (since := self._nodes[node].refused_since) is not None and now - since >= GONE_S
        )

    def _readmit(self) -> None:
        for new in self._revival.announced() if self._revival is not None else ():
            old = self._nodes.get(new.name)
            if old is None or self._clock.monotonic() - old.heard < POLL_S:
                continue  # one that answers is enough
            log.info("the agent of %s is there again", new.name)
            # All else was settled for the whole run: which network, which cards, what fails together.
            address = f"{old.facts.address.rpartition(':')[0]}:{new.address.rpartition(':')[2]}"
            old.close()
            self._admit(
                replace(
                    old.facts, address=address, token_file=new.token_file, pid=new.pid, data_port=new.data_port
                )
            )
            again = self._nodes[new.name]
            # That it is there answers nothing: it may be on another boot, with nothing left of what ran before.
            again.boot_before, again.asked_and_answered = old.boot_id, old.asked_and_answered

    def rebooted(self) -> set[NodeName]:
        """Return the nodes whose agents came up once more on another boot of their kernel."""
        return {
            name
            for name, one in self._nodes.items()
            if one.boot_before and one.boot_id not in {"", one.boot_before}
        }

    def press(self, moment: float) -> None:
        """See to it that every agent is asked at this moment or soon after, whenever it was asked before."""
        self._pressed = moment

    def tick(self, attempt: Attempt) -> list[common_pb2.Progress]:
        """Take in what has come back, ask again where it is time; does not wait. Returns new progress reports."""
        now = self._clock.monotonic()
        stall = now - self._ticked
        self._ticked = now
        reports: list[common_pb2.Progress] = []
        self._readmit()
        deserted = self._revival.deserted if self._revival is not None else frozenset(self._nodes)
        members = format_members(tuple(watched.facts.member for watched in self._nodes.values()))
        token = self._token(attempt)
        for name, watched in self._nodes.items():
            watched.token = token
            if stall > STALL_S:
                watched.forgive(stall, now)
            failed = watched.harvest(now, reports)
            # Without somebody who starts agents again, one that is gone is as good as its node.
            if watched.knock(now, failed=failed, may_be_gone=name not in deserted):
                is_back = watched.reached_since == now
                if is_back or now - max(watched.heard, watched.opened) > 2 * ANSWER_S:
                    # In contact, but not by the connection we have: that one may wait long before it is tried.
                    watched.reopen(now)
            if watched.is_due(now, self._pressed):
                request = node_pb2.StatusRequest(
                    attempt=attempt_to_wire(attempt),
                    after_report=watched.after_report,
                    members=members,
                    save_at=self.save_at,
                )
                watched.ask(request, now)
        return reports

    def silence(self) -> dict[NodeName, Silence]:
        """Return how long each node has been silent."""
        now = self._clock.monotonic()
        return {name: one.silence(now) for name, one in self._nodes.items()}

    def health(self) -> dict[NodeName, tuple[HealthFinding, ...]]:
        """Return what was wrong with each node, by its own checks, when it last answered."""
        return {name: one.health for name, one in self._nodes.items()}

    def unix(self) -> dict[NodeName, float]:
        """Return what each node's clock shows by now, within seconds; those that did not tell are left out."""
        now = self._clock.monotonic()
        return {name: one.unix[0] + now - one.unix[1] for name, one in self._nodes.items() if one.unix[0]}

    def sick(self) -> set[NodeName]:
        """Return the nodes that are unfit for ranks by their own checks."""
        return {
            name
            for name, one in self._nodes.items()
            if any(finding.severity is HealthSeverity.DRAIN for finding in one.health)
        }

    def boot_ids(self) -> dict[NodeName, str]:
        """Return which boot of its kernel each node runs; empty where it does not say."""
        return {name: one.boot_id for name, one in self._nodes.items()}

    def ask_stacks(
        self, nodes: Iterable[NodeName], request: node_pb2.StacksRequest, timeout_s: float
    ) -> dict[NodeName, Any]:
        """Ask these nodes' agents at once where ranks are; return the calls under way, futures of StacksReply."""
        known = [node for node in nodes if node in self._nodes]
        return {node: self._nodes[node].stub.Stacks.future(request, timeout=timeout_s) for node in known}

    @property
    def is_gone(self) -> bool:
        """Whether all agents have ended, and none was started once more."""
        if self._step.ended() is None:
            return False
        now = self._clock.monotonic()
        return all(now - one.heard >= GAP_S for one in self._nodes.values())

    def abandon(self) -> None:
        """Let go of the agents, where they are not ours to end any more."""
        self._step.abandon()
        if self._revival is not None:
            self._revival.abandon()

    def close(self) -> None:
        """End the agents and let go of every connection; returns in bounded time."""
        for watched in self._nodes.values():
            watched.close()
        if self._revival is not None:
            self._revival.close()
        self._step.stop()
