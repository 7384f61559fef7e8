"""Sharded checkpoints hold torch's own names, and are loaded whole or refused in words."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deeplink.checkpoints import (
    Checkpoint,
    Checkpoints,
    NoModelError,
    NoStateError,
    ShardedStateError,
    UnreadableStateError,
    tensors,
)
from tests.deeplink.checkpoints import trainings
from tests.deeplink.checkpoints.test_multirank_save import leave
from tests.deeplink.checkpoints.test_resuming import run
from tests.waiting import LIMIT_S


@pytest.fixture(autouse=True)
def outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPLINK_ATTEMPT", raising=False)


class Part:
    """A part that takes what it knows."""

    def __init__(self, state: dict[str, Any], known: set[str] | None = None) -> None:
        self.state, self.known = state, known

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = {key: value for key, value in state.items() if self.known is None or key in self.known}


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(folder: Path, **parts: Any) -> Checkpoint:
    with Checkpoints(folder) as checkpoints:
        checkpoints.save_state(parts, step=1, spread="sharded")
        found = checkpoints.latest()
    assert found is not None
    return found


@pytest.fixture
def trained(tmp_path: Path) -> Checkpoint:
    model = trainings.layers()
    optimizer = trainings.adamw(model.parameters())
    stepped(model, optimizer)
    return saved(tmp_path / "c", model=model, optimizer=optimizer, note=Part({"a": 1, "b": {3: "x"}}))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def refused(found: Checkpoint, match: str, **parts: Any) -> None:
    models = [part for part in parts.values() if isinstance(part, nn.Module)]
    before = [weights(model) for model in models]
    with pytest.raises(NoStateError, match=match):
        found.restore(**parts)
    for model, kept in zip(models, before, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(weights(model), kept, strict=True))


def test_a_model_that_asks_for_more_or_less_than_was_saved_is_refused_and_nothing_handed_out(
    trained: Checkpoint,
) -> None:
    more, less, other = trainings.layers(), trainings.layers(), trainings.layers()
    more.append(nn.Linear(1, 1))
    del less[4]
    other[4] = nn.Linear(5, 2)
    refused(trained, r"'model' asks for 5.bias, 5.weight, not saved", model=more)
    refused(trained, r"of 'model' was saved 4.bias, 4.weight, not asked for", model=less)
    refused(trained, r"model.4.weight has shape \(2, 5\), saved was \(1, 5\)", model=other)


def test_an_optimizer_that_is_not_the_one_saved_is_refused_and_nothing_handed_out(trained: Checkpoint) -> None:
    model = trainings.layers()
    some = trainings.adamw([*model.parameters()][2:])
    grouped = trainings.adamw([{"params": [one]} for one in model.parameters()])
    refused(trained, "of 'optimizer' was saved 0.bias, 0.weight, not asked for", model=model, optimizer=some)
    refused(trained, "'optimizer' were in other groups", model=model, optimizer=grouped)
    momentum = trainings.momentum(model.parameters())
    refused(trained, "'optimizer' asks for dampening, momentum, nesterov", model=model, optimizer=momentum)
    with pytest.raises(NoModelError, match="'optimizer' has parameters of no model"):
        trained.restore(optimizer=some)
    assert not some.state
    assert not grouped.state


def test_a_part_that_does_not_take_what_it_is_handed_is_named(trained: Checkpoint) -> None:
    taken, ignoring = Part({}), Part({}, {"a"})
    trained.restore(note=taken)
    assert taken.state == {"a": 1, "b": {3: "x"}}
    with pytest.raises(NoStateError, match=r"'note' did not take note\.b"):
        trained.restore(note=ignoring)
    with pytest.raises(KeyError, match="no state of 'other'; it has model, note, optimizer"):
        trained.restore(other=Part({}))
    with pytest.raises(TypeError, match="'note' has no load_state_dict"):
        trained.restore(note={})


def test_an_optimizer_saved_by_number_as_before_is_refused_and_its_model_is_loaded(tmp_path: Path) -> None:
    model = trainings.layers()
    optimizer = trainings.adamw(model.parameters())
    stepped(model, optimizer)
    # As `state_dict()` has it, which is what was saved before names were.
    numbered: Any = optimizer.state_dict()
    numbered["state"] = {str(number): values for number, values in numbered["state"].items()}
    found = saved(tmp_path, model=dict(model.state_dict()), optimizer=numbered)
    fresh = trainings.layers()
    refused(found, "earlier version", model=fresh, optimizer=trainings.adamw(fresh.parameters()))
    found.restore(model=fresh)
    assert all(torch.equal(one, other) for one, other in zip(weights(fresh), weights(model), strict=True))


def test_saving_before_the_first_step_leaves_the_optimizer_as_it_is(tmp_path: Path) -> None:
    model = trainings.layers()
    optimizer = torch.optim.LBFGS(model.parameters())  # torch cannot make its state by a step of its own
    found = saved(tmp_path, optimizer=optimizer, model=model)
    assert not optimizer.state
    found.restore(model=model, optimizer=optimizer)
    assert not optimizer.state


def test_a_learning_rate_that_is_a_tensor_is_restored(tmp_path: Path) -> None:
    def tensor_lr(rate: float, model: nn.Module) -> torch.optim.Optimizer:
        halves = [{"params": [*model.parameters()][:2]}, {"params": [*model.parameters()][2:]}]
        return torch.optim.AdamW(halves, lr=torch.tensor(rate))

    model, fresh = trainings.layers(), trainings.layers()
    optimizer, other = tensor_lr(1e-3, model), tensor_lr(0.5, fresh)
    stepped(model, optimizer)
    found = saved(tmp_path, model=model, optimizer=optimizer)
    found.restore(model=fresh, optimizer=other)
    for group in other.param_groups:
        assert isinstance(group["lr"], torch.Tensor)
        assert group["lr"].item() == pytest.approx(1e-3)
    stepped(model, optimizer)
    stepped(fresh, other)
    assert all(torch.equal(one, two) for one, two in zip(weights(fresh), weights(model), strict=True))


def test_milestones_keep_their_numbers(tmp_path: Path) -> None:
    model = trainings.layers()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(trainings.momentum(model.parameters()), [2, 2, 5])
    for number, spread in enumerate(("alone", "sharded")):
        with Checkpoints(tmp_path / spread) as checkpoints:
            how: Any = spread
            checkpoints.save_state({"scheduler": scheduler}, step=number, spread=how)
            found = checkpoints.latest()
        assert found is not None
        fresh = torch.optim.lr_scheduler.MultiStepLR(trainings.momentum(model.parameters()), [1])
        found.restore(scheduler=fresh)
        assert fresh.milestones == Counter({2: 2, 5: 1})
        assert isinstance(fresh.milestones, Counter)


def test_what_could_not_be_read_again_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_state({"note": Part({"deep": {"path": tmp_path}})}, step=1, spread="sharded")
    with pytest.raises(UnreadableStateError, match=r"note\.deep\.path"):
        checkpoints.close()


def test_what_shards_in_another_way_is_refused(tmp_path: Path) -> None:
    engine = type("ZeroOptimizer", (Part,), {"__module__": "deepspeed.runtime.zero"})({})
    for spread in ("alone", "first", "each", "sharded"):
        how: Any = spread
        with pytest.raises(ShardedStateError, match=r"'part': .*\(DeepSpeed\)"):
            Checkpoints(tmp_path).save_state({"part": engine}, step=1, spread=how)


STRANGER = """
import sys
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

