"""Machines as Linux namespaces: started, entered, crashed."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.scheduler.sandbox import network, scripts
from deeplink.scheduler.sandbox.errors import BootError, NotRunningError
from deeplink.scheduler.sandbox.processes import ProcessId, first_processes
from deeplink.scheduler.sandbox.waiting import PAUSE_S, until
from deeplink.scheduler.slurm import command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from deeplink.clock import Clock
    from deeplink.scheduler.sandbox.layout import SandboxLayout
    from deeplink.scheduler.sandbox.settings import User
    from deeplink.scheduler.sandbox.shape import Shape

_LOOK_AGAIN_S = 1.0
_END_S = 10.0
_UNSHARE = ("unshare", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child", "--propagation", "private")


def _process_1(layout: SandboxLayout, name: str) -> tuple[str, ...]:
    return ("sh", str(layout.boot / name))


def find_keeper(layout: SandboxLayout) -> ProcessId | None:
    """Return the fabric's process 1 of a sandbox that nothing is known of but its folder; None if none runs."""
    argv = _process_1(layout, scripts.FABRIC)
    return first_processes([argv]).get(argv)


def end_keeper(keeper: ProcessId, clock: Clock) -> None:
    """End the fabric's process 1: the kernel ends all in its namespaces, then mounts and links.

    Raises:
        BootError: it is still there (a process hangs in the kernel).
    """
    keeper.send(signal.SIGKILL)
    # Process 1 is gone only when all others of its pid namespace are (pid_namespaces(7)).
    if not until(lambda: not keeper.alive, clock, _END_S):
        raise BootError("down", f"process {keeper.pid} does not end")


