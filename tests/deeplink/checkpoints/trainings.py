"""Small trainings of every kind for tests of checkpoints, run by real ranks over gloo; each says what it lost."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from deeplink.checkpoints import Checkpoints
from tests.deeplink.checkpoints.test_multirank_save import leave

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SAVED_AT, STEPS = 3, 6


@dataclass
class Training:
    """One training: its parts, and what a step of it does.

    Attributes:
        parts: what is saved, in this order.
        models: which of them compute the loss, one after another.
        optimizers: which of them are stepped.
        before_step: called with the number of each step.
        saved_at: steps done when it is saved.
        spread: how it is saved.
    """

    parts: dict[str, Any]
    models: list[Any]
    optimizers: list[Any]
    before_step: Callable[[int], None] = lambda _step: None
    saved_at: int = SAVED_AT
    spread: Any = None
    after: list[Any] = field(default_factory=list)

    def step(self, number: int) -> float:
        from torch import distributed as dist

        self.before_step(number)
        world = dist.get_world_size()
        batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))[dist.get_rank() :: world]
        result = batch
        for model in self.models:
            result = model(result)
        loss = (result - batch.sum(1, keepdim=True)).pow(2).mean()
        scaler = self.parts.get("scaler")
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        (scaler.scale(loss) if scaler else loss).backward()
        for optimizer in self.optimizers:
            scaler.step(optimizer) if scaler else optimizer.step()
        if scaler:
            scaler.update()
        for part in self.after:
            part.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / world


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 1)
        self.second.weight = self.first.weight

    @override
    def forward(self, value: torch.Tensor) -> Any:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(value)))))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 1), nn.Linear(6, 1)

    @override
    def forward(self, value: torch.Tensor) -> Any:
        return self.used(value)


class Average:
    """A running mean of a loss's steps, which is no part of torch's."""

    def __init__(self) -> None:
        self.count, self.kept, self.by_step = 0, torch.zeros(3), {0: "none"}

    def step(self) -> None:
        self.count += 1
        self.kept += self.count
        self.by_step[self.count] = "done"

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "kept": self.kept, "by_step": self.by_step, "empty": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["empty"] == {}
        self.count, self.kept, self.by_step = state["count"], state["kept"], state["by_step"]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))


def sharded(model: nn.Module) -> Any:
    from torch.distributed.fsdp import fully_shard

    for child in model.children():
        if next(child.parameters(), None) is not None:
            fully_shard(child)
    return fully_shard(model)


def wrapped(model: nn.Module, **options: Any) -> Any:
    """Return it within the older FSDP, which keeps the parameters that optimizers know."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    each_layer = ModuleWrapPolicy({nn.Linear})
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, device_id=cpu, auto_wrap_policy=each_layer, **options)


def kept(model: nn.Module) -> Any:
    return wrapped(model, use_orig_params=True)


def replicated(model: nn.Module) -> Any:
    return nn.parallel.DistributedDataParallel(model)


def momentum(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.02)


def tensor_lr(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.02))


def simple(wrap: Any, make: Any, spread: Any = None) -> Training:
    model = wrap(layers())
    optimizer = make(model.parameters())
    return Training({"model": model, "optimizer": optimizer}, [model], [optimizer], spread=spread)


