"""A cluster whose machines are Linux namespaces: root only, and then everything can fail as on real hardware."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from deeplink.scheduler.sandbox import network, scripts, settings, tree
from deeplink.scheduler.sandbox.errors import BootError, ExposeError, NotRunningError, SandboxNameError
from deeplink.scheduler.sandbox.hardware import Hardware
from deeplink.scheduler.sandbox.machines import Namespaces, end_keeper
from deeplink.scheduler.sandbox.processes import ProcessId, arguments, descendants, table
from deeplink.scheduler.sandbox.shape import CTL
from deeplink.scheduler.slurm import command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from deeplink.clock import Clock
    from deeplink.scheduler.sandbox.layout import SandboxLayout
    from deeplink.scheduler.sandbox.processes import ProcessEntry
    from deeplink.scheduler.sandbox.settings import SandboxSettings

PROGRAMS = ("slurmctld", "slurmd", "munged", "sinfo", "ip", "unshare", "nsenter", "setpriv", "pivot_root")


def files(wanted: SandboxSettings, layout: SandboxLayout, exposed: Sequence[Path], path: str) -> dict[Path, str]:
    """Return every file of the sandbox, scripts of the processes 1 included: path -> text.

    Raises:
        ExposeError: a path cannot be exposed.
        SandboxNameError: the sandbox would lie where each machine has a place of its own.
    """
    if layout.folder.parts[1] in tree.OWN:
        raise SandboxNameError(
            layout.name,
            f"{layout.folder} lies in /{layout.folder.parts[1]}, of which every machine has its own",
            "Put DEEPLINK_SANDBOX_ROOT elsewhere, for example into /var/lib.",
        )
    for inside in exposed:
        if layout.folder == inside or layout.folder in inside.parents:
            raise ExposeError(inside, "it lies in the sandbox")
    planned = tree.plan(tree.ThisHost(), layout.new_root, layout.exposed, layout.folder, exposed)
    texts = settings.files(wanted, layout, settings.namespaces(wanted.shape, layout))
    texts[layout.etc / "hosts"] = settings.hosts(wanted.shape)
    texts[layout.etc / "passwd"] = settings.passwd(_read("/etc/passwd"), wanted.user)
    texts[layout.etc / "group"] = settings.group(_read("/etc/group"), wanted.user)
    texts[layout.etc / "nsswitch.conf"] = settings.NSSWITCH_CONF
    texts[layout.boot / scripts.FABRIC] = scripts.fabric(layout, planned.shared)
    for name in wanted.shape.machines:
        texts[layout.boot / name] = scripts.machine(layout, wanted.shape, name, planned.own, path)
    return texts


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Namespaced(Hardware):
    """The running machines of a sandbox, and what can be done to them."""

    layout: SandboxLayout
    settings: SandboxSettings
    keeper: ProcessId
    machines: Namespaces

    @classmethod
    @contextmanager
    def started(
        cls, layout: SandboxLayout, wanted: SandboxSettings, clock: Clock, timeout_s: float
    ) -> Iterator[Namespaced]:
        """Start the fabric and all machines; they stay when the block ends well, and end when it fails.

        Raises:
            BootError: something did not come up in time.
        """
        machines = Namespaces(layout, wanted.shape, clock)
        keeper, handle = machines.start_fabric(timeout_s)
        try:
            try:
                machines.ip(keeper, network.fabric(wanted.shape))
                machines.start(keeper, wanted.shape.machines, timeout_s)
                yield cls(layout, wanted, keeper, machines)
                os.write(handle, f"{scripts.STAY}\n".encode())
            finally:
                os.close(handle)
        except BaseException:
            end_keeper(keeper, clock)
            raise

    @override
    def enter(self, machine: str, argv: Sequence[str], env: Mapping[str, str], *, root: bool) -> list[str]:
        user = self.settings.user
        return self.machines.enter(machine, argv, replace(user, uid=0, gid=0) if root else user, env)

    @override
    def cut(self, part: str) -> None:
        self.machines.ip(self.keeper, [f"link set {network.cable(part)} down"])

    @override
    def heal(self, part: str) -> None:
        self.machines.ip(self.keeper, [f"link set {network.cable(part)} up"])

    @override
    def crash(self, machine: str, *, keep_link: bool) -> None:
        if self.process_1(machine) is None:
            raise NotRunningError(machine, self.layout.name)
        if not keep_link:
            self.cut(machine)
        self.machines.kill(machine)

    @override
    def boot(self, machine: str, timeout_s: float) -> None:
        first = self.process_1(machine)
        if first is None:
            self.machines.start(self.keeper, [machine], timeout_s)
            return
        self.heal(machine)
        if self.daemon(machine, table()) is None:
            start = scripts.daemon(machine, str(self.layout.slurm_conf), rebooted=False)
            done = command.finish(["nsenter", "-t", str(first.pid), "-a", *start], timeout_s=timeout_s)
            if done.code:
                raise BootError(machine, f"{start[0]} exited {done.code}", done.stderr)

    @override
    def process_1(self, machine: str) -> ProcessId | None:
        return self.machines.process_1(machine)

    @override
    def daemon(self, machine: str, processes: Mapping[int, ProcessEntry]) -> int | None:
        first = self.process_1(machine)
        if first is None:
            return None
        program = "slurmctld" if machine == CTL else "slurmd"
        below = descendants(first.pid, processes)
        return next((who.pid for who in below if arguments(who.pid)[:1] == [program] and who.alive), None)

    @override
    def links(self) -> dict[str, bool]:
        return self.machines.links(self.keeper)

    @override
    def end(self) -> None:
        end_keeper(self.keeper, self.machines.clock)