@dataclass(frozen=True, slots=True)
class Namespaces:
    """The namespaces of one sandbox. All processes in them end when the fabric's process 1, the keeper, ends."""

    layout: SandboxLayout
    shape: Shape
    clock: Clock

    def start_fabric(self, timeout_s: float) -> tuple[ProcessId, int]:
        """Start the namespaces around all machines; return the keeper, and a handle to `settle` it with.

        Until it is settled the keeper ends when the handle is closed: also when we are killed.

        Raises:
            BootError: it did not come up in time.
        """
        argv = _process_1(self.layout, scripts.FABRIC)
        log = self.layout.log / "fabric.log"
        reads, writes = os.pipe()
        try:
            with log.open("ab") as out:
                starter = command.spawn(
                    ["setsid", "--fork", *_UNSHARE, "--net", *argv], stdin=reads, stdout=out, stderr=out
                )
            starter.wait(timeout_s)
        except BaseException:
            os.close(writes)
            raise
        finally:
            os.close(reads)
        try:
            marker = self.layout.log / f"{scripts.FABRIC}.{scripts.BOOTED}"
            return self._await({argv: marker}, {argv: log}, timeout_s)[argv], writes
        except BaseException:
            os.close(writes)
            raise

    def _await(
        self, markers: Mapping[tuple[str, ...], Path], logs: Mapping[tuple[str, ...], Path], timeout_s: float
    ) -> dict[tuple[str, ...], ProcessId]:
        """Return the processes 1 once all have made their marker."""
        start = look = self.clock.monotonic()
        while not all(marker.exists() for marker in markers.values()):
            now = self.clock.monotonic()
            if now > look + _LOOK_AGAIN_S:
                look = now
                gone = set(markers) - set(first_processes(list(markers)))
                failed = [argv for argv in gone if not markers[argv].exists()]
                if failed:
                    self._give_up(failed[0], logs, "its first process ended")
            if now > start + timeout_s:
                late = next(argv for argv, marker in markers.items() if not marker.exists())
                self._give_up(late, logs, f"not ready after {timeout_s:g} s")
            self.clock.sleep(PAUSE_S)
        found = first_processes(list(markers))
        for argv in markers:
            if argv not in found:
                self._give_up(argv, logs, "its first process ended")
        return found

    def _give_up(self, argv: tuple[str, ...], logs: Mapping[tuple[str, ...], Path], problem: str) -> None:
        name = argv[1].rpartition("/")[2]
        raise BootError(name, problem, logs[argv].read_text(encoding="utf-8", errors="replace")[-2000:])

    def in_fabric(self, keeper: ProcessId, argv: Sequence[str], stdin: str = "") -> str:
        """Run a command among the switches, and return what it wrote.

        Raises:
            CommandError: it failed.
        """
        done = command.finish(["nsenter", "-t", str(keeper.pid), "-m", "-n", "-p", *argv], stdin=stdin)
        if done.code:
            raise command.CommandError(argv, done.code, done.stderr)
        return done.stdout

    def ip(self, keeper: ProcessId, lines: Sequence[str]) -> None:
        """Run `ip` commands among the switches."""
        self.in_fabric(keeper, ["ip", "-batch", "-"], "\n".join(lines) + "\n")

    def start(self, keeper: ProcessId, names: Sequence[str], timeout_s: float) -> None:
        """Give each machine a fresh network, lay its cable, start it, and keep its process 1 in mind.

        Raises:
            BootError: one did not come up in time.
        """
        lines = []
        for name in names:
            namespace = self.layout.networks / name
            (self.layout.machine(name) / scripts.BOOTED).unlink(missing_ok=True)
            # A power cycle forgets connections: those of an old network would answer for the new machine.
            self.in_fabric(keeper, ["sh", "-c", _FRESH_NETWORK, "sh", str(namespace), network.cable(name)])
            lines += network.plug(self.shape, name, namespace)
        self.ip(keeper, lines)
        for name in names:
            self._launch(keeper, name)
        argvs = {name: _process_1(self.layout, name) for name in names}
        found = self._await(
            {argv: self.layout.machine(name) / scripts.BOOTED for name, argv in argvs.items()},
            {argv: self.layout.log / f"{name}.log" for name, argv in argvs.items()},
            timeout_s,
        )
        for name, argv in argvs.items():
            found[argv].keep(self._pid_file(name))

    def _launch(self, keeper: ProcessId, name: str) -> None:
        network_of = f"/proc/{keeper.pid}/root{self.layout.networks / name}"
        enter = ["nsenter", "-t", str(keeper.pid), "-m", "-p", "-u", "-i", f"--net={network_of}"]
        with (self.layout.log / f"{name}.log").open("ab") as out:
            starter = command.spawn(
                [*enter, "setsid", "--fork", *_UNSHARE, *_process_1(self.layout, name)], stdout=out, stderr=out
            )
        starter.wait(_END_S)

    def _pid_file(self, name: str) -> Path:
        return self.layout.boot / f"{name}.pid"

    def process_1(self, name: str) -> ProcessId | None:
        """Return a machine's process 1; None when it is powered off."""
        return ProcessId.kept(self._pid_file(name))

    def enter(self, name: str, argv: Sequence[str], user: User, env: Mapping[str, str]) -> list[str]:
        """Return the command that runs `argv` inside a machine as a user, in the user's home.

        Raises:
            NotRunningError: the machine is powered off.
        """
        first = self.process_1(name)
        if first is None:
            raise NotRunningError(name, self.layout.name)
        become = ["setpriv", f"--reuid={user.uid}", f"--regid={user.gid}", "--clear-groups", "--pdeathsig=TERM"]
        variables = [f"{key}={value}" for key, value in env.items()]
        return [
            *("nsenter", "-t", str(first.pid), "-a", *become, "env", "-i", "-C", str(user.home)),
            *variables,
            *argv,
        ]

    def kill(self, name: str) -> None:
        """End every process of a machine at once, and return when none is left.

        Raises:
            NotRunningError: the machine is powered off.
        """
        first = self.process_1(name)
        if first is None:
            raise NotRunningError(name, self.layout.name)
        first.send(signal.SIGKILL)
        until(lambda: not first.alive, self.clock, _END_S)

    def links(self, keeper: ProcessId) -> dict[str, bool]:
        """Return each cable of the fabric by what hangs on it, and whether it is whole."""
        found = {}
        for line in self.in_fabric(keeper, ["ip", "-br", "link"]).splitlines():
            device, *rest = line.split()
            part = device.partition("@")[0]
            if part.startswith(network.cable("")):
                found[part.removeprefix(network.cable(""))] = "UP" in rest[-1].strip("<>").split(",")
        return found


_FRESH_NETWORK = """ip link del "$2" 2>/dev/null
umount -l "$1" 2>/dev/null
set -e
touch "$1"
exec unshare --net="$1" true
"""
