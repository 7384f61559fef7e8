"""`deeplink.section` and `deeplink.timed`: what a rank says of itself besides steps."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

import deeplink
from deeplink.checkpoints import Checkpoints
from deeplink.core.clock import SystemClock
from deeplink.core.types import Attempt
from deeplink.scheduler.node.rank_processes import ASKING
from deeplink.training import progress
from deeplink.training.progress import Destination, Reporter, _Report, measure_with
from deeplink.training.step_split import CHECKPOINT
from deeplink.training.timing import KEPT, StepMeter, time_ddp
from deeplink.v1 import node_pb2
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator


class Heard(Reporter):
    """A reporter that sends nothing: what it would send is kept."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Destination(agent="", token_file=folder / "token", attempt=Attempt(1, 0, 0), rank=2))
        self.said: list[_Report] = []
        self._thread = True  # type: ignore[assignment] # never started

    @override
    def _hand_over(self) -> None:
        super()._hand_over()
        if self._waiting is not None:
            self.said.append(_Report(*self._waiting))

    def told(self) -> list[tuple[str, int]]:
        return [(said.section, said.step) for said in self.said]


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    made = Heard(tmp_path)
    process = progress._Process()
    process.made, process.reporter = True, made
    monkeypatch.setattr(progress, "_process", process)
    yield made
    measure_with(None)


def test_entry_and_exit_are_told_and_before_the_first_step_it_is_setup(heard: Heard) -> None:
    with deeplink.section("setup"):
        pass
    with deeplink.section("evaluation"):
        pass
    deeplink.report(step=41)
    with deeplink.section("evaluation"):
        deeplink.report(step=41, accuracy=0.5)
    deeplink.report(step=42)
    assert heard.told() == [
        ("setup", 0),
        ("setup", 0),
        ("evaluation", 0),
        ("setup", 0),
        ("", 41),
        ("evaluation", 41),
        ("evaluation", 41),
        ("", 41),
        ("", 42),
    ]


def test_of_nested_sections_the_innermost_counts_and_an_error_leaves_it(heard: Heard) -> None:
    deeplink.report(step=1)
    with pytest.raises(ArithmeticError), deeplink.section("outer"), deeplink.section("inner"):
        raise ArithmeticError
    assert [section for section, _ in heard.told()] == ["", "outer", "inner", "outer", ""]


def test_sections_that_end_out_of_turn_leave_the_others_alone(heard: Heard) -> None:
    deeplink.report(step=1)
    first, second = deeplink.section("first"), deeplink.section("second")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert [section for section, _ in heard.told()] == ["", "first", "second", "second", ""]


def test_the_metrics_of_the_last_step_stay_with_it(heard: Heard) -> None:
    deeplink.report(step=1, loss=0.5)
    with deeplink.section("checkpoint"):
        assert heard.said[-1].metrics == {"loss": 0.5}


def test_a_checkpoint_is_a_section_by_itself(heard: Heard, tmp_path: Path) -> None:
    deeplink.report(step=1)
    with Checkpoints(tmp_path / "c") as checkpoints:
        with checkpoints.save(step=1) as folder:
            assert heard.told()[-1] == (CHECKPOINT, 1)
            (folder / "state").write_text("x")
        assert heard.told()[-1] == ("", 1)
        checkpoints.save_state({"a": torch.zeros(3)}, step=2)
    assert heard.told()[-1] == ("", 1)
    assert {section for section, _ in heard.told()} == {"", "checkpoint"}


def test_the_message_says_who_it_is(heard: Heard) -> None:
    deeplink.report(step=3, work_s=0.25)
    with deeplink.section("mine"):
        sent = node_pb2.ReportRequest.FromString(heard._message(heard.said[-1])).progress
    assert (sent.pid, sent.section, sent.work_s, sent.step, sent.rank) == (os.getpid(), "mine", 0.25, 3, 2)


@pytest.mark.parametrize("name", ["", "x" * 65])
def test_a_name_that_cannot_be_told_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="characters"):
        deeplink.section(name)


def test_outside_of_a_job_it_does_nothing() -> None:
    program = "import deeplink\nwith deeplink.section('evaluation'):\n    print('inside')"
    env = {name: value for name, value in os.environ.items() if not name.startswith("DEEPLINK_")}
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "inside\n", "")


