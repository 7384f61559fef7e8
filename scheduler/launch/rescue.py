"""What a stranded job does: waits for its lost nodes, and asks Slurm to start it again once that is safe."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from deeplink.clock import Clock
    from deeplink.scheduler.launch.backend import Backend
    from deeplink.scheduler.launch.chronicle import Chronicle
    from deeplink.scheduler.launch.fleet import Fleet
    from deeplink.types import NodeName

TICK_S = 0.1
ASK_SLURM_S = 5.0
BACK_S = 3.0
"""A lost node is trusted again, when there is no other, after it has answered for so long."""


class Rescue:
    """Waits for a rescue, as often as a run is stranded.

    Meanwhile the watchdog, if there is one, takes the lost nodes from Slurm, which then starts the job again
    elsewhere. Without one Slurm does the first half by itself after its own timeout; the second half is ours,
    and only then: asking for it while a node is unreachable and not down would lose the job its GPUs.

    Args:
        backend: the allocation.
        fleet: its agents.
        chronicle: who is told.
        clock: for every duration.
        doubt_s: a node that answered longer ago is not back.
    """

    def __init__(
        self, backend: Backend, fleet: Fleet, chronicle: Chronicle, *, clock: Clock, doubt_s: float
    ) -> None:
        self._backend, self._fleet, self._chronicle = backend, fleet, chronicle
        self._clock, self._doubt_s = clock, doubt_s
        self._asked = False  # Slurm to start the job again

    def wait(
        self,
        lost: Collection[NodeName],
        timeout_s: float,
        *,
        listen: Callable[[], None],
        told_to_end: Callable[[], bool],
    ) -> bool:
        """Wait until lost nodes are back (True), or until the time is up or somebody ends us (False).

        Args:
            lost: the nodes.
            timeout_s: how long.
            listen: called again and again meanwhile; hears the agents.
            told_to_end: asked as often.
        """
        deadline = self._clock.monotonic() + timeout_s
        back_since: float | None = None
        asking: threading.Thread | None = None
        asked = self._clock.monotonic()
        while self._backend.can_requeue and self._clock.monotonic() < deadline:
            listen()
            if told_to_end():
                return False
            now = self._clock.monotonic()
            silence = self._fleet.silence()
            if all(silence[node].answer_s < self._doubt_s for node in lost):
                back_since = now if back_since is None else back_since
                if now - back_since >= BACK_S:
                    self._chronicle.event("back", "the lost nodes answer again", nodes=tuple(lost))
                    return True
            else:
                back_since = None
            if now - asked >= ASK_SLURM_S and (asking is None or not asking.is_alive()):
                asked = now
                asking = threading.Thread(target=self._requeue_if_down, args=(tuple(lost),), daemon=True)
                asking.start()
            self._clock.sleep(TICK_S)
        return False

    def _requeue_if_down(self, lost: Collection[NodeName]) -> None:
        if not self._asked and self._backend.requeue_if_down(lost):
            self._asked = True
            self._chronicle.event("requeue", "Slurm has given the lost nodes up: asked it to start the job again")
