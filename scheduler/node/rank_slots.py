"""The processes that wait on this node for ranks to run, and what has become of the ranks.

A slot is a task of a step of Slurm's (`deeplink.scheduler.launch.slot`). It connects to the agent's Unix socket
and says at each change what it runs; the agent says what it is to run: one line of JSON each time, either way.
What slots say is all there is to know, so an agent that is started again hears it anew.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import struct
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from deeplink.core.types import Attempt
from deeplink.rpc.channel import attempt_from_wire
from deeplink.scheduler.node.rank_processes import ProcessTable, SlotReport, agents_socket, tagged
from deeplink.v1 import node_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deeplink.core.clock import Clock

log = logging.getLogger(__name__)

MOST_SLOTS = 1024  # connections at once
LONGEST_LINE = 1 << 16
RETURN_S = 2.0  # a slot that is gone may only have lost its connection
FENCED_GRACE_S = 0.5  # ranks that a newer attempt has followed get so long between TERM and KILL
MOST_WAIT_S = 5.0
ACCEPT_AGAIN_S = 1.0
_KILLED = 128 + signal.SIGKILL


@dataclass(eq=False)
class _Slot:
    """A connected slot, and what it was told."""

    connection: socket.socket
    said: SlotReport
    started: str = ""  # the attempt whose rank it was told to run
    ends: str = ""  # the attempt whose rank it was told to end

    def end(self, grace_s: float) -> None:
        """Have it end its rank, where it was not told to."""
        if self.ends != self.said.attempt:
            self.ends = self.said.attempt
            self.tell(end=grace_s)

    def tell(self, **order: Any) -> None:
        """Send an order; a slot that does not even take so little is as good as gone."""
        try:
            self.connection.send(json.dumps(order).encode() + b"\n", socket.MSG_DONTWAIT)
        except OSError:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True)
class _Order:
    """What the launcher wants of the newest attempt."""

    attempt: Attempt
    step: int
    launch: str
    ranks: tuple[int, ...]
    signalled: int = 0  # the last signal that was passed on
    end: bool = False
    grace_s: float = FENCED_GRACE_S
    gone: dict[int, SlotReport] = field(default_factory=dict)  # the last words of slots that are gone, by number


class RankSlots:
    """The slots of this node. Thread-safe; what it is asked waits no longer than `MOST_WAIT_S`."""

    def __init__(self, clock: Clock, table: ProcessTable | None = None) -> None:
        self._clock, self._table = clock, table or ProcessTable()
        self._changed = threading.Condition()
        self._version = int(clock.unix() * 1000)  # an agent that is started again must not repeat one
        self._order: _Order | None = None
        self._slots: list[_Slot] = []
        self._listener: socket.socket | None = None
        self._closed = threading.Event()

    def listen(self, folder: Path) -> None:
        """Let slots come, at a socket in this folder, which no other user may enter."""
        self._listener = socket.socket(socket.AF_UNIX)
        with agents_socket(folder) as path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108 - that of an agent before
            self._listener.bind(path)
        self._listener.listen(MOST_SLOTS)
        threading.Thread(target=self._accept, name="deeplink-slots", daemon=True).start()

    def close(self) -> None:
        """Let no more come; those that are there look for the next agent."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
            listeners = [] if self._listener is None else [self._listener]
            for one in (*listeners, *(slot.connection for slot in self._slots)):
                with contextlib.suppress(OSError):  # it has gone already
                    one.shutdown(socket.SHUT_RDWR)
            for one in listeners:
                one.close()

    def ranks(self, request: node_pb2.RanksRequest) -> node_pb2.RanksReply:
        """Have what is asked for done; return what has become of it once that is news, or the wait is over."""
        with self._changed:
            self._take(request)
            self._apply()
            wait_s = min(request.wait_s, MOST_WAIT_S)
            self._changed.wait_for(lambda: self._version != request.known or self._closed.is_set(), wait_s)
            return self._reply(attempt_from_wire(request.attempt))

    def fence(self, newest: Attempt, *, over: bool = False) -> None:
        """End the ranks of attempts before this one; once the run is over, have all slots leave."""
        with self._changed:
            if self._order is not None and self._order.attempt < newest:
                self._order.end = True
            for one in self._slots:
                if over:
                    one.tell(leave=True)
                elif one.said.is_running and Attempt.parse(one.said.attempt) < newest:
                    one.end(FENCED_GRACE_S)

    def keep_output(self) -> None:
        """Have the slots that are there keep what their ranks write: the srun of their step is gone."""
        with self._changed:
            for one in self._slots:
                one.tell(keep=True)

    def _take(self, request: node_pb2.RanksRequest) -> None:
        attempt, before = attempt_from_wire(request.attempt), self._order
        if before is None or attempt > before.attempt:
            self._order = _Order(attempt, request.step, request.launch, tuple(request.ranks))
            self._version += 1
        order = self._order
        if order is None or attempt < order.attempt:
            return
        if request.step != order.step:
            order.step, order.gone = request.step, {}
            self._version += 1
        # A question that comes late must not undo what a later one asked for.
        if request.end and (not order.end or request.grace_s < order.grace_s):
            order.end, order.grace_s = True, request.grace_s
            for one in self._slots:
                one.ends = ""
        for passed in request.signals:
            if passed.id > order.signalled:
                order.signalled = passed.id
                for slot in self._of(order):
                    slot.tell(signal=passed.number)

    def _of(self, order: _Order) -> Iterator[_Slot]:
        """Yield the slots that run, or ran, a rank of this attempt."""
        return (
            one
            for one in self._slots
            if one.said.step == order.step and str(order.attempt) in {one.said.attempt, one.started}
        )

    def _apply(self) -> None:
        """Tell each slot what it has not been told."""
        order = self._order
        if order is None:
            return
        name = str(order.attempt)
        for one in self._slots:
            is_chosen = one.said.step == order.step and one.said.slot < len(order.ranks)
            if is_chosen and name not in {one.said.attempt, one.started} and not order.end:
                if one.said.slot not in order.gone:
                    one.started = name
                    one.tell(attempt=name, launch=order.launch, rank=order.ranks[one.said.slot])
            elif one.said.is_running and self._is_to_end(order, one):
                one.end(order.grace_s)

    def _is_to_end(self, order: _Order, slot: _Slot) -> bool:
        # One attempt may have begun in two steps: a launcher that is started again may take the other one.
        if order.end or slot.said.attempt != str(order.attempt) or slot.said.step != order.step:
            return True
        # What a rank leaves behind may serve the others here, as a daemon does: until all of them have exited.
        said = self._said(order)
        return len(said) == len(order.ranks) and all(one.code is not None for one in said.values())

    def _said(self, order: _Order) -> dict[int, SlotReport]:
        """Return what is known of this attempt's ranks, by slot."""
        running = {one.said.slot: one.said for one in self._of(order) if one.said.attempt == str(order.attempt)}
        return {**order.gone, **running}

    def _reply(self, attempt: Attempt) -> node_pb2.RanksReply:
        order, now = self._order, self._clock.monotonic()
        if order is None or order.attempt != attempt:
            return node_pb2.RanksReply(version=self._version)
        there = [one.said for one in self._slots if one.said.step == order.step]
        return node_pb2.RanksReply(
            version=self._version,
            slots=len({one.slot for one in there}),
            step_id=max((one.step_id + 1 for one in there), default=0),
            ranks=[_state(one, now) for _, one in sorted(self._said(order).items())],
        )

    def _accept(self) -> None:
        while self._listener is not None and not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as problem:
                if not self._closed.is_set():  # no descriptor is free, say; slots that come wait meanwhile
                    log.warning("slots cannot connect: %s", problem)
                    self._closed.wait(ACCEPT_AGAIN_S)
                continue
            if len(self._slots) >= MOST_SLOTS or not _is_ours(connection):
                connection.close()
                continue
            threading.Thread(target=self._hear, args=(connection,), name="deeplink-slot", daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        slot: _Slot | None = None
        with connection, connection.makefile("rb") as lines:
            try:
                while line := lines.readline(LONGEST_LINE):
                    slot = self._heard(connection, slot, SlotReport.of(line))
            except (OSError, ValueError, TypeError) as problem:
                log.info("a slot's connection: %s", problem)
        if slot is not None:
            self._part_with(slot)

    def _heard(self, connection: socket.socket, slot: _Slot | None, said: SlotReport) -> _Slot:
        with self._changed:
            if slot is None:
                slot = _Slot(connection, said)
                self._slots.append(slot)
                if self._order is not None and self._order.step == said.step:
                    self._order.gone.pop(said.slot, None)
            slot.said = said
            self._apply()
            self._tell_waiting()
            return slot

    def _tell_waiting(self) -> None:
        self._version += 1
        self._changed.notify_all()

    def _part_with(self, slot: _Slot) -> None:
        with self._changed:
            self._slots.remove(slot)
            if not slot.said.is_running:
                self._keep(slot.said)
            self._tell_waiting()
        if not slot.said.is_running:
            return
        self._clock.sleep(RETURN_S)
        with self._changed:
            if self._closed.is_set() or any(one.said.pid == slot.said.pid for one in self._slots):
                return
        for pid in tagged(self._table, slot.said.tag):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        log.warning("slot %d, which ran rank %d, is gone", slot.said.slot, slot.said.rank)
        code, now = slot.said.code, self._clock.monotonic()
        with self._changed:
            self._keep(replace(slot.said, ended=True, code=_KILLED if code is None else code, exited=now))
            self._apply()
            self._tell_waiting()

    def _keep(self, last: SlotReport) -> None:
        """Keep the last words of a slot."""
        order = self._order
        if order is not None and (str(order.attempt), order.step) == (last.attempt, last.step):
            order.gone[last.slot] = last


def _state(said: SlotReport, now: float) -> node_pb2.RankState:
    return node_pb2.RankState(
        rank=said.rank,
        pid=said.rank_pid,
        exited=said.code is not None,
        code=said.code or 0,
        exited_ago_s=0.0 if said.code is None else max(0.0, now - said.exited),
        ended=said.ended,
        out_of_memory=said.out_of_memory,
        unstarted=said.unstarted,
    )


def _is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(uid == os.geteuid())
