"""Where a rank's steps go: the parts add up, whatever was measured, and what torch's DataLoader waits is found."""

from __future__ import annotations

import functools
import threading
import time
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import data as torch_data
from torch.utils.data.dataloader import _BaseDataLoaderIter
from typing_extensions import override

from deeplink.core import process_metrics as names
from deeplink.training import timing
from deeplink.training.step_split import (
    CHECKPOINT,
    StepParts,
    StepSplit,
    parts_of,
    samples_in,
    time_loaders,
)
from deeplink.training.timing import StepMeter

SECONDS = st.floats(-1e3, 1e6, allow_nan=False)
Record = Callable[[str, object], None]


@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, st.none() | SECONDS, st.floats(0, 1e6))
def test_the_parts_of_a_step_add_up_to_it_and_none_is_negative(  # noqa: PLR0917 - as many as are measured
    step: float,
    data: float,
    others: float,
    checkpoint: float,
    sections: float,
    before: float | None,
    device: float,
) -> None:
    parts = parts_of(
        step,
        data_s=data,
        others_s=others,
        checkpoint_s=checkpoint,
        sections_s=sections,
        before_s=before,
        device_s=device,
    )
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(max(0.0, step), rel=1e-9, abs=1e-9)


def test_what_the_device_does_meanwhile_is_no_waiting_for_data() -> None:
    assert parts_of(10.0, data_s=6.0, device_s=9.0) == StepParts(data_s=1.0, compute_s=9.0)
    assert parts_of(10.0, data_s=6.0, device_s=2.0) == StepParts(data_s=6.0, compute_s=4.0)
    assert parts_of(10.0, data_s=2.0, before_s=5.0, device_s=4.0).rest_s == 4.0


class Time:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


STEPS = st.lists(
    st.tuples(
        *[st.floats(0, 100)] * 6,
        st.floats(-1e4, 1e4),  # a clock that is set meanwhile
        st.integers(0, 10),
    ),
    min_size=1,
    max_size=20,
)


@given(STEPS)
def test_steps_add_up_also_where_the_clock_jumps(steps: list[tuple[float, ...]]) -> None:
    now = Time()
    split = StepSplit(now)
    split.step_ended(0)
    began, jumped, number = now.at, False, 0
    for data, copying, forward, others, saving, evaluating, jump, more in steps:
        waits = now.at
        now.at += data
        split.data_waited(waits, 8)
        now.at += copying
        split.forward_began(now.at)
        now.at += forward
        if abs(jump) > 5000:
            now.at, jumped = now.at + jump, True
        split.others_s = others
        split.section(CHECKPOINT)
        now.at += saving
        split.section("evaluation")
        now.at += evaluating
        split.section("")
        number += int(more)
        split.step_ended(number)
    assert min(split.totals) >= 0
    if not jumped:
        assert sum(split.totals) == pytest.approx(now.at - began, rel=1e-6, abs=1e-6)
    else:  # a jump back is no time that was spent
        assert sum(split.totals) >= 0
    numbers = split.vitals()
    assert numbers[names.LOADED_SAMPLES] == 8 * len(steps)
    assert numbers[names.STEPS] >= len(steps)


def test_each_part_has_the_time_it_took() -> None:
    now = Time()
    split = StepSplit(now)
    assert split.vitals() == {}
    split.step_ended(10)
    for step in (20, 30):
        now.at += 1
        split.data_waited(now.at - 1, 4)
        now.at += 2  # to the device
        split.forward_began(now.at)
        now.at += 3
        split.data_waited(now.at - 0.5, 4)  # of a second batch
        split.forward_began(now.at)  # what is between two passes is computing
        now.at += 4
        split.others_s = 0.05  # of each of ten steps
        split.section(CHECKPOINT)
        now.at += 5
        split.section("")
        split.step_ended(step)
    assert split.totals == pytest.approx(StepParts(3.0, 2 * (6.5 - 0.5), 1.0, 10.0, 4.0))
    assert split.vitals()[names.STEPS] == 20
    assert split.vitals()[names.LOADED_SAMPLES] == 16