def test_who_has_the_signal_keeps_it(tmp_path: Path) -> None:
    program = f"""
import pathlib, signal
from deeplink.training.progress import answer_in
signal.signal({ASKING}, lambda *_: None)
print(answer_in(pathlib.Path({str(tmp_path)!r})))
"""
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout == "False\n", done.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_no_trouble(tmp_path: Path) -> None:
    # In a process of its own: this one may answer already.
    program = "import pathlib, deeplink.training.progress as a\n"
    program += f"print(a.answer_in(pathlib.Path({str(tmp_path / 'none')!r})))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.stdout == "False\n", done.stderr


def test_a_signals_handler_may_report_in_the_middle_of_a_report(heard: Heard) -> None:
    with heard._lock:  # the training loop's thread has it
        deeplink.report(step=7)
    assert heard.told() == [("", 7)]


class Ticking:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_own_work_ends_with_the_forward_pass() -> None:
    clock, took = Ticking(), 0.0
    meter = StepMeter(clock)
    assert meter.step_ended() == 0.0
    for _ in range(KEPT):
        clock.now += 0.3  # loading
        meter.forward_begins()
        clock.now += 0.2
        meter.forward_ended()
        clock.now += 9.0  # backward, and waiting for others in it
        took = meter.step_ended()
    assert took == pytest.approx(0.5)


def test_with_several_forward_passes_it_ends_with_the_last_and_one_slow_step_changes_nothing() -> None:
    clock, took = Ticking(), 0.0
    meter = StepMeter(clock)
    meter.step_ended()
    for step in range(KEPT):
        for _ in range(2):
            meter.forward_begins()
            clock.now += 50.0 if step == 3 else 0.1
            meter.forward_ended()
        clock.now += 1.0
        took = meter.step_ended()
    assert took == pytest.approx(0.2)


def test_a_step_without_a_forward_pass_is_not_counted() -> None:
    clock = Ticking()
    meter = StepMeter(clock)
    for _ in range(3):
        clock.now += 5.0
        assert meter.step_ended() == 0.0


class Capturing:
    """A GPU, in the midst of capturing a graph; asking it for a mark is an error."""

    class cuda:  # noqa: N801 - torch's name
        @staticmethod
        def is_initialized() -> bool:
            return True

        @staticmethod
        def is_current_stream_capturing() -> bool:
            return True


def test_a_forward_pass_that_is_captured_in_a_graph_gets_no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticking()
    meter = StepMeter(clock)
    meter.step_ended()
    monkeypatch.setitem(sys.modules, "torch", Capturing)
    meter.forward_begins()
    clock.now += 0.2
    meter.forward_ended()
    assert meter.step_ended() == pytest.approx(0.2)


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_a_model_of_ddp_is_timed_by_itself_and_two_are_not(heard: Heard, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        one = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        another = DistributedDataParallel(nn.Linear(2, 2))
        time_ddp()
        assert not one.module._forward_hooks
        assert not another.module._forward_hooks
        del another
        gc.collect()
        for step in range(1, 4):
            one(torch.zeros(2, 2)).sum().backward()
            deeplink.report(step=step)
        assert one.module._forward_hooks
        assert heard.said[-1].work_s > 0
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_is_timed_and_a_wrapped_one_inside(heard: Heard) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        @override
        def forward(self, given: torch.Tensor) -> Any:
            SystemClock().sleep(0.02)  # waiting for others
            return self.module(given)

    inner = nn.Linear(2, 2)
    model = deeplink.timed(Wrapper(inner))
    for step in range(1, 4):
        model(torch.zeros(1, 2))
        deeplink.report(step=step)
    assert inner._forward_hooks
    assert not model._forward_hooks
    assert 0 < heard.said[-1].work_s < 0.02, "what the wrapper waits for is left out"


def test_a_loop_that_measures_its_own_work_is_told_all_else_as_well(heard: Heard) -> None:
    ended: list[int] = []

    def step_ended() -> float:
        ended.append(1)
        return 7.0

    measure_with(step_ended)
    deeplink.report(step=1, work_s=0.25)
    deeplink.report(step=2)
    assert len(ended) == 2, "it says how long others were waited for"
    assert [said.work_s for said in heard.said] == [0.25, 7.0]
