"""The laboratory: does a fault to a sandbox, keeps in mind what is in effect, and takes it away again."""

from __future__ import annotations

import json
import os
import random
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2s
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.core.codec import from_row
from deeplink.core.publish import write_text
from deeplink.scheduler.testbed import processes, state
from deeplink.scheduler.testbed.errors import NotRunningError, SandboxError
from deeplink.scheduler.testbed.lab import hands
from deeplink.scheduler.testbed.lab import scene as looking
from deeplink.scheduler.testbed.lab.faults import fault_of
from deeplink.scheduler.testbed.lab.scene import Fault, FaultStep, FaultTarget, Scene, Verb, no_target
from deeplink.scheduler.testbed.processes import ProcessId
from deeplink.scheduler.testbed.shape import CTL

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deeplink.scheduler.testbed.cluster import Sandbox

_ON_RUNNING = frozenset({FaultTarget.NODE, FaultTarget.RANK, FaultTarget.CONTROL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Wound:
    """One fault in effect."""

    name: str
    target: str
    unix: float  # when it was done
    undo: tuple[FaultStep, ...] = ()  # what takes it away
    done: bool = True  # whether it was done to its end; else whoever was at it has ended, or is at it still

    @property
    def frozen(self) -> bool:
        """Whether the shared folder stalls meanwhile."""
        return any(step.verb is Verb.THAW for step in self.undo)

    def is_of(self, name: str, target: str) -> bool:
        """Whether it is of this fault and this target; an empty word stands for any."""
        return name in {"", self.name} and target in {"", self.target}


def read(path: Path) -> tuple[Wound, ...]:
    """Return the faults in effect, the oldest first."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    try:
        return tuple(from_row(Wound, raw) for raw in json.loads(text))
    except (KeyError, ValueError, TypeError, AttributeError) as problem:
        raise SandboxError(
            f"{path} is damaged ({type(problem).__name__}: {problem})",
            remedy="Take the sandbox down and bring up another: `deeplink sandbox down`.",
        ) from problem


def write(path: Path, wounds: Iterable[Wound]) -> None:
    """Keep the faults in effect."""
    write_text(path, json.dumps([asdict(wound) for wound in wounds], indent=1) + "\n")


def _not_possible(fault: str, problem: str, remedy: str) -> SandboxError:
    return SandboxError(f"{fault}: {problem}", remedy=remedy, exit_code=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """What may be said of a fault besides its name and target."""

    rank: int | None = None  # which rank; the first one on the node where None
    step: int = 0  # at which step a rank exits
    always: bool = False  # whether it exits at each attempt
    share: float = 0.5  # of the time that a slow rank stands still


@dataclass(frozen=True, slots=True)
class Laboratory:
    """The faults of one sandbox. Several may work on one sandbox: what is in effect is written down."""

    sandbox: Sandbox

    def wounds(self) -> tuple[Wound, ...]:
        """Return the faults in effect, the oldest first."""
        return read(self.sandbox.layout.faults)

    def inject(self, name: str, target: str = "", how: How | None = None, *, seed: int | None = None) -> Wound:
        """Do a fault, and return once it is done. One that is in effect is not done again."""
        fault = fault_of(name)
        if fault.network and not self.sandbox.has_network:
            raise _not_possible(
                name,
                "the nodes of this sandbox share the host's network and file tree",
                "Bring the sandbox up as root, without --loopback.",
            )
        where = self._target(fault, target or self._drawn(fault, random.Random(seed)))  # noqa: S311 - no secret
        with state.locked(self.sandbox.layout, self.sandbox.clock, faults=True):
            known = next((wound for wound in self.wounds() if (wound.name, wound.target) == (name, where)), None)
            if known is not None and known.done:
                return known
            if known is not None:  # whoever was at it was killed
                self._take_away(known)
            return self._done(fault, where, how or How())

    def _done(self, fault: Fault, where: str, how: How) -> Wound:
        self._refuse_while_frozen(fault, self.wounds())
        self._refuse_on_top(fault, where)
        plan = fault.plan(self._scene(fault, where, how))
        # Written first: whatever ends us in between, it can be undone.
        wound = Wound(
            name=fault.name, target=where, unix=self.sandbox.clock.unix(), undo=plan.undo, done=not plan.undo
        )
        if plan.undo:
            self._keep([*self.wounds(), wound])
        try:
            for step in plan.do:
                hands.do(self.sandbox, step)
        except BaseException:
            self._take_away(wound)
            raise
        whole = replace(wound, done=True)
        if plan.undo:
            left = [other for other in self.wounds() if other != wound]
            self._keep([*left, whole] if fault.lasting else left)
        return whole

    def undo(self, name: str = "", target: str = "") -> tuple[Wound, ...]:
        """Take faults away, the newest first, and return them; an empty word stands for any."""
        where = self._spelled(target)
        with state.locked(self.sandbox.layout, self.sandbox.clock, faults=True):
            those = [wound for wound in reversed(self.wounds()) if wound.is_of(name, where)]
            # What is needed to undo others goes first. Whoever writes to frozen storage cannot even be ended.
            taken = tuple(
                sorted(those, key=lambda w: (not w.frozen, fault_of(w.name).target is not FaultTarget.CONTROL))
            )
            staying = [wound for wound in self.wounds() if wound not in taken]
            for wound in taken:
                self._refuse_while_frozen(fault_of(wound.name), staying)
            for wound in taken:
                self._take_away(wound)
        return taken

    def heal(self) -> tuple[Wound, ...]:
        """Take all faults away, put every cable in and start every machine and daemon that is off."""
        taken = self.undo()
        for part, whole in self.sandbox.links().items():
            if not whole:
                self.sandbox.heal(part)
        table = processes.table()
        for machine in self.sandbox.shape.machines:
            if self.sandbox.hardware.daemon(machine, table) is None:
                self.sandbox.boot(machine)
        return taken

    def _refuse_while_frozen(self, fault: Fault, wounds: Sequence[Wound]) -> None:
        # Who writes there hangs, and cannot be ended.
        if fault.target is FaultTarget.FOLDER and any(wound.frozen for wound in wounds):
            raise _not_possible(
                fault.name,
                "the shared storage is frozen",
                f"`deeplink sandbox fault --name {self.sandbox.name} --undo storage-frozen` first.",
            )

    def _refuse_on_top(self, fault: Fault, where: str) -> None:
        # The newer mount hides the older one, which could not be taken away alone.
        below = next((w for w in self.wounds() if w.target == where and fault_of(w.name).mounts), None)
        if fault.mounts and below is not None:
            raise _not_possible(
                fault.name,
                f"{below.name} lies over the SSD of {where} already",
                f"`deeplink sandbox fault --name {self.sandbox.name} --undo {below.name} {where}` first.",
            )

    def _take_away(self, wound: Wound) -> None:
        for step in wound.undo:
            with suppress(NotRunningError):  # powered off since: nothing of a running machine is left
                hands.do(self.sandbox, step)
        self._keep([other for other in self.wounds() if other != wound])

    def _keep(self, wounds: Sequence[Wound]) -> None:
        write(self.sandbox.layout.faults, wounds)

    def _target(self, fault: Fault, target: str) -> str:
        match fault.target:
            case FaultTarget.NODE | FaultTarget.RANK:
                return self.sandbox.shape.node(target)
            case FaultTarget.CONTROL:
                return self.sandbox.shape.machine(target)
            case FaultTarget.LEAF:
                return self.sandbox.shape.cuttable(target)
            case FaultTarget.FOLDER:
                return str(self._inside(fault, target))
            case FaultTarget.ALL:
                return ""

    def _spelled(self, target: str) -> str:
        """Return a target as it is written down: folders by their whole path."""
        shape = self.sandbox.shape
        parts = {"", *shape.machines, *(switch.name for switch in shape.switches)}
        return target if target in parts else str((self.sandbox.home / target).resolve())

    def _inside(self, fault: Fault, target: str) -> Path:
        """Return a folder of the sandbox's own: nothing of the host's is ever written to, or torn."""
        layout, folder = self.sandbox.layout, (self.sandbox.home / target).resolve()
        if not any(folder.is_relative_to(own.resolve()) for own in (layout.homes, layout.machines)):
            raise no_target(fault.name, "", f"{folder} is no folder of the sandbox's")
        if not folder.is_dir():
            raise no_target(fault.name, "", f"there is no folder {folder}")
        return folder

    def _drawn(self, fault: Fault, chance: random.Random) -> str:
        if fault.target is FaultTarget.CONTROL:
            return CTL
        if fault.target is FaultTarget.ALL:
            return ""
        if fault.target is FaultTarget.FOLDER:
            raise no_target(fault.name, "", "it wants a folder named, and none is")
        choices: Sequence[str] = ()
        if fault.target is FaultTarget.LEAF:
            choices = [switch.name for switch in self.sandbox.shape.switches if switch.nodes]
        elif fault.target is FaultTarget.NODE or fault.target is FaultTarget.RANK:
            on = [node for node in self.sandbox.nodes if self.sandbox.hardware.process_1(node)]
            busy = [node for node in on if looking.ranks_on(self.sandbox, node)]
            choices = busy or (on if fault.target is FaultTarget.NODE else ())
        if not choices:
            raise no_target(fault.name, "", "there is nothing to draw a target from")
        return chance.choice(sorted(choices))

    def _scene(self, fault: Fault, target: str, how: How) -> Scene:
        sandbox = self.sandbox
        homes = str(sandbox.layout.homes)
        scene = Scene(fault=fault.name, target=target, homes=homes, **asdict(how))
        if fault.target is FaultTarget.RANK:
            return replace(scene, ranks=looking.ranks_on(sandbox, target))
        if fault.target is FaultTarget.ALL:
            agents = {node: looking.agents_on(sandbox, node) for node in sandbox.nodes}
            return replace(scene, agents={node: ports for node, ports in agents.items() if ports})
        if fault.target is FaultTarget.FOLDER:
            return replace(scene, torn=self._torn(Path(target)), mode=_mode(Path(target)))
        if fault.target in _ON_RUNNING:
            number = sandbox.hardware.daemon(target, processes.table())
            daemon = ProcessId.of(number) if number else None
            return replace(
                scene,
                daemon=daemon,
                watchdogs=looking.watchdogs_on(sandbox, target),
                programs=looking.programs_on(sandbox, target),
                agents={target: looking.agents_on(sandbox, target)},
            )
        return scene

    def _torn(self, folder: Path) -> tuple[str, str] | None:
        newest = looking.newest_checkpoint(folder)
        file = looking.largest_file(newest) if newest else None
        if newest is None or file is None:
            return None
        # Files of one name may be torn in several folders.
        kept = self.sandbox.layout.kept / f"{blake2s(os.fsencode(file)).hexdigest()[:16]}-{file.name}"
        return str(file), str(kept)


def _mode(folder: Path) -> str | None:
    """Return a folder's mode, octal; None where no checkpoint lies there."""
    return f"{stat.S_IMODE(folder.stat().st_mode):o}" if looking.newest_checkpoint(folder) else None