def test_a_section_that_lasts_over_several_reports_and_what_other_threads_do() -> None:
    now = Time()
    split = StepSplit(now)
    split.step_ended(0)
    split.section("evaluation")
    for step in (1, 2):
        now.at += 5
        split.data_waited(now.at - 1, 4)  # of the evaluation
        split.step_ended(step)
    assert split.totals == StepParts(rest_s=10.0)

    def elsewhere() -> None:
        split.section(CHECKPOINT)
        split.data_waited(0.0, 9)

    other = threading.Thread(target=elsewhere)
    other.start()
    other.join()
    split.section("")
    now.at += 1
    split.step_ended(3)
    assert split.totals == StepParts(compute_s=1.0, rest_s=10.0)
    assert split.vitals()[names.LOADED_SAMPLES] == 0


class Broken:
    def __len__(self) -> int:
        raise RuntimeError("no length yet")


class OddShape:
    shape = ("n", 3)

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(7, 2), 7),
        ([torch.zeros(3, 2), torch.zeros(3)], 3),
        ({"image": torch.zeros(5, 1), "label": torch.zeros(5)}, 5),
        ([b"one", b"two"], 2),
        ([[b"one", b"two", b"three"], torch.zeros(3)], 3),
        (("left", "right"), 2),
        (torch.tensor(1.0), 0),
        ([], 0),
        (None, 0),
        (b"bytes", 0),
        (
            UserDict({"ids": torch.zeros(5, 1), "mask": torch.zeros(5, 1)}),
            5,
        ),  # as BatchEncoding of transformers is
        (Broken(), 0),
        ([Broken()], 0),
        (OddShape(), 0),
    ],
)
def test_samples_of_a_batch(batch: object, count: int) -> None:
    assert samples_in(batch) == count