def everything() -> Training:
    model, head = sharded(nn.Sequential(nn.Linear(6, 7), nn.Tanh())), replicated(nn.Linear(7, 1))
    first, second = adamw(model.parameters()), momentum(head.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(first, [2, 4])
    average = Average()
    parts = {
        "model": model,
        "head": head,
        "optimizer": first,
        "second": second,
        "scheduler": scheduler,
        "average": average,
    }
    return Training(parts, [model, head], [first, second], after=[scheduler, average])


def scaled() -> Training:
    made = simple(sharded, adamw)
    made.parts["scaler"] = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    return made


def tied() -> Training:
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(Tied())
    optimizer = adamw(model.parameters())
    return Training({"model": model, "optimizer": optimizer}, [model], [optimizer])


def tied_replicas() -> Training:
    model = replicated(Tied())
    optimizer = momentum(model.parameters())
    return Training({"model": model, "optimizer": optimizer}, [model], [optimizer], spread="sharded")


def frozen() -> Training:
    model = sharded(layers())
    model[0].weight.requires_grad_(False)
    optimizer = adamw(model.parameters())

    def freeze(number: int) -> None:  # one that has a state by then, for a while
        model[2].weight.requires_grad_(number not in {2, 3})

    return Training({"model": model, "optimizer": optimizer}, [model], [optimizer], freeze)


def groups() -> Training:
    model = sharded(layers())
    made = [
        {"params": model[4].parameters(), "lr": 0.1, "weight_decay": 0.5},
        {"params": [*model[0].parameters(), *model[2].parameters()]},
    ]
    optimizer = adamw(made)
    return Training({"model": model, "optimizer": optimizer}, [model], [optimizer])


def two_optimizers() -> Training:
    model = sharded(layers())
    first, second = adamw(model[0].parameters()), momentum([*model[2].parameters(), *model[4].parameters()])
    return Training({"model": model, "first": first, "second": second}, [model], [first, second])


def two_models() -> Training:
    body, head = sharded(nn.Sequential(nn.Linear(6, 7), nn.Tanh())), sharded(nn.Linear(7, 1))
    optimizer = adamw([*body.parameters(), *head.parameters()])
    return Training({"body": body, "head": head, "optimizer": optimizer}, [body, head], [optimizer])


def not_stepped() -> Training:
    model = sharded(layers())
    optimizer = adamw(model.parameters())
    return Training({"optimizer": optimizer, "model": model}, [model], [optimizer], saved_at=0)


def compiled() -> Training:
    model: Any = torch.compile(sharded(layers()), backend="eager")
    optimizer = adamw(model.parameters())
    return Training({"model": model, "optimizer": optimizer}, [model], [optimizer])


def unused() -> Training:
    model = sharded(Unused())
    optimizer = adamw(model.parameters())
    return Training({"model": model, "optimizer": optimizer}, [model], [optimizer])


KINDS: dict[str, Callable[[], Training]] = {
    "ddp-momentum": lambda: simple(replicated, momentum),
    "ddp-adamw": lambda: simple(replicated, adamw),
    "ddp-sharded": lambda: simple(replicated, adamw, "sharded"),
    "fsdp-momentum": lambda: simple(sharded, momentum),
    "fsdp-adamw": lambda: simple(sharded, adamw),
    "fsdp-tensor-lr": lambda: simple(sharded, tensor_lr),
    "older-fsdp-momentum": lambda: simple(kept, momentum),
    "older-fsdp-adamw": lambda: simple(kept, adamw),
    "older-fsdp-flat": lambda: simple(wrapped, adamw),
    "fsdp-and-plain-parts": everything,
    "fsdp-scaler": scaled,
    "tied": tied,
    "tied-ddp": tied_replicas,
    "frozen": frozen,
    "groups": groups,
    "two-optimizers": two_optimizers,
    "two-models": two_models,
    "not-stepped": not_stepped,
    "compiled": compiled,
    "unused": unused,
}


CROSSED = (
    ("fsdp-adamw", "older-fsdp-adamw"),
    ("older-fsdp-flat", "fsdp-adamw"),
    ("ddp-sharded", "older-fsdp-flat"),
)
"""As which kind a training goes on, and which saved it."""


def joined(rank: int, world: int, meeting: str) -> None:
    from torch import distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "DEEPLINK_ATTEMPT": ""}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)


def made(kind: str) -> Training:
    torch.manual_seed(7)
    return KINDS[kind]()


def train(rank: int, world: int, meeting: str, folder: Path) -> None:
    """Train each kind to its end, saving it once in between; note each step's loss."""
    joined(rank, world, meeting)
    for kind in KINDS:
        noted: Any = []
        try:
            training = made(kind)
            with Checkpoints(folder / kind) as checkpoints:
                numbers = iter(range(STEPS))
                if not training.saved_at:
                    checkpoints.save_state(training.parts, step=0, spread="sharded", wait=True)
                    assert not training.parts["optimizer"].state
                steps = checkpoints.over(
                    numbers, every=training.saved_at or 100, spread=training.spread, **training.parts
                )
                for number in steps:
                    noted.append(training.step(number))
                    if number == STEPS - 1:
                        break
        except Exception as problem:  # noqa: BLE001 - one kind's failure is that kind's
            noted = repr(problem)
        _note(rank, folder / f"{kind}.trained.json", noted)
    leave()


def resume(rank: int, world: int, meeting: str, folder: Path) -> None:
    """Go on from what each kind saved, and some as another kind; note each step's loss."""
    joined(rank, world, meeting)
    for kind, saved in [*((kind, kind) for kind in KINDS), *CROSSED]:
        noted: Any = []
        try:
            training = made(kind)
            with Checkpoints(folder / saved, readonly=True) as checkpoints:
                checkpoints.resume(**training.parts)
            noted = [training.step(number) for number in range(training.saved_at, STEPS)]
        except Exception as problem:  # noqa: BLE001
            noted = repr(problem)
        by = f"by-{world}" if kind == saved else f"as-{kind}"
        _note(rank, folder / f"{saved}.resumed-{by}.json", noted)
    leave()


def _note(rank: int, path: Path, noted: Any) -> None:
    from torch import distributed as dist

    if rank == 0:
        path.write_text(json.dumps(noted))
    with suppress(RuntimeError):
        dist.barrier()
