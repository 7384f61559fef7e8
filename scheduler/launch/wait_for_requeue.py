"""A stranded job waits for its lost nodes and requeues itself once that is safe."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from deeplink.clock import Clock
    from deeplink.scheduler.launch.agent_pool import AgentPool
    from deeplink.scheduler.launch.backend import Backend
    from deeplink.scheduler.launch.event_log import EventLog
    from deeplink.scheduler.launch.service import Service
    from deeplink.types import NodeName

TICK_S = 0.1
ASK_SLURM_S = 5.0
REVIVE_S = 2.0
BACK_S = 3.0
"""A lost node is trusted again, when there is no other, after it has answered for so long."""


class RequeueWait:
    """Waits for a rescue, as often as a run is stranded.

    Meanwhile the watchdog, if there is one, takes the lost nodes from Slurm, which then starts the job again
    elsewhere. Without one Slurm does the first half by itself after its own timeout; the second half is ours,
    and only then: asking for it while a node is unreachable and not down would lose the job its GPUs.

    Args:
        backend: the allocation.
        fleet: its agents.
        chronicle: who is told.
        service: tells which nodes Slurm has taken from the job: those are not back, whoever answers there.
        clock: for every duration.
        doubt_s: a node that answered longer ago is not back.

    Attributes:
        is_elsewhere: Slurm says that the job has been started again elsewhere.
        found: what had become of the nodes that came back, for people; empty where that is not known.
    """

    def __init__(
        self,
        backend: Backend,
        fleet: AgentPool,
        chronicle: EventLog,
        service: Service,
        *,
        clock: Clock,
        doubt_s: float,
    ) -> None:
        self._backend, self._fleet, self._chronicle = backend, fleet, chronicle
        self._service, self._clock, self._doubt_s = service, clock, doubt_s
        self._asked = False  # Slurm to start the job again
        self.is_elsewhere, self.found = False, ""

    def wait(
        self,
        lost: Collection[NodeName],
        timeout_s: float,
        *,
        others: Collection[NodeName],
        enough: Callable[[int], bool],
        listen: Callable[[], None],
        told_to_end: Callable[[], bool],
    ) -> bool:
        """Wait until enough nodes answer again (True), or until the time is up or somebody ends us (False).

        Args:
            lost: the nodes that were lost.
            timeout_s: how long.
            others: those that were not. Slurm ends the agents there, too, when one of a step's nodes boots anew.
            enough: tells whether the job can run on so many nodes.
            listen: called again and again meanwhile; hears the agents.
            told_to_end: asked as often.
        """
        deadline = self._clock.monotonic() + timeout_s
        back_since: float | None = None
        asking: threading.Thread | None = None
        asked = tried = self._clock.monotonic()
        while self._backend.can_requeue and self._clock.monotonic() < deadline:
            listen()
            if told_to_end() or self.is_elsewhere:
                return False
            now = self._clock.monotonic()
            silence, taken = self._fleet.silence(), self._service.tick().taken
            ours = [node for node in (*lost, *others) if node not in taken]
            silent = [node for node in ours if silence[node].answer_s >= self._doubt_s]
            if enough(len(ours) - len(silent)):
                back_since = now if back_since is None else back_since
                if now - back_since >= BACK_S:
                    rebooted = tuple(sorted(self._fleet.rebooted() & set(lost)))
                    self.found = f"{', '.join(rebooted)} booted anew" if rebooted else ""
                    said = f"the lost nodes answer again{self.found and f' ({self.found})'}"
                    back = tuple(node for node in lost if node in ours)
                    self._chronicle.event("back", said, nodes=back, rebooted=rebooted)
                    return True
            else:
                back_since = None
            if silent and now - tried >= REVIVE_S:
                tried = now
                # Of a node that was booted anew nothing is left that could answer. One that is out of reach
                # must not keep the others waiting: they are started apart from it.
                bereft = self._fleet.bereft(silent)
                begun = self._fleet.revive(bereft)
                begun += self._fleet.revive([node for node in silent if node not in bereft])
                if begun:
                    self._chronicle.event("agents-again", nodes=begun)
            if now - asked >= ASK_SLURM_S and (asking is None or not asking.is_alive()):
                asked = now
                asking = threading.Thread(target=self._requeue_if_down, args=(tuple(lost),), daemon=True)
                asking.start()
            self._clock.sleep(TICK_S)
        return False

    def _requeue_if_down(self, lost: Collection[NodeName]) -> None:
        word = self._backend.standing()
        if word is not None and not word.ours:
            self.is_elsewhere = True
        elif not self._asked and self._backend.requeue_if_down(lost):
            self._asked = True
            self._chronicle.event("requeue", "Slurm has given the lost nodes up: asked it to start the job again")
