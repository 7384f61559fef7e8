"""Ends a rank that has been fenced or whose lease has expired.

Each witness is asked from a thread of its own: a file system that does not answer holds up that thread alone.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TYPE_CHECKING

from deeplink.checkpoints.lease import Lease, LeaseState, pause
from deeplink.errors import DeepLinkError
from deeplink.plainrpc import PlainCallError
from deeplink.types import FencedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.checkpoints.liveness_sources import Witness
    from deeplink.clock import Clock

log = logging.getLogger(__name__)


def end_process(why: str) -> None:
    """End this process at once, with nothing flushed: what it would still write is not wanted."""
    sys.stderr.write(f"deeplink: this rank ends: {why}\n")
    sys.stderr.flush()
    os._exit(FencedError.exit_code)


class FencingGuard:
    """Asks the witnesses from threads of its own until the process ends or `stop` is called.

    Args:
        witnesses: whom to ask.
        lease: renewed by their answers.
        world: ranks that do the same.
        clock: where time comes from.
        last_resort: whom to ask besides, once the others have been silent for a third of the lease.
        end: called once, from a thread, with the reason; ends the process.
    """

    def __init__(
        self,
        witnesses: Sequence[Witness],
        lease: Lease,
        *,
        world: int,
        clock: Clock,
        last_resort: Sequence[Witness] = (),
        end: Callable[[str], None] = end_process,
    ) -> None:
        self.lease = lease
        self._witnesses, self._last_resort, self._clock, self._end = witnesses, last_resort, clock, end
        self._pause_s = pause(lease.length_s, world)
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin; the threads are daemons."""
        for witness in (*self._witnesses, *self._last_resort):
            threading.Thread(target=self._watch, args=(witness,), name="deeplink-witness", daemon=True).start()
        threading.Thread(target=self._judge, name="deeplink-lease", daemon=True).start()

    def stop(self) -> None:
        """Ask no more, and end nothing."""
        self._stopped.set()
        for witness in self._witnesses:
            witness.rest()

    def ask(self, witness: Witness) -> None:
        """Ask one witness, once; silence is none of its business."""
        try:
            by = witness.ask()
        except (OSError, DeepLinkError, PlainCallError, ValueError) as problem:
            log.debug("no answer from %s: %s", witness.name, problem)
            return
        with self._lock:
            if by:
                self.lease.fence(by)
            else:
                self.lease.renew(witness.name, self._clock.monotonic())

    def is_due(self, witness: Witness) -> bool:
        """Tell whether a witness is to be asked now."""
        if witness not in self._last_resort:
            return True
        with self._lock:
            return self._clock.monotonic() - self.lease.renewed > self.lease.length_s / 3

    def judge(self) -> bool:
        """End the process if it must; tell whether it may go on."""
        with self._lock:
            standing = self.lease.standing(self._clock.monotonic())
        if standing is LeaseState.HELD:
            return True
        if not self._stopped.is_set():
            self._stopped.set()
            self._end(self._reason(standing))
        return False

    def _reason(self, standing: LeaseState) -> str:
        if standing is LeaseState.FENCED:
            return f"attempt {self.lease.fenced_by} has taken over"
        silent = " and ".join(self.lease.witnesses)
        return f"cut off: {silent} did not answer for {self.lease.length_s:g} s"

    def _watch(self, witness: Witness) -> None:
        while not self._stopped.is_set():
            if self.is_due(witness):
                self.ask(witness)
            if self.lease.fenced_by:
                self.judge()
            self._stopped.wait(self._pause_s)

    def _judge(self) -> None:
        while self.judge():
            self._stopped.wait(self._pause_s / 4)


def guarded(
    witnesses: Sequence[Witness],
    length_s: float,
    *,
    world: int,
    clock: Clock,
    last_resort: Sequence[Witness] = (),
) -> FencingGuard:
    """Start a guard over this process and return it."""
    lease = Lease(length_s, clock.monotonic(), tuple(witness.name for witness in (*witnesses, *last_resort)))
    guard = FencingGuard(witnesses, lease, world=world, clock=clock, last_resort=last_resort)
    guard.start()
    return guard
