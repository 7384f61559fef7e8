"""What a fault needs to know of a sandbox to be planned, as values; `looking` gathers them. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.scheduler.sandbox.processes import ProcessId


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A program as it was started, to be started so again.

    Attributes:
        env: its environment.
        log: the file its output went to; empty where that was none.
        uid: who it ran as.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    log: str = ""
    uid: int = 0
    gid: int = 0

    def packed(self) -> str:
        """Return it as one word."""
        return json.dumps(asdict(self))

    @classmethod
    def unpacked(cls, word: str) -> Self:
        """Read what `packed` wrote.

        Raises:
            ValueError, TypeError: it is something else.
        """
        raw = json.loads(word)
        return cls(**{**raw, "argv": tuple(raw["argv"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a fault finds.

    Attributes:
        target: the machine, the leaf or the folder it is to hit; empty where it hits all.
        ranks: processes of each rank on the target.
        daemon: the target's Slurm daemon.
        watchdogs: those on the target, each with how it was started.
        agents: the ports on which node agents listen, by machine.
        data_ports: those of them on the target at which samples are served.
        torn: the file to tear, and where the whole one is to be kept.
        mode: of the folder, octal; None where it holds no checkpoint.
        rank: which rank was asked for; None for the first one there.
        step: at which step, where the fault waits for one.
        always: whether it is to happen at each attempt.
        share: of the time that a slow rank stands still.
    """

    target: str = ""
    ranks: Mapping[int, tuple[ProcessId, ...]] = field(default_factory=dict)
    daemon: ProcessId | None = None
    watchdogs: tuple[tuple[ProcessId, Started], ...] = ()
    agents: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    data_ports: tuple[int, ...] = ()
    torn: tuple[str, str] | None = None
    mode: str | None = None
    rank: int | None = None
    step: int = 0
    always: bool = False
    share: float = 0.5
