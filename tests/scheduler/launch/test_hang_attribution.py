"""Who hangs, and who only waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.types import NodeName
from deeplink.scheduler.launch.hang_attribution import Blame, RankPlace, blame, deadlock, main_frames, summary

REDUCING = (
    "all_reduce (distributed_c10d.py)",
    "wrapper (c10d_logger.py)",
    "step (train.py)",
    "<module> (train.py)",
)
BACKWARD = ("_engine_run_backward (graph.py)", "backward (_tensor.py)", "step (train.py)", "<module> (train.py)")
READING = ("read (storage.py)", "step (train.py)", "<module> (train.py)")
COMPUTING = ("forward (model.py)", "step (train.py)", "<module> (train.py)")


def where(rank: int, frames: tuple[str, ...] = REDUCING, state: str = "S", step: int | None = 7) -> RankPlace:
    return RankPlace(rank=rank, node=NodeName(f"n{rank}"), state=state, frames=frames, step=step)


CASES = {
    "one is stopped": ([where(0), where(1, state="T"), where(2)], [1]),
    "a stopped one counts before one that is in the kernel": (
        [where(0), where(1, state="T"), where(2, state="D"), where(3)],
        [1],
    ),
    "one is gone": ([where(0), where(1, (), ""), where(2)], [1]),
    "one is stuck in the kernel": ([where(0), where(1, state="D"), where(2)], [1]),
    "most are stopped": ([where(0), where(1, state="T"), where(2, state="T")], [1, 2]),
    "most have ended, and one is still at it": ([where(0, READING), where(1, (), ""), where(2, (), "Z")], []),
    "storage holds most": ([where(0), where(1, state="D"), where(2, state="D")], []),
    "all are stuck in the kernel": ([where(rank, state="D") for rank in range(3)], []),
    "one of two is in no collective": ([where(0), where(1, READING)], [1]),
    "two of four are in no collective": ([where(0), where(1, READING), where(2), where(3, COMPUTING)], [1, 3]),
    "most are in no collective": ([where(0), where(1, READING), where(2, READING)], [0]),
    "the end of the backward pass is one, too": ([where(0, BACKWARD), where(1, BACKWARD), where(2, READING)], [2]),
    "one is elsewhere than all others": ([where(0, COMPUTING), where(1, READING), where(2, COMPUTING)], [1]),
    "two places, of two each": ([where(rank, (COMPUTING, READING)[rank % 2]) for rank in range(4)], []),
    "everybody is at one place": ([where(rank) for rank in range(4)], []),
    "one is steps behind": ([where(0), where(1, step=3), where(2)], [1]),
    "one is one step behind, as it may be": ([where(0), where(1, step=6), where(2)], []),
    "nothing is known": ([where(rank, (), step=None) for rank in range(3)], []),
    "nobody": ([], []),
}


@pytest.mark.parametrize(("ranks", "odd"), CASES.values(), ids=CASES.keys())
def test_whom_the_others_wait_for(ranks: list[RankPlace], odd: list[int]) -> None:
    found = blame(ranks)
    assert [one.rank for one in found.ranks] == odd
    assert bool(found.why) == bool(odd)
    assert found.nodes == tuple(f"n{rank}" for rank in odd)


LOADING = ("_try_get_data (dataloader.py)", "step (train.py)", "<module> (train.py)")
KERNELS = ("futex_wait_queue",)
DEADLOCKS = {
    "the one that the others wait for does nothing": ([where(0), where(1, READING), where(2)], {0, 1, 2}, [1]),
    "the others may spin": ([where(0), where(1, READING), where(2)], {1}, [1]),
    "it works": ([where(0), where(1, READING), where(2)], {0, 2}, []),
    "it waits for its data": ([where(0), where(1, LOADING), where(2)], {0, 1, 2}, []),
    "it waits in the kernel": ([where(0), where(1, READING, "D"), where(2)], {0, 1, 2}, []),
    "all wait for storage": ([where(rank, READING) for rank in range(3)], {0, 1, 2}, []),
    "most do nothing, elsewhere": ([where(0), where(1, READING), where(2, READING)], {0, 1, 2}, []),
    "only the kernel tells where it is": ([where(0), where(1, KERNELS), where(2)], {0, 1, 2}, []),
    "one has ended": ([where(0), where(1, READING), where(2, (), "")], {0, 1}, []),
    "of one nothing is known": ([where(0), where(1, READING)], {0, 1}, []),
}


@pytest.mark.parametrize(("ranks", "idle", "odd"), DEADLOCKS.values(), ids=DEADLOCKS.keys())
def test_who_does_nothing_while_the_others_wait(ranks: list[RankPlace], idle: set[int], odd: list[int]) -> None:
    found = deadlock(ranks, idle, 3)
    assert [one.rank for one in found.ranks] == odd
    assert bool(found.why) == bool(odd)


def test_where_all_wait_for_each_other_nobody_is_to_blame() -> None:
    ranks = [where(0), where(1, BACKWARD)]
    assert deadlock(ranks, {0, 1}, 2).why.startswith("every rank waits for the others in ")
    assert deadlock(ranks, {0}, 2) == Blame(), "who spins may be computing"


def test_it_is_said_in_a_line() -> None:
    ranks = [where(0), where(1, READING), where(2)]
    assert summary(ranks, blame(ranks)) == (
        "rank 1 on n1 is in read (storage.py), 2 others in all_reduce (distributed_c10d.py)"
    )
    same = [where(0), where(1)]
    assert (
        summary(same, blame(same))
        == "no rank differs from the others: 2 ranks in all_reduce (distributed_c10d.py)"
    )
    assert not summary([], Blame())


frames = st.sampled_from([REDUCING, BACKWARD, READING, COMPUTING, ()])
ranks = st.builds(where, st.integers(0, 99), frames, st.sampled_from("RSDTtZ"), st.none() | st.integers(0, 9))


@given(st.lists(ranks, unique_by=lambda one: one.rank))
def test_never_all_are_to_blame(ranks: list[RankPlace]) -> None:
    found = blame(ranks)
    assert len(found.ranks) < max(1, len(ranks))
    assert set(found.ranks) <= set(ranks)


PY_SPY = """Process 14: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 15 (idle): "Thread-1 (forward)"
    forward (hang.py:5)
Thread 14 (idle): "MainThread"
    wait (threading.py:324)
    <lambda> (/home/a (b)/train.py:9)
    <module> (train.py:10)
"""
FAULTHANDLER = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f02 (most recent call first):
  File "/home/a b/train.py", line 9 in forward
  File "/home/a b/train.py", line 10 in <module>
"""
KERNEL = """stopped (T): it was told to by a signal, and cannot answer
thread 14 (python): T in do_signal_stop
    [<0>] do_signal_stop+0x16f/0x210
thread 15 (a ) b): T in futex_wait
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (PY_SPY, ("wait (threading.py)", "<module> (train.py)")),
        (FAULTHANDLER, ("forward (train.py)", "<module> (train.py)")),
        (KERNEL, ("do_signal_stop",)),
        ("there is no such process", ()),
        ("", ()),
    ],
)
def test_the_main_threads_frames(text: str, found: tuple[str, ...]) -> None:
    assert main_frames(text)[0:1] == found[0:1]
    assert main_frames(text)[-1:] == found[-1:]


@given(st.text())
def test_any_text_has_frames_or_none(text: str) -> None:
    assert all(isinstance(frame, str) for frame in main_frames(f"Thread 1\n{text}"))
