"""A sandbox as an object: a real Slurm cluster on this machine, and the ways in which it can fail."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import deeplink
from deeplink.clock import Clock, SystemClock
from deeplink.scheduler.sandbox import namespaced, processes, state, users
from deeplink.scheduler.sandbox.errors import AlreadyUpError, BootError, NotUpError, SlurmMissingError
from deeplink.scheduler.sandbox.layout import Layout, default_root
from deeplink.scheduler.sandbox.machines import Machines, until
from deeplink.scheduler.sandbox.namespaced import Namespaced
from deeplink.scheduler.sandbox.settings import Settings, User
from deeplink.scheduler.sandbox.shape import CTL, Shape
from deeplink.scheduler.slurm import command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import IO

    from deeplink.types import NodeName

_ROOT = User("root", 0, 0, Path("/"))
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PASSED_ON = ("TERM", "LANG", "LC_ALL", "TZ")
_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What can be asked of `Sandbox.up` besides name and shape.

    Attributes:
        user: who jobs run as, by name or number: one of the host's, else one that exists in the sandbox alone.
        expose: paths the user can reach (read-only) though a folder above is closed to others, besides the running
            interpreter and DeepLink itself.
        slurmd_timeout: seconds a node may be silent until Slurm calls it down.
        return_to_service: ReturnToService of slurm.conf.
        extra: further lines of slurm.conf.
        wait_s: how long to wait until all nodes are idle, s.
    """

    user: str = users.DEFAULT
    expose: tuple[Path, ...] = ()
    slurmd_timeout: int = 10
    return_to_service: int = 2
    extra: tuple[str, ...] = ()
    wait_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How one machine is.

    Attributes:
        switch: what its cable goes to; empty where there are no cables.
        state: what Slurm says of it; empty when the controller does not answer.
        link: whether its cable is whole; None where there is none.
        process_1: its first process, as the host sees it; None when it is powered off.
        daemon: its Slurm daemon, as the host sees it; None when that does not run.
    """

    name: str
    address: str
    switch: str
    state: str
    link: bool | None
    process_1: int | None
    daemon: int | None


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A cluster that is up. Any number of processes may hold one and act on it."""

    layout: Layout
    record: state.Record
    machines: Namespaced
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

        Raises:
            AlreadyUpError: one of this name is up.
            SlurmMissingError: Slurm is not installed.
            BootError: it did not come up in time.
            SandboxNameError, ShapeError, UserError, ExposeError: that cannot be had.
        """
        options = options or Options()
        layout = Layout.of(default_root(os.environ, root=True), name)
        missing = [program for program in namespaced.PROGRAMS if shutil.which(program, path=_PATH) is None]
        if missing:
            raise SlurmMissingError(missing)
        settings = planned(layout, shape or Shape(), options)
        path = search_path()
        with state.locked(layout, clock, make=True):
            if _running(layout):
                raise AlreadyUpError(name)
            try:
                state.empty(layout)
                texts = namespaced.Files.of(settings, layout, exposures(options), path).texts
                namespaced.prepare(layout, settings, texts)
                with Namespaced.started(layout, settings, clock, options.wait_s) as machines:
                    record = state.Record(settings=settings, keeper=machines.keeper, path=path)
                    sandbox = cls(layout, record, machines, clock)
                    sandbox.await_idle(options.wait_s)
                    record.write(layout)
            except BaseException:
                state.remove(layout)
                raise
        return sandbox

    @classmethod
    def open(cls, name: str = "default", clock: Clock = _CLOCK) -> Self:
        """Return a cluster that is up.

        Raises:
            NotUpError: none of this name is.
        """
        layout = Layout.of(default_root(os.environ, root=True), name)
        record = _running(layout)
        if record is None or record.keeper is None:
            raise NotUpError(name, state.names(layout.folder.parent))
        machines = Machines(layout, record.settings.shape, clock)
        return cls(layout, record, Namespaced(layout, record.settings, record.keeper, machines), clock)

    @staticmethod
    def clear(name: str = "default", clock: Clock = _CLOCK) -> bool:
        """Take down what is there under this name, whole or in pieces; tell whether there was anything."""
        layout = Layout.of(default_root(os.environ, root=True), name)
        try:
            with state.locked(layout, clock):
                record = _running(layout)
                if record is not None and record.keeper is not None:
                    namespaced.end(record.keeper, clock)
                state.remove(layout)
        except NotUpError:
            return False
        return True

    @staticmethod
    def remains(name: str = "default") -> list[str]:
        """Return what `clear` would end and remove, one thing a line."""
        layout = Layout.of(default_root(os.environ, root=True), name)
        record = _running(layout)
        lines = [f"end process {record.keeper.pid} and all in its namespaces"] if record and record.keeper else []
        return [*lines, *([f"remove {layout.folder}"] if layout.folder.exists() else [])]

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
        """Return where the host sees a node's SSD (the node itself sees it at /local/ssd).

        Raises:
            UnknownPartError: no such node.
        """
        return self.layout.ssd(self.shape.node(node))

    def inside(
        self, machine: str, argv: Sequence[str], *, root: bool = False, env: Mapping[str, str] | None = None
    ) -> list[str]:
        """Return the command that runs `argv` on a machine (`ctl`: the login host), from the host.

        It runs in the user's home, with an environment of its own and not the caller's.

        Raises:
            UnknownPartError: no such machine.
            NotRunningError: it is powered off.
        """
        user = dataclasses.replace(_ROOT, home=self.home) if root else self.user
        variables = {key: os.environ[key] for key in _PASSED_ON if key in os.environ}
        variables |= {"HOME": str(user.home), "USER": user.name, "LOGNAME": user.name, "SHELL": "/bin/bash"}
        variables |= {"PATH": self.record.path, "SLURM_CONF": str(self.layout.slurm_conf), **self.record.env}
        return self.machines.enter(self.shape.machine(machine), argv, user, variables | dict(env or {}))

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
        """Run a command on a machine to its end, and tell how it ended.

        Raises:
            CommandTimeoutError: the time was up.
            UnknownPartError, NotRunningError: see `inside`.
        """
        return command.finish(self.inside(machine, argv, root=root, env=env), timeout_s=timeout_s, stdin=stdin)

    def runner(self, machine: str = CTL, *, root: bool = False) -> command.Runner:
        """Return a way to run commands on a machine, as `deeplink.scheduler.slurm.client.Slurm` wants one."""

        def run(argv: Sequence[str], /, *, timeout_s: float = command.COMMAND_TIMEOUT_S) -> str:
            done = self.run(machine, argv, timeout_s=timeout_s, root=root)
            if done.code:
                raise command.CommandError(argv, done.code, done.stderr)
            return done.stdout

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
        """Start a command on a machine; it gets SIGTERM when the returned process is killed.

        Raises:
            UnknownPartError, NotRunningError: see `inside`.
        """
        return command.spawn(
            self.inside(machine, argv, root=root, env=env), stdin=stdin, stdout=stdout, stderr=stderr
        )

    def cut(self, part: str) -> None:
        """Take out the cable that connects a machine, leaf or spine to what is above it.

        Raises:
            UnknownPartError: no such part.
            NoNetworkError: the nodes have no network of their own.
        """
        self.machines.cut(self.shape.cuttable(part))

    def heal(self, part: str) -> None:
        """Put the cable back in; what it raises is what `cut` raises."""
        self.machines.heal(self.shape.cuttable(part))

    def crash(self, machine: str, *, keep_link: bool = False) -> None:
        """Take a machine's power: its link is cut, then every process on it ends at once.

        With `keep_link` peers see connections reset, as when the processes crash and the kernel lives on.

        Raises:
            UnknownPartError: no such machine.
            NotRunningError: it is powered off already.
        """
        with state.locked(self.layout, self.clock):
            self.machines.crash(self.shape.machine(machine), keep_link=keep_link)

    def boot(self, machine: str, *, timeout_s: float = 20.0) -> None:
        """Start a crashed machine with its link; on a running one start a dead daemon, and heal the link.

        Raises:
            UnknownPartError: no such machine.
            BootError: it did not come up in time.
        """
        with state.locked(self.layout, self.clock):
            self.machines.boot(self.shape.machine(machine), timeout_s)

    def states(self) -> dict[str, str]:
        """Return each node's state in Slurm's words; empty when the controller does not answer."""
        try:
            done = self.run(CTL, ["sinfo", "-h", "-N", "-o", "%N|%T"], root=True, timeout_s=10)
        except command.CommandTimeoutError:
            return {}
        return (
            dict(line.split("|", 1) for line in done.stdout.splitlines() if "|" in line) if not done.code else {}
        )

    def status(self) -> list[Machine]:
        """Return how every machine is, the control host first."""
        states, links, parent_of = self.states(), self.links(), processes.parents()
        found = []
        for name in self.shape.machines:
            first = self.machines.process_1(name)
            daemon = self.machines.daemon(name, parent_of)
            controller = "up" if states else "down"
            found.append(
                Machine(
                    name=name,
                    address=self.shape.address(name),
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
        return self.machines.links()

    def await_idle(self, wait_s: float) -> None:
        """Return once every node is idle.

        Raises:
            BootError: some are not in time.
        """
        seen: dict[str, str] = {}

        def idle() -> bool:
            seen.update(self.states())
            return len(seen) == len(self.nodes) and set(seen.values()) == {"idle"}

        if not until(idle, self.clock, wait_s):
            late = ", ".join(
                f"{node} {seen.get(node, 'unknown')}" for node in self.nodes if seen.get(node) != "idle"
            )
            raise BootError("slurm", f"not idle after {wait_s:g} s: {late}", self._complaints())

    def _complaints(self) -> str:
        lines = []
        for log in sorted(self.layout.log.glob("slurm*.log")):
            text = log.read_text(encoding="utf-8", errors="replace")
            lines += [f"{log.name}: {line}" for line in text.splitlines() if "error" in line or "fatal" in line][
                -3:
            ]
        return "\n".join(lines[:20])


def _running(layout: Layout) -> state.Record | None:
    record = state.Record.read(layout)
    return record if record is not None and record.keeper is not None and record.keeper.alive else None


def planned(layout: Layout, shape: Shape, options: Options) -> Settings:
    """Return the settings that come of name, shape and options."""
    return Settings(
        shape=shape,
        user=users.choose(options.user, layout),
        slurmd_timeout=options.slurmd_timeout,
        return_to_service=options.return_to_service,
        extra=options.extra,
    )


def plan(name: str, shape: Shape, options: Options) -> dict[Path, str]:
    """Return every file that `Sandbox.up` would write, scripts of the processes 1 included; nothing is done."""
    layout = Layout.of(default_root(os.environ, root=True), name)
    settings = planned(layout, shape, options)
    return namespaced.Files.of(settings, layout, exposures(options), search_path()).texts


def search_path() -> str:
    """Return PATH of commands and jobs in a sandbox: DeepLink's own programs, then the system's."""
    return f"{sys.prefix}/bin:{_PATH}"


def exposures(options: Options) -> list[Path]:
    """Return the paths that the user is to reach: DeepLink, what runs it, and what was asked for."""
    package = Path(deeplink.__file__).parent.parent
    wanted = [Path(sys.prefix), Path(sys.base_prefix), package, *options.expose]
    return list(dict.fromkeys(path.absolute() for path in wanted))