folder, whole = sys.argv[1:]
assert not any(name.split(".")[0] == "deeplink" for name in sys.modules)
layers = torch.nn.Sequential(
    torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
moments = {name: {"exp_avg": torch.zeros_like(value)} for name, value in layers.state_dict().items()}
state = {"model": layers.state_dict(), "optimizer": {"state": moments}, "note": {"a": 0}}
checkpoint.load(state, checkpoint_id=folder, no_dist=True)
dcp_to_torch_save(folder, whole)
all_of_it = torch.load(whole, weights_only=True)
assert all(torch.equal(value, all_of_it["model"][name]) for name, value in state["model"].items())
assert all(torch.equal(value["exp_avg"], all_of_it["optimizer"]["state"][name]["exp_avg"])
           for name, value in moments.items())
assert state["note"]["a"] == 1
"""


def test_anybody_reads_the_files_by_names_without_deeplink(trained: Checkpoint, tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    command = [sys.executable, "-W", "ignore", "-c", STRANGER, str(trained.path), str(whole)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * LIMIT_S, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    everything = torch.load(whole, weights_only=True)
    model, optimizer = trainings.layers(), everything["optimizer"]
    model.load_state_dict(everything["model"])
    assert optimizer["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    fresh = trainings.layers()
    trained.restore(model=fresh)
    assert all(torch.equal(one, other) for one, other in zip(weights(fresh), weights(model), strict=True))


def test_names_are_the_same_compiled_or_not(tmp_path: Path) -> None:
    compiled: Any = torch.compile(trainings.layers(), backend="eager")
    optimizer = trainings.adamw(compiled.parameters())
    stepped(compiled, optimizer)
    found = saved(tmp_path, model=compiled, optimizer=optimizer)
    plain = trainings.layers()
    other = trainings.adamw(plain.parameters())
    found.restore(model=plain, optimizer=other)
    assert all(torch.equal(one, two) for one, two in zip(weights(plain), weights(compiled), strict=True))
    assert [values["step"].item() for values in other.state.values()] == [1.0] * 6
    Checkpoints(tmp_path, readonly=True).resume(model=compiled, optimizer=optimizer)


def misused(rank: int, world: int, meeting: str, folder: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    trainings.joined(rank, world, meeting)
    made = trainings.made("fsdp-adamw")
    for spread in ("alone", "first", "each"):
        how: Any = spread
        for name in ("model", "optimizer"):
            with Checkpoints(folder / spread) as checkpoints, pytest.raises(ShardedStateError, match=name):
                checkpoints.save_state({name: made.parts[name]}, step=1, spread=how)
    steps = Checkpoints(folder / "over").over(iter([]), every=1, spread="first", **made.parts)
    with pytest.raises(ShardedStateError, match="each rank has a part"):
        next(steps)
    whole = trainings.layers()
    with Checkpoints(folder / f"whole-{rank}") as checkpoints:
        checkpoints.save_state({"model": whole}, step=1)
        found = checkpoints.latest()
    assert found is not None
    with pytest.raises(NoStateError, match="it is not sharded, and model is"):
        found.restore(model=made.parts["model"])
    # A sharded optimizer of torch's own kind says itself that one rank's state is not all.
    model = trainings.replicated(trainings.layers())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    stepped(model, optimizer)
    checkpoints = Checkpoints(folder / "zero")
    for spread in ("each", "sharded"):
        how = spread
        with pytest.raises(RuntimeError, match="has not been consolidated"):
            checkpoints.save_state({"model": model, "optimizer": optimizer}, step=1, spread=how)
    leave()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_shard_is_never_saved_as_if_it_were_all(tmp_path: Path) -> None:
    run(misused, 2, tmp_path)


def save_wrapped(rank: int, world: int, meeting: str, folder: Path) -> None:
    trainings.joined(rank, world, meeting)
    model = trainings.kept(trainings.layers())
    optimizer = trainings.adamw(model.parameters())
    stepped(model, optimizer)
    with Checkpoints(folder / "c") as checkpoints:
        checkpoints.save_state({"model": model, "optimizer": optimizer}, step=1, spread="sharded", wait=True)
    leave()


@pytest.mark.slow
def test_a_model_in_the_older_fsdp_is_saved(tmp_path: Path) -> None:
    run(save_wrapped, 2, tmp_path)
    assert Checkpoints(tmp_path / "c", readonly=True).latest() is not None


def save_in_shards(rank: int, world: int, meeting: str, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    trainings.joined(rank, world, meeting)
    mesh = init_device_mesh("cpu", (world,))
    states = {"weight": distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]), "best": 1.0}
    written: list[Any] = []
    save = torch.save

    def noted(value: Any, file: Any) -> None:
        written.append(value)
        save(value, file)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "save", noted)
        tensors.refuse_unreadable(states)
        with pytest.raises(UnreadableStateError, match=r"^path of the state is a "):
            tensors.refuse_unreadable({**states, "path": folder})
    assert not any(tensors.holds_shards(value) for value in written)
    leave()


@pytest.mark.slow
def test_shards_are_not_written_to_see_whether_they_can_be_read(tmp_path: Path) -> None:
    run(save_in_shards, 1, tmp_path)
