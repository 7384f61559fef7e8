"""A sandbox as an object: a real Slurm cluster on this machine, and the ways in which it can fail."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from deeplink.core.clock import Clock, SystemClock, wait_until
from deeplink.scheduler.slurm import command
from deeplink.scheduler.testbed import lifecycle, loopback, processes, state
from deeplink.scheduler.testbed.errors import NotRunningError, NotUpError, SandboxError, did_not_start
from deeplink.scheduler.testbed.lifecycle import Options, plan
from deeplink.scheduler.testbed.settings import SSD
from deeplink.scheduler.testbed.shape import CTL, Shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import IO

    from deeplink.core.types import NodeName
    from deeplink.scheduler.testbed.lifecycle import Hardware
    from deeplink.scheduler.testbed.settings import User
    from deeplink.scheduler.testbed.state import SandboxLayout

__all__ = ["Machine", "Options", "Sandbox", "plan"]

_PASSED_ON = ("TERM", "LANG", "LC_ALL", "TZ")
_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How one machine is."""

    name: str
    address: str
    switch: str  # what its cable goes to, or would go to
    state: str  # what Slurm says of it; empty when the controller does not answer
    link: bool | None  # whether its cable is whole; None where there is none
    process_1: int | None  # its first process, as the host sees it; None when it is powered off
    daemon: int | None  # its Slurm daemon, as the host sees it; None when that does not run


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A cluster that is up. Any number of processes may hold one and act on it."""

    layout: SandboxLayout
    record: state.Record
    hardware: Hardware
    clock: Clock

    @classmethod
    def up(
        cls,
        name: str = "default",
        shape: Shape | None = None,
        options: Options | None = None,
        clock: Clock = _CLOCK,
    ) -> Self:
        """Bring a cluster up; on return every node is idle.

        Whatever goes wrong, also when this process is killed, nothing that was started stays.
        """
        options = options or Options()
        layout = lifecycle.layout_of(name)
        with state.locked(layout, clock, make=True):
            if lifecycle.running(layout, clock) is not None:
                raise SandboxError(
                    f"sandbox {name!r} is up already",
                    remedy=f"Use it, take it down (`deeplink sandbox down --name {name}`), "
                    "or give another --name.",
                )
            try:
                loopback.sweep(layout, clock)
                state.empty(layout)
                drawn, texts = lifecycle.draw(layout, shape or Shape(), options)
                lifecycle.build(layout, drawn.settings, texts)
                with lifecycle.started(layout, drawn, clock, options.wait_s) as (record, hardware):
                    sandbox = cls(layout, record, hardware, clock)
                    sandbox.await_idle(options.wait_s)
                    record.write(layout)
            except BaseException:
                state.remove(layout)
                raise
        return sandbox

    @classmethod
    def open(cls, name: str = "default", clock: Clock = _CLOCK) -> Self:
        """Return a cluster that is up."""
        layout = lifecycle.layout_of(name)
        up = lifecycle.running(layout, clock)
        if up is None:
            raise NotUpError(name, state.names(layout.folder.parent))
        return cls(layout, *up, clock)

    clear = staticmethod(lifecycle.clear)
    remains = staticmethod(lifecycle.remains)
    names = staticmethod(lifecycle.names)
    left_over = staticmethod(lifecycle.left_over)

    def down(self) -> None:
        """End everything, and remove all it left. Nothing happens when it is down already."""
        self.clear(self.name, self.clock)

    @property
    def name(self) -> str:
        """Name of the sandbox."""
        return self.layout.name

    @property
    def shape(self) -> Shape:
        """Its nodes and switches."""
        return self.record.settings.shape

    @property
    def nodes(self) -> tuple[NodeName, ...]:
        """Names of the nodes."""
        return self.shape.nodes

    @property
    def user(self) -> User:
        """Who jobs run as."""
        return self.record.settings.user

    @property
    def home(self) -> Path:
        """The user's home folder: shared storage, at this path on every machine and on the host."""
        return self.user.home

    def ssd(self, node: str) -> Path:
        """Return where the host sees a node's SSD (on the node: see `ssd_in_jobs`)."""
        return self.layout.ssd(self.shape.node(node))

    @property
    def has_network(self) -> bool:
        """Whether each machine has a network, and so links that can be cut, of its own."""
        return self.record.keeper is not None

    @property
    def ssd_in_jobs(self) -> str:
        """Where a job finds its node's SSD; may hold $SLURMD_NODENAME, which Slurm sets on every node."""
        return str(SSD) if self.has_network else f"{self.layout.machines}/$SLURMD_NODENAME/ssd"

    def inside(
        self, machine: str, argv: Sequence[str], *, root: bool = False, env: Mapping[str, str] | None = None
    ) -> list[str]:
        """Return the command that runs `argv` on a machine (`ctl`: the login host), from the host.

        It runs in the user's home, with an environment of its own and not the caller's.
        """
        name = "root" if root else self.user.name
        programs = self.record.programs
        variables = {key: os.environ[key] for key in _PASSED_ON if key in os.environ}
        variables |= {"HOME": str(self.home), "USER": name, "LOGNAME": name, "SHELL": "/bin/bash"}
        variables |= {"PATH": self.record.path, "SLURM_CONF": str(self.layout.slurm_conf)}
        variables |= {**(programs.env if programs else {}), **(env or {})}
        return self.hardware.enter(self.shape.machine(machine), argv, variables, root=root)

    def run(
        self,
        machine: str,
        argv: Sequence[str],
        *,
        timeout_s: float = command.COMMAND_TIMEOUT_S,
        root: bool = False,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
    ) -> command.Finished:
        """Run a command on a machine to its end, and tell how it ended."""
        return command.finish(self.inside(machine, argv, root=root, env=env), timeout_s=timeout_s, stdin=stdin)

    def runner(self, machine: str = CTL, *, root: bool = False) -> command.Runner:
        """Return a way to run commands on a machine, as `deeplink.scheduler.slurm.client.Slurm` wants one."""

        def run(argv: Sequence[str], /, *, timeout_s: float = command.COMMAND_TIMEOUT_S) -> str:
            done = self.run(machine, argv, timeout_s=timeout_s, root=root)
            return command.answer_of(replace(done, argv=tuple(argv)))  # not how it was brought there

        return run

    def spawn(
        self,
        machine: str,
        argv: Sequence[str],
        *,
        root: bool = False,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[bytes] | None = command.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> command.Process[bytes]:
        """Start a command on a machine; it gets SIGTERM when the returned process is killed."""
        return command.spawn(
            self.inside(machine, argv, root=root, env=env), stdin=stdin, stdout=stdout, stderr=stderr
        )

    def cut(self, part: str) -> None:
        """Take out the cable that connects a machine, leaf or spine to what is above it."""
        self.hardware.cut(self.shape.cuttable(part))

    def heal(self, part: str) -> None:
        """Put the cable back in; what it raises is what `cut` raises."""
        self.hardware.heal(self.shape.cuttable(part))

    def crash(self, machine: str, *, keep_link: bool = False) -> None:
        """Take a machine's power: its link is cut, then every process on it ends at once.

        With `keep_link` peers see connections reset, as when the processes crash and the kernel lives on.
        """
        with state.locked(self.layout, self.clock):
            self.hardware.crash(self.shape.machine(machine), keep_link=keep_link)

    def boot(self, machine: str, *, timeout_s: float = 20.0) -> None:
        """Start a crashed machine with its link; on a running one start a dead daemon, and heal the link."""
        with state.locked(self.layout, self.clock):
            self.hardware.boot(self.shape.machine(machine), timeout_s)

    def states(self) -> dict[str, str]:
        """Return each node's state in Slurm's words; empty when the controller does not answer."""
        try:
            done = self.run(CTL, ["sinfo", "-h", "-N", "-o", "%N|%T"], timeout_s=10)
        except (command.CommandTimeoutError, NotRunningError):
            return {}
        return (
            dict(line.split("|", 1) for line in done.stdout.splitlines() if "|" in line) if not done.code else {}
        )

    def status(self) -> list[Machine]:
        """Return how every machine is, the control host first."""
        states, links, table = self.states(), self.links(), processes.table()
        found = []
        for name in self.shape.machines:
            first = self.hardware.process_1(name)
            daemon = self.hardware.daemon(name, table)
            controller = "up" if states else "down"
            found.append(
                Machine(
                    name=name,
                    address=self.record.addresses.get(name) or self.shape.address(name),
                    switch=self.shape.above(name),
                    state=controller if name == CTL else states.get(name, ""),
                    link=links.get(name),
                    process_1=first.pid if first else None,
                    daemon=daemon,
                )
            )
        return found

    def links(self) -> dict[str, bool]:
        """Return every cable by the machine or switch below it, and whether it is whole."""
        return self.hardware.links()

    def await_idle(self, wait_s: float) -> None:
        """Return once every node is idle."""
        seen: dict[str, str] = {}

        def idle() -> bool:
            seen.update(self.states())
            return len(seen) == len(self.nodes) and set(seen.values()) == {"idle"}

        if not wait_until(idle, self.clock, wait_s):
            late = ", ".join(
                f"{node} {seen.get(node, 'unknown')}" for node in self.nodes if seen.get(node) != "idle"
            )
            raise did_not_start("slurm", f"not idle after {wait_s:g} s: {late}", self._complaints())

    def _complaints(self) -> str:
        lines = []
        for log in sorted(self.layout.log.glob("slurm*.log")):
            text = log.read_text(encoding="utf-8", errors="replace")
            lines += [f"{log.name}: {line}" for line in text.splitlines() if "error" in line or "fatal" in line][
                -3:
            ]
        return "\n".join(lines[:20])
