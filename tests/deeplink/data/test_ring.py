"""Shared memory between workers and trainer: bounded, nothing lost, nothing written twice, whoever dies."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import numpy as np
import pytest

from deeplink.data.errors import BatchError
from deeplink.data.shared_batches import Ring, Ticket
from tests.pickled import copied
from tests.waiting import LIMIT_S

fork = multiprocessing.get_context("fork")


def serve(ring: Ring, orders: Connection) -> None:
    """Do as told: ("send", value, size) answers a ticket or None, ("drop",) claims and lets go, None ends."""
    kept: list[Any] = []
    while (order := orders.recv()) is not None:
        claimed = ring.claim(order[2] if order[0] == "send" else 8)
        if claimed is None:
            orders.send(None)
            continue
        slot, array = claimed
        if order[0] == "send":
            array[:] = order[1]
            orders.send(slot.send())
            kept.append(array)  # what a worker still has of a batch it sent does not matter
        else:
            del claimed, slot, array
            gc.collect()
            orders.send(ring.in_use())


class Worker:
    """A worker process and the way to it."""

    def __init__(self, ring: Ring, context: Any = fork) -> None:
        self.orders, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(ring, theirs))
        self.process.start()

    def ask(self, *order: Any) -> Any:
        self.orders.send(order)
        assert self.orders.poll(30)
        return self.orders.recv()

    def end(self) -> None:
        self.orders.send(None)
        self.process.join(LIMIT_S)
        self.orders.close()

    def kill(self) -> None:
        assert self.process.pid
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(LIMIT_S)
        self.orders.close()


def test_batches_cross_and_a_slot_is_free_again_when_nobody_refers_to_it() -> None:
    ring = Ring(1, 2, 4096)
    worker = Worker(ring)
    first = worker.ask("send", 7, 100).redeem()
    second = worker.ask("send", 8, 4096).redeem()
    assert (first.tolist(), set(second.tolist())) == ([7] * 100, {8})
    assert worker.ask("send", 9, 10) is None  # both slots are with us
    part = first[10:20]
    del first
    assert ring.in_use() == 2  # a part keeps the whole
    part[:] = 5
    del part
    assert ring.in_use() == 1
    third = worker.ask("send", 9, 10).redeem()
    assert third.tolist() == [9] * 10
    assert set(second.tolist()) == {8}
    worker.end()


def test_what_is_too_big_or_comes_from_the_trainer_itself_goes_another_way() -> None:
    ring = Ring(1, 2, 4096)
    assert ring.claim(10) is None
    worker = Worker(ring)
    assert worker.ask("send", 1, 4097) is None
    assert worker.ask("send", 1, 4096) is not None
    worker.end()


def test_a_batch_that_is_let_go_of_before_it_is_sent_leaves_its_slot_free() -> None:
    worker = Worker(Ring(1, 1, 4096))
    assert worker.ask("drop") == 0
    assert worker.ask("drop") == 0
    worker.end()


def test_workers_have_stripes_of_their_own_and_one_too_many_has_none() -> None:
    ring = Ring(2, 1, 4096)
    workers = [Worker(ring) for _ in range(3)]
    tickets = [worker.ask("send", number, 8) for number, worker in enumerate(workers)]
    assert sorted(ticket.slot for ticket in tickets[:2]) == [0, 1]
    assert tickets[2] is None
    assert [ticket.redeem().tolist() for ticket in tickets[:2]] == [[0] * 8, [1] * 8]
    for worker in workers:
        worker.end()


def test_a_killed_workers_slots_are_taken_over_but_for_those_that_the_trainer_holds() -> None:
    ring = Ring(1, 2, 4096)
    first = Worker(ring)
    held = first.ask("send", 1, 8).redeem()
    lost = first.ask("send", 2, 8)
    first.kill()
    second = Worker(ring)
    fresh = second.ask("send", 3, 8)
    assert fresh is not None
    with pytest.raises(BatchError, match="overwritten"):
        lost.redeem()
    assert fresh.redeem().tolist() == [3] * 8
    assert held.tolist() == [1] * 8
    second.end()


def test_a_ticket_of_a_ring_that_is_gone_is_refused() -> None:
    with pytest.raises(BatchError):
        Ticket("0" * 16, 0, 1, 8).redeem()


def test_a_forked_childs_copy_of_a_batch_does_not_free_the_slot() -> None:
    ring = Ring(1, 1, 4096)
    worker = Worker(ring)
    holder = [worker.ask("send", 1, 8).redeem()]
    pid = os.fork()
    if pid == 0:
        holder.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert ring.in_use() == 1
    assert worker.ask("send", 2, 8) is None
    holder.clear()
    assert ring.in_use() == 0
    worker.end()


def test_a_spawned_worker_is_given_the_ring() -> None:
    ring = Ring(1, 2, 4096)
    worker = Worker(ring, multiprocessing.get_context("spawn"))
    assert worker.ask("send", 4, 8).redeem().tolist() == [4] * 8
    worker.end()


def test_a_pickled_ring_is_none_and_an_impossible_one_an_error() -> None:
    assert copied(Ring(1, 1, 1)) is None
    with pytest.raises(BatchError, match="MiB of shared memory"):
        Ring(1, 1, 1 << 60)


def test_a_ring_that_is_big_enough_is_known() -> None:
    ring = Ring(2, 3, 5000)
    assert ring.slot_bytes == 8192
    assert ring.fits(2, 3, 8192)
    assert not any(ring.fits(*more) for more in [(3, 3, 1), (2, 4, 1), (2, 3, 8193)])


def test_the_memory_is_given_back_with_the_last_reference() -> None:
    before = set(os.listdir("/proc/self/fd"))
    ring = Ring(1, 1, 1 << 20)
    array = np.frombuffer(ring._memory, np.uint8)
    assert set(os.listdir("/proc/self/fd")) > before
    del ring
    gc.collect()
    assert array[0] == 0
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1  # the mapping holds one of its own
    del array
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_an_error_told_by_a_signal_is_not_lost_while_a_batch_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(1, 2, 4096)
    worker = Worker(ring)
    batch = worker.ask("send", 7, 100).redeem()
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)

    def tell(frame: FrameType, event: str, argument: object) -> None:
        """Raise in whatever Python code runs while the batch is let go, as a signal's handler would."""
        if event == "call":
            raise RuntimeError(f"a worker has died: {frame.f_code.co_name}")

    sys.setprofile(tell)
    del batch
    sys.setprofile(None)
    assert not lost
    assert ring.in_use() == 0
    worker.end()