class Numbers(torch_data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    @override
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(2)


@pytest.fixture
def untimed() -> Iterator[None]:
    before, begin = _BaseDataLoaderIter.__next__, torch_data.DataLoader.__iter__
    yield
    _BaseDataLoaderIter.__next__ = before  # type: ignore[method-assign]
    torch_data.DataLoader.__iter__ = begin  # type: ignore[method-assign]


class Within(torch_data.IterableDataset[torch.Tensor]):
    """A dataset that reads another loader."""

    @override
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch_data.DataLoader(Numbers(), batch_size=None)


@pytest.mark.usefixtures("untimed")
def test_of_loaders_within_loaders_the_outermost_counts() -> None:
    split = StepSplit()
    time_loaders(split)
    split.step_ended(0)
    began = time.perf_counter()
    assert sum(len(batch) for batch in torch_data.DataLoader(Within(), batch_size=16)) == 64
    spent = time.perf_counter() - began
    split.step_ended(1)
    assert split.vitals()[names.LOADED_SAMPLES] == 64
    assert split._data_s + split.totals.data_s <= spent


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("keeps_names", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_other_tools_put_around_loaders_stays(keeps_names: bool, is_first: bool) -> None:
    split, calls = StepSplit(), []

    def wrap() -> None:
        inner: Any = _BaseDataLoaderIter.__next__

        def theirs(self: object) -> object:
            calls.append(self)
            return inner(self)

        made = functools.wraps(inner)(theirs) if keeps_names else theirs
        _BaseDataLoaderIter.__next__ = made  # type: ignore[method-assign]

    if is_first:
        wrap()
    time_loaders(split)
    if not is_first:
        wrap()
    time_loaders(split)
    split.step_ended(0)
    assert len(list(torch_data.DataLoader(Numbers(), batch_size=16))) == 4
    split.step_ended(1)
    assert len(calls) == 5, "the end, too"
    assert split.vitals()[names.LOADED_SAMPLES] == 64


@pytest.mark.usefixtures("untimed")
def test_no_batch_is_lost_to_what_cannot_be_counted() -> None:
    split = StepSplit()
    time_loaders(split)
    batches = torch_data.DataLoader(Numbers(), batch_size=16, collate_fn=lambda _: Broken())
    assert len(list(batches)) == 4


class Device:
    """A GPU's queue of work, emulated."""

    def __init__(self, now: Time) -> None:
        self.now, self.free_at = now, now.at

    def run(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.now.at) + seconds

    def wait(self) -> None:
        self.now.at = max(self.free_at, self.now.at)

    def mark(self) -> Mark:
        return Mark(self.now, max(self.free_at, self.now.at))


class Mark:
    """As torch.cuda.Event."""

    def __init__(self, now: Time, at: float) -> None:
        self._now, self.at = now, at

    def query(self) -> bool:
        return self.at <= self._now.at

    def elapsed_time(self, end: Mark) -> float:
        return (end.at - self.at) * 1e3


@pytest.mark.parametrize(("accum", "every"), [(1, 1), (8, 1), (1, 10), (8, 10), (3, 50)])
@pytest.mark.parametrize("is_fetched", [True, False])
def test_on_a_device_waiting_for_data_is_told_with_accumulation_and_rare_reports(
    accum: int, every: int, is_fetched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Time()
    device, split = Device(now), StepSplit(now)
    monkeypatch.setattr(timing, "_device_event", device.mark)
    meter = StepMeter(now, split=split)

    def shares(data: float, compute: float) -> StepParts:
        split.totals = StepParts()
        for step in range(1, 8 * every + 1):
            for _ in range(accum):
                began = split.wait_begins()
                now.at += data
                split.data_waited(began, 1)
                meter.forward_begins()
                meter.forward_ended()
                device.run(compute)
                if is_fetched:
                    device.wait()
            device.wait()  # a step's end
            if step % every == 0:
                meter.step_ended()
                split.step_ended(step)
            if step == every:  # the first one begins the time
                split.totals = StepParts()
        whole = sum(split.totals)
        return StepParts(*(part / whole for part in split.totals))

    meter.step_ended()
    split.step_ended(0)
    found = shares(0.9, 0.1)
    # Where no loss is fetched the device computes while the next batch is waited for.
    beside = 0.0 if is_fetched else 0.1 * (accum - 1) / accum
    assert found.data_s == pytest.approx(0.9, abs=0.02 + beside)
    assert found.data_s + found.compute_s == pytest.approx(1.0)
    assert shares(0.1, 0.9).data_s <= 0.11


def test_a_checkpoint_is_no_work_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Time()
    device, split = Device(now), StepSplit(now)
    monkeypatch.setattr(timing, "_device_event", device.mark)
    meter = StepMeter(now, split=split)
    split.step_ended(0)
    for step in range(1, 5):
        began = split.wait_begins()
        now.at += 3
        split.data_waited(began, 1)
        meter.forward_begins()
        device.run(1)
        device.wait()
        split.section(CHECKPOINT)
        now.at += 6
        split.section("")
        meter.step_ended()
        split.step_ended(step)
    assert split.totals == pytest.approx(StepParts(data_s=12, compute_s=4, checkpoint_s=24))


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("workers", [0, 2])
def test_plain_dataloaders_are_timed_once_also_those_made_before(workers: int) -> None:
    split = StepSplit()
    batches = iter(torch_data.DataLoader(Numbers(), batch_size=16, num_workers=workers))
    for _ in range(2):
        time_loaders(split)
    split.step_ended(0)
    began = time.perf_counter()
    assert sum(len(batch) for batch in batches) == 64
    spent = time.perf_counter() - began
    split.step_ended(1)
    assert split.vitals()[names.LOADED_SAMPLES] == 64
    assert 0 < split.totals.data_s <= spent
    began = time.perf_counter()
    again = iter(torch_data.DataLoader(Numbers(), batch_size=16, num_workers=workers))
    spent = time.perf_counter() - began
    before = split.totals.data_s
    split.step_ended(2)
    assert 0 < split.totals.data_s - before <= spent, "starting workers is waiting for data"
    assert split.vitals()[names.LOADED_SAMPLES] == 64
    assert next(again) is not None


def test_what_measuring_costs_a_step(record_property: Record) -> None:
    """Under half a percent of a step of 10 ms."""
    split = StepSplit()
    meter = StepMeter(split=split)
    batch = [torch.zeros(16, 2), torch.zeros(16)]
    costs = []
    for step in range(400):
        began = time.perf_counter()
        split.data_waited(split.now(), samples_in(batch))
        meter.wrapper_begins()
        meter.forward_begins()
        meter.forward_ended()
        meter.step_ended()
        split.step_ended(step)
        costs.append(time.perf_counter() - began)
        torch.zeros(1 << 16).sum()  # something else in the processor's caches
    middle = sorted(costs)[len(costs) // 2]
    record_property("cost of measuring a step (us)", middle * 1e6)
    assert middle < 0.005 * 0.01
