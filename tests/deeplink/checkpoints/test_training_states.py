"""Saves in the background: training waits for the copy alone, and whatever fails is told."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from deeplink.checkpoints import (
    CheckpointError,
    Checkpoints,
    CheckpointWriteError,
    FencedError,
    NoStateError,
    NotFiniteError,
    UnreadableStateError,
    tensors,
)
from deeplink.core.types import Attempt
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST, SECOND = Attempt(17, 0, 0), Attempt(17, 0, 1)


@pytest.fixture(autouse=True)
def outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPLINK_ATTEMPT", raising=False)


class Gate:
    """Holds background writes up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        write = tensors.write_state

        def held(state: Any, path: Path) -> None:
            self.reached.set()
            assert self.opened.wait(LIMIT_S)
            write(state, path)

        monkeypatch.setattr(tensors, "write_state", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "claims")


def stored(checkpoints: Checkpoints) -> tuple[int, Any] | None:
    found = checkpoints.latest()
    return None if found is None else (found.step, found.load())


def test_what_is_saved_is_what_it_was_when_the_call_returned(tmp_path: Path, gate: Gate) -> None:
    weights = torch.arange(5.0)
    with Checkpoints(tmp_path, attempt=FIRST) as checkpoints:
        assert checkpoints.save_state({"model": {"w": weights, "note": [1, "a"]}}, step=3, meta={"k": 1})
        assert gate.reached.wait(LIMIT_S)
        assert names(tmp_path)[0].startswith(".draft-")
        weights += 100
        gate.opened.set()
        checkpoints.wait()
        found = checkpoints.latest()
    assert found is not None
    assert (found.step, found.attempt, found.meta, found.world) == (3, FIRST, {"k": 1}, 1)
    assert found.load()["model"]["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert found.load()["model"]["note"] == [1, "a"]


def test_the_memory_of_the_copy_is_used_again_and_follows_the_state(tmp_path: Path) -> None:
    copy = tensors.HostCopy()
    first = copy.take({"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int64)})
    place = first["a"].data_ptr()
    again = copy.take({"a": torch.full((3,), 2.0), "b": torch.ones(2, dtype=torch.int64)})
    assert again["a"].data_ptr() == place
    assert again["a"].tolist() == [2.0, 2.0, 2.0]
    grown = copy.take({"a": torch.full((4, 2), 3.0), "empty": torch.empty(0), "one": torch.tensor(7)})
    assert grown["a"].tolist() == [[3.0, 3.0]] * 4
    assert grown["empty"].numel() == 0
    assert grown["one"].item() == 7


def test_tied_weights_are_saved_once_and_views_apart() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    taken = tensors.HostCopy().take({"x": base, "tied": base, "column": base[:, 1], "row": base[1]})
    assert taken["x"] is taken["tied"]
    assert taken["column"].tolist() == [1.0, 5.0, 9.0]
    assert taken["row"].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_views_that_share_memory_but_not_values_are_saved_apart() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    taken = tensors.HostCopy().take(
        {"x": numbers, "conj": numbers.conj(), "neg": numbers.conj().imag, "im": numbers.imag}
    )
    assert taken["x"].tolist() == [1 + 2j, 3 - 4j]
    assert taken["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert (taken["im"].tolist(), taken["neg"].tolist()) == ([2.0, -4.0], [-2.0, 4.0])


@pytest.mark.filterwarnings("ignore")  # torch's own, about kinds of tensors that it is giving up
def test_sparse_and_quantised_tensors_are_saved_as_they_are(tmp_path: Path) -> None:
    eye = torch.eye(3)
    state = {
        "sparse": eye.to_sparse(),
        "rows": eye.to_sparse_csr(),
        "quantised": torch.quantize_per_tensor(eye, 0.5, 0, torch.qint8),
        "plain": eye,
    }
    checkpoints = Checkpoints(tmp_path, attempt=FIRST)
    checkpoints.save_state({"all": state}, step=1, wait=True)
    _, loaded = stored(checkpoints) or (0, {})
    for name, tensor in state.items():
        got = loaded["all"][name]
        assert (got.layout, got.dtype) == (tensor.layout, tensor.dtype)
        assert torch.equal(got.dequantize() if got.is_quantized else got.to_dense(), eye)


def test_tensors_that_wrap_others_are_not_taken_for_one_another(tmp_path: Path) -> None:
    # As low-bit optimizers' states are: none has memory of its own, and data_ptr() is 0 for each.
    one, two = (TwoTensor(torch.full((3,), value), torch.full((3,), value)) for value in (1.0, 2.0))  # type: ignore[no-untyped-call]
    checkpoints = Checkpoints(tmp_path, attempt=FIRST)
    with pytest.raises(UnreadableStateError, match=r"^moments\.one of the state is a .*TwoTensor"):
        checkpoints.save_state({"moments": {"one": one, "two": two}}, step=1, wait=True)
    with torch.serialization.safe_globals([TwoTensor, getattr]):
        checkpoints.save_state({"moments": {"one": one, "two": two}}, step=1, wait=True)
        _, loaded = stored(checkpoints) or (0, {})
    assert [loaded["moments"][name].a.tolist() for name in ("one", "two")] == [[1.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("spread", ["alone", "sharded"])
def test_a_model_without_memory_is_neither_saved_nor_loaded_into(tmp_path: Path, spread: Any) -> None:
    # torch copies into a tensor of the meta device without a word.
    empty = torch.nn.Linear(2, 2, device="meta")
    checkpoints = Checkpoints(tmp_path, attempt=FIRST)
    with pytest.raises(CheckpointError, match="'model' has tensors on the meta device"):
        checkpoints.save_state({"model": empty}, step=1, spread=spread)
    checkpoints.save_state({"model": torch.nn.Linear(2, 2)}, step=1, spread=spread, wait=True)
    with pytest.raises(CheckpointError, match="'model' has tensors on the meta device"):
        checkpoints.resume(model=empty)
    checkpoints.resume(model=empty.to_empty(device="cpu"))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_is_loaded_under_the_names_that_wrappers_give_it(tmp_path: Path, wrapped: bool) -> None:
    def model(*, is_wrapped: bool) -> torch.nn.Module:
        inner = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        whole: Any = torch.compile(inner, backend="eager") if is_wrapped else inner
        return (
            torch.nn.ModuleDict({"module": whole}) if is_wrapped else inner
        )  # as DistributedDataParallel names it

    saved, other = model(is_wrapped=wrapped), model(is_wrapped=not wrapped)
    checkpoints = Checkpoints(tmp_path, attempt=FIRST)
    checkpoints.save_state({"model": saved}, step=1, wait=True)
    checkpoints.resume(model=other)
    pairs = zip(saved.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    with pytest.raises(RuntimeError, match="Missing key"):
        checkpoints.resume(model=torch.nn.ModuleDict({"module": torch.nn.Linear(2, 3)}))


def test_a_module_whose_state_has_numbers_for_keys_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(1, 1)
    loaded: list[Any] = []
    monkeypatch.setattr(model, "state_dict", lambda: {0: 2.0})
    monkeypatch.setattr(model, "load_state_dict", loaded.append)
    checkpoints = Checkpoints(tmp_path, attempt=FIRST)
    checkpoints.save_state({"model": model}, step=1, wait=True)
    monkeypatch.setattr(model, "state_dict", lambda: {1: 3.0})
    checkpoints.resume(model=model)
    assert loaded == [{0: 2.0}]


def test_a_value_that_cannot_be_copied_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnreadableStateError, match=r"is a builtins\.generator"):
        Checkpoints(tmp_path).save_state({"model": torch.nn.Linear(1, 1).parameters()}, step=1)


@pytest.mark.parametrize("best", [np.float64(3.0), np.ones(2), Path("x")])
def test_what_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path: Path, best: Any) -> None:
    checkpoints = Checkpoints(tmp_path, attempt=FIRST)
    with pytest.raises(UnreadableStateError, match=r"^loop\.best of the state is a "):
        checkpoints.save_state({"loop": {"step": 1, "best": best}}, step=1, wait=True)
    assert checkpoints.latest() is None
    checkpoints.save_state({"loop": {"best": best}}, step=2, wait=True, any_object=True)
    assert checkpoints.latest() is not None


@pytest.mark.parametrize("waiting", ["wait", "skip"])
def test_one_save_at_a_time_and_the_next_waits_or_is_skipped(tmp_path: Path, gate: Gate, waiting: Any) -> None:
    checkpoints = Checkpoints(tmp_path, attempt=FIRST, waiting=waiting)
    state = {"w": torch.ones(2)}
    assert checkpoints.save_state(state, step=1)
    assert gate.reached.wait(LIMIT_S)
    assert checkpoints.is_saving
    if waiting == "skip":
        assert not checkpoints.save_state(state, step=2)
        gate.opened.set()
        checkpoints.close()
        assert names(tmp_path) == ["step-0000000001.a1"]
        return
    second = threading.Thread(target=lambda: checkpoints.save_state({"w": torch.full((2,), 2.0)}, step=2))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    gate.opened.set()
    second.join(LIMIT_S)
    checkpoints.close()
    assert names(tmp_path) == ["step-0000000001.a1", "step-0000000002.a1"]
    # The second's copy did not go where the first's still was.
    assert [tensors.read_state(path / "state.pt")["w"].tolist() for path in sorted(tmp_path.glob("step-*"))] == [
        [1.0, 1.0],
        [2.0, 2.0],
    ]


def test_a_failure_in_the_background_is_raised_by_the_next_call_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, attempt=FIRST)
    checkpoints.save_state({"w": torch.ones(1)}, step=1, wait=True)

    def torn(_state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tensors, "write_state", torn)
        checkpoints.save_state({"w": torch.ones(1)}, step=2)
        while checkpoints.is_saving:
            pass
    assert "No space left" in caplog.text
    with pytest.raises(CheckpointWriteError, match="No space left"):
        checkpoints.save_state({"w": torch.ones(1)}, step=3)
    assert names(tmp_path) == ["step-0000000001.a1"]
    checkpoints.save_state({"w": torch.ones(1)}, step=4)
    checkpoints.close()
    assert names(tmp_path) == ["step-0000000001.a1", "step-0000000004.a1"]


def test_closing_raises_what_failed_and_the_blocks_own_error_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_state: Any, _path: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(tensors, "write_state", broken)
    with (
        pytest.raises(CheckpointWriteError, match="Input/output"),
        Checkpoints(tmp_path, attempt=FIRST) as checkpoints,
    ):
        checkpoints.save_state({"w": torch.ones(1)}, step=1)
    with pytest.raises(KeyError), Checkpoints(tmp_path, attempt=SECOND) as checkpoints:
        checkpoints.save_state({"w": torch.ones(1)}, step=1)
        raise KeyError("mine")


def test_a_newer_attempt_fences_a_save_that_is_under_way(tmp_path: Path, gate: Gate) -> None:
    old = Checkpoints(tmp_path, attempt=FIRST)
    old.save_state({"w": torch.ones(1)}, step=1)
    assert gate.reached.wait(LIMIT_S)
    assert Checkpoints(tmp_path, attempt=SECOND).latest() is None
    gate.opened.set()
    with pytest.raises(FencedError) as fenced:
        old.close()
    assert fenced.value.newest == SECOND
    assert names(tmp_path) == []


def test_what_is_not_finite_is_named_or_refused_or_not_looked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {
        "model": {"good": torch.ones(3), "bad": torch.tensor([1.0, float("nan")]), "n": torch.arange(3)},
        "optimizer": [{"mask": torch.full((2,), float("-inf"))}],
        "large": torch.full((4,), 3e38),  # its float32 sum overflows, it does not
        "half": torch.full((9,), 6e4, dtype=torch.float16),
    }
    with Checkpoints(tmp_path / "a", attempt=FIRST) as noting:
        noting.save_state(state, step=1)
        found = noting.latest()
    assert found is not None
    assert found.nonfinite == {"model.bad": "nan", "optimizer.0.mask": "inf"}
    assert "not finite: model.bad (nan), optimizer.0.mask (inf)" in caplog.text
    refusing = Checkpoints(tmp_path / "b", attempt=FIRST, finite="refuse")
    refusing.save_state({"w": torch.ones(1)}, step=1)
    refusing.save_state(state, step=2)
    with pytest.raises(NotFiniteError, match=r"step 2 is not saved: model\.bad \(nan\)") as refused:
        refusing.close()
    assert set(refused.value.tensors) == {"model.bad", "optimizer.0.mask"}
    assert stored(refusing) == (1, {"w": torch.ones(1)})
    with Checkpoints(tmp_path / "c", attempt=FIRST, finite="off") as careless:
        careless.save_state(state, step=1)
        found = careless.latest()
    assert found is not None
    assert not found.nonfinite


def test_random_numbers_go_on_where_they_stood(tmp_path: Path) -> None:
    import numpy as np

    def draw() -> tuple[float, float, list[float]]:
        return random.random(), float(np.random.rand()), torch.rand(3).tolist()  # noqa: NPY002, S311

    with Checkpoints(tmp_path, attempt=FIRST) as checkpoints:
        checkpoints.save_state({"w": torch.ones(1)}, step=1)
        expected = draw()
        found = checkpoints.latest()
    assert found is not None
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    found.restore()
    assert draw() == expected
    found.restore(rank=3)  # it saved none: they are left alone
    found.restore(random=False)


class Part:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_parts_get_their_states_back_and_the_samplers_lies_in_the_manifest(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, attempt=FIRST) as checkpoints:
        parts = {"model": Part({"w": torch.ones(2)}), "sampler": Part({"epoch": 1, "done": 7})}
        checkpoints.save_state(parts, step=1, meta={"digest": [1]})
        found = checkpoints.latest()
    assert found is not None
    assert found.meta == {"digest": [1], "sampler": {"epoch": 1, "done": 7}}
    model, sampler = Part(None), Part(None)
    found.restore(model=model, sampler=sampler)
    assert model.state["w"].tolist() == [1.0, 1.0]
    assert sampler.state == {"epoch": 1, "done": 7}
    with pytest.raises(KeyError, match="no state of 'optimizer'"):
        found.restore(optimizer=Part(None))
    with pytest.raises(TypeError, match="load_state_dict"):
        found.restore(model=object())
    with pytest.raises(CheckpointError, match="meta is not JSON"):
        checkpoints.save_state({"sampler": Part({"x": object()})}, step=2)


@pytest.mark.parametrize("spread", ["alone", "sharded"])
def test_a_fact_besides_may_have_the_name_of_a_part(tmp_path: Path, spread: Any) -> None:
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    with Checkpoints(tmp_path, attempt=FIRST) as checkpoints:
        meta = {"model": {"name": "linear"}, "digest": {"epochs": 3}}
        checkpoints.save_state({"model": model}, step=1, meta=meta, spread=spread)
        found = checkpoints.latest()
    assert found is not None
    digest = Part(None)
    found.restore(model=other, digest=digest)
    assert torch.equal(other.weight, model.weight)
    assert digest.state == {"epochs": 3}
    with pytest.raises(KeyError, match="no state of 'optimizer'"):
        found.restore(model=other, optimizer=Part(None))


def test_a_checkpoint_saved_another_way_says_so(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, attempt=FIRST).save(step=1) as draft:
        (draft / "mine.bin").write_bytes(b"x")
    found = Checkpoints(tmp_path).latest()
    assert found is not None
    with pytest.raises(NoStateError, match=r"no state\.pt"):
        found.load()


def test_wrong_words_are_refused_at_once(tmp_path: Path) -> None:
    wrong: Any = "sometimes"
    wrong_step: Any = 2.0
    with pytest.raises(ValueError, match="sometimes"):
        Checkpoints(tmp_path, finite=wrong)
    with pytest.raises(ValueError, match="sometimes"):
        Checkpoints(tmp_path, waiting=wrong)
    checkpoints = Checkpoints(tmp_path, attempt=FIRST)
    with pytest.raises(ValueError, match="sometimes"):
        checkpoints.save_state({}, step=1, spread=wrong)
    with pytest.raises(ValueError, match="-1"):
        checkpoints.save_state({}, step=-1)
    model: Any = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"a dict of parts by name .* not Linear"):
        checkpoints.save_state(model, step=1)
    with pytest.raises(TypeError, match="'float' object"):
        checkpoints.save_state({}, step=wrong_step)
    skipping = Checkpoints(tmp_path, attempt=FIRST, waiting="skip")
    with pytest.raises(ValueError, match="different steps"):
        skipping.save_state({}, step=1, spread="each")
    with pytest.raises(CheckpointError, match="readonly=True"):
        Checkpoints(tmp_path, readonly=True).save_state({}, step=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_a_step_may_be_a_number_of_numpys_or_torchs(tmp_path: Path, kind: Any) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save_state({}, step=kind(3), wait=True)
        assert stored(checkpoints) == (3, {})


@pytest.mark.timeout(LIMIT_S)
def test_a_file_in_the_folders_place_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(CheckpointError, match="is no folder"), Checkpoints(path).save(step=1):
            raise AssertionError
        with pytest.raises(CheckpointError, match="is no folder"):
            Checkpoints(path).latest()


def test_a_folder_that_another_wrote_is_taken_in_and_may_go_at_once(tmp_path: Path) -> None:
    written = tmp_path / "out" / "checkpoint-7"
    (written / "sub").mkdir(parents=True)
    (written / "sub" / "a.bin").write_bytes(b"aa")
    (written / "b.bin").write_bytes(b"b")
    checkpoints = Checkpoints(tmp_path / "c", attempt=FIRST)
    checkpoints.adopt(written, step=7)
    (written / "b.bin").unlink()
    checkpoints.close()
    found = checkpoints.latest()
    assert found is not None
    assert (found.path / "sub" / "a.bin").read_bytes() == b"aa"
    assert (found.path / "b.bin").read_bytes() == b"b"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-7"]


def test_a_fork_in_the_middle_of_a_save_does_not_wait_for_its_parents(tmp_path: Path, gate: Gate) -> None:
    checkpoints = Checkpoints(tmp_path, attempt=FIRST)
    checkpoints.save_state({"w": torch.ones(1)}, step=1)
    assert gate.reached.wait(LIMIT_S)
    background = checkpoints._states.background
    background._process = os.getpid() - 1  # as a child sees it
    assert not checkpoints.is_saving
    background.wait()


def mounted(disk: Path, size: str) -> Path:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True, timeout=LIMIT_S)
    return disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = mounted(tmp_path / "disk", "512k")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True, timeout=LIMIT_S)


def test_a_disk_that_fills_up_in_the_background_leaves_the_last_checkpoint(small_disk: Path) -> None:
    checkpoints = Checkpoints(small_disk, attempt=FIRST)
    checkpoints.save_state({"w": torch.ones(10)}, step=1)
    checkpoints.save_state({"w": torch.ones(1 << 18)}, step=2)
    with pytest.raises(CheckpointWriteError, match="No space left") as refused:
        checkpoints.close()
    assert "room" in refused.value.remedy
    assert names(small_disk) == ["step-0000000001.a1"]
    found = stored(Checkpoints(small_disk, attempt=SECOND))
    assert found is not None
    assert found[0] == 1


def test_a_disk_that_turns_read_only_is_a_clear_error(small_disk: Path) -> None:
    checkpoints = Checkpoints(small_disk, attempt=FIRST)
    checkpoints.save_state({"w": torch.ones(10)}, step=1, wait=True)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True, timeout=LIMIT_S)
    checkpoints.save_state({"w": torch.ones(10)}, step=2)
    with pytest.raises(CheckpointWriteError, match="Read-only"):
        checkpoints.close()
    found = stored(Checkpoints(small_disk))
    assert found is not None
    assert found[0] == 1


SCRIPT = """
import os, signal, sys, threading, torch
from deeplink.checkpoints import Checkpoints, tensors
write = tensors.write_state
def slow(state, path):
    print("writing", flush=True)
    sys.stdin.readline()
    write(state, path)
tensors.write_state = slow
checkpoints = Checkpoints(sys.argv[1], attempt=None)
checkpoints.save_state({"w": torch.ones(3)}, step=int(sys.argv[2]), random=False)
print("training", flush=True)
if sys.argv[3] == "loop":
    threading.Event().wait(60)
"""


def script(folder: Path, step: int, then: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(step), then],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = {process.stdout.readline().strip(), process.stdout.readline().strip()}
    assert said == {"writing", "training"}, process.stderr.read() if process.stderr else ""
    return process


@pytest.mark.slow
def test_a_process_that_ends_finishes_its_save_and_one_that_is_killed_leaves_none(tmp_path: Path) -> None:
    ending = script(tmp_path, 1, "end")
    _, said = ending.communicate("\n", timeout=LIMIT_S)
    assert (ending.returncode, said) == (0, "")
    interrupted = script(tmp_path, 2, "loop")
    interrupted.send_signal(2)
    _, said = interrupted.communicate("\n", timeout=LIMIT_S)
    assert interrupted.returncode != 0
    assert "KeyboardInterrupt" in said
    killed = script(tmp_path, 3, "loop")
    killed.kill()
    killed.communicate(timeout=LIMIT_S)
    found = stored(Checkpoints(tmp_path))
    assert found is not None
    assert found[0] == 2
    assert any(name.startswith(".draft-step-0000000003") for name in names(tmp_path))
    with Checkpoints(tmp_path, attempt=FIRST) as after:  # whose next save removes what the dead one left
        after.save_state({"w": torch.ones(1)}, step=4)
    assert not any(name.startswith(".draft-") for name in names(tmp_path))
