"""A cluster whose machines are Linux namespaces: root only, and then everything can fail as on real hardware."""

from __future__ import annotations

import os
import shlex
import signal
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.core.clock import wait_until
from deeplink.scheduler.slurm import command
from deeplink.scheduler.testbed import settings, shape, tree
from deeplink.scheduler.testbed.errors import NotRunningError, bad_name, did_not_start, not_exposed
from deeplink.scheduler.testbed.processes import (
    ProcessId,
    arguments,
    descendants,
    first_processes,
    table,
)
from deeplink.scheduler.testbed.settings import SSD
from deeplink.scheduler.testbed.shape import CTL, cable, interface

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from deeplink.core.clock import Clock
    from deeplink.scheduler.testbed.processes import ProcessEntry
    from deeplink.scheduler.testbed.settings import SandboxSettings
    from deeplink.scheduler.testbed.shape import Shape
    from deeplink.scheduler.testbed.state import SandboxLayout
    from deeplink.scheduler.testbed.tree import Step

PROGRAMS = ("slurmctld", "slurmd", "munged", "sinfo", "ip", "unshare", "nsenter", "setpriv", "pivot_root")
FABRIC = "fabric"
BOOTED = "booted"
STAY = "stay"
"""What the fabric's process 1 must read, or it ends, and everything with it."""

# Process 1 adopts orphans: `wait` takes their exit codes.
_FOR_EVER = ["while :; do sleep 86400 & wait; done"]
# In the machines' own copy of /etc: the host may lack them, and keeps what it has.
_NAMES = ("hosts", "passwd", "group", "nsswitch.conf")
BOOT_ID = "/run/deeplink-boot-id"
"""Another one at each boot. All machines share one kernel, and its boot id would be the same on all of them."""
_BOOT_ID_OF_KERNEL = "/proc/sys/kernel/random/boot_id"
_LOOK_AGAIN_S = 1.0
_PAUSE_S = 0.02
_END_S = 10.0
_UNSHARE = ("unshare", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child", "--propagation", "private")
_FRESH_NETWORK = """ip link del "$2" 2>/dev/null
umount -l "$1" 2>/dev/null
set -e
touch "$1"
exec unshare --net="$1" true
"""
_Argv = tuple[str, ...]


def files(wanted: SandboxSettings, layout: SandboxLayout, exposed: Sequence[Path], path: str) -> dict[Path, str]:
    """Return every file of the sandbox, scripts of the processes 1 included: path -> text."""
    if layout.folder.parts[1] in tree.OWN:
        raise bad_name(
            layout.name,
            f"{layout.folder} lies in /{layout.folder.parts[1]}, of which every machine has its own",
            "Put DEEPLINK_SANDBOX_ROOT elsewhere, for example into /var/lib.",
        )
    for inside in exposed:
        if layout.folder == inside or layout.folder in inside.parents:
            raise not_exposed(inside, "it lies in the sandbox")
    planned = tree.plan(tree.ThisHost(), layout.new_root, layout.exposed, layout.folder, exposed)
    texts = settings.files(wanted, layout, settings.namespaces(wanted.shape, layout))
    texts[layout.etc / "hosts"] = settings.hosts(wanted.shape)
    texts[layout.etc / "passwd"] = settings.passwd(Path("/etc/passwd").read_text(encoding="utf-8"), wanted.user)
    texts[layout.etc / "group"] = settings.group(Path("/etc/group").read_text(encoding="utf-8"), wanted.user)
    texts[layout.etc / "nsswitch.conf"] = settings.NSSWITCH_CONF
    texts[layout.boot / FABRIC] = fabric_script(layout, planned.shared)
    for name in wanted.shape.machines:
        texts[layout.boot / name] = machine_script(layout, wanted.shape, name, planned.own, path)
    return texts


def _script(lines: Iterable[str]) -> str:
    return "\n".join(["#!/bin/sh", "set -eu", "umask 022", *lines]) + "\n"


def fabric_script(layout: SandboxLayout, tree: Iterable[Step]) -> str:
    """Return the script of the namespaces around all machines: tree, switches, munge. They live while it does."""
    new = layout.new_root
    enter: list[Step] = [
        ("mkdir", "-p", f"{new}{SSD}", f"{new}/.old"),
        ("mount", "-t", "proc", "proc", f"{new}/proc"),
        ("pivot_root", str(new), f"{new}/.old"),
        ("cd", "/"),
        ("umount", "-l", "/.old"),
        ("rmdir", "/.old"),
        *(("cp", "--remove-destination", str(layout.etc / name), f"/etc/{name}") for name in _NAMES),
        ("mount", "-t", "tmpfs", "-o", "mode=700", "networks", str(layout.networks)),
        ("mount", "-o", "remount,bind,ro", "/"),
        ("hostname", FABRIC),
    ]
    munge = layout.munge
    munged: Step = (
        "munged",
        f"--key-file={munge}/key",
        f"--socket={layout.munge_socket}",
        f"--pid-file={munge}/pid",
        f"--log-file={munge}/log",
        f"--seed-file={munge}/seed",
    )
    ready: Step = ("touch", str(layout.log / f"{FABRIC}.{BOOTED}"))
    stay = ["read -r word || exit 1", f'[ "$word" = {STAY} ] || exit 1', "exec < /dev/null > /dev/null 2>&1"]
    return _script([*map(shlex.join, [*tree, *enter, munged, ready]), *stay, *_FOR_EVER])


def machine_script(layout: SandboxLayout, shape: Shape, name: str, exposed: Iterable[Step], path: str) -> str:
    """Return the script of one machine: its own disks, its network, its daemon."""
    own, conf = layout.own, str(layout.slurm_conf)
    mounts: list[Step] = [
        ("hostname", name),
        ("mount", "-t", "proc", "proc", "/proc"),
        ("mount", "-t", "sysfs", "sysfs", "/sys"),
        ("mount", "--bind", str(layout.machine(name)), str(own)),
        # The disks of other machines, and their networks, are none of this one's business.
        ("mount", "-t", "tmpfs", "-o", "mode=755,ro", "others", str(layout.machines)),
        ("umount", "-l", str(layout.networks)),
        ("mount", "--bind", f"{own}/tmp", "/tmp"),  # noqa: S108 - the machine's own
        ("mount", "-t", "tmpfs", "-o", "mode=755,nosuid,nodev", "run", "/run"),
        ("mount", "-t", "tmpfs", "-o", "mode=1777,nosuid,nodev", "shm", "/dev/shm"),  # noqa: S108
    ]
    if name != CTL:
        mounts.append(("mount", "--bind", f"{own}/ssd", str(SSD)))
    booted = [
        f"cat /proc/sys/kernel/random/uuid > {BOOT_ID}",
        f"mount --bind {BOOT_ID} {_BOOT_ID_OF_KERNEL} || echo 'the boot id stays that of the host'",
    ]
    batch = ["ip -batch - <<'END'", *interface(shape, name), "END"]
    return _script(
        [
            *map(shlex.join, [*mounts, *exposed]),
            *booted,
            *batch,
            shlex.join(("export", f"PATH={path}", f"SLURM_CONF={conf}")),
            # Whether the daemon came up is for Slurm to say, not for process 1 to die of.
            shlex.join(daemon_command(name, conf, rebooted=True)) + " || echo 'the daemon did not start'",
            shlex.join(("touch", f"{own}/{BOOTED}")),
            *_FOR_EVER,
        ]
    )


def daemon_command(name: str, conf: str, *, rebooted: bool) -> Step:
    """Return the command that starts a machine's Slurm daemon."""
    if name == CTL:
        return ("slurmctld", "-f", conf)
    # -b: the machine's boot time, which Slurm compares, is now, and not when the host booted.
    return ("slurmd", *(["-b"] if rebooted else []), "-N", name, "-f", conf)


def _process_1(layout: SandboxLayout, name: str) -> tuple[str, ...]:
    return ("sh", str(layout.boot / name))


def find_keeper(layout: SandboxLayout) -> ProcessId | None:
    """Return the fabric's process 1 of a sandbox that nothing is known of but its folder; None if none runs."""
    argv = _process_1(layout, FABRIC)
    return first_processes([argv]).get(argv)


def end_keeper(keeper: ProcessId, clock: Clock) -> None:
    """End the fabric's process 1: the kernel ends all in its namespaces, then mounts and links."""
    below = {str(who.pid) for who in descendants(keeper.pid, table())}
    for pid in table():
        # An nsenter stops with the program that it brought in, and would never take its exit code: process 1 waits
        # for that.
        if arguments(pid)[:2] == ["nsenter", "-t"] and arguments(pid)[2] in below and (who := ProcessId.of(pid)):
            who.send(signal.SIGCONT)
    keeper.send(signal.SIGKILL)
    # Process 1 is gone only when all others of its pid namespace are (pid_namespaces(7)).
    if not wait_until(lambda: not keeper.alive, clock, _END_S):
        raise did_not_start("down", f"process {keeper.pid} does not end")


def _start_keeper(layout: SandboxLayout, clock: Clock, timeout_s: float) -> tuple[ProcessId, int]:
    """Start the namespaces around all machines; return the keeper, and a handle to let it stay with.

    Until it may stay the keeper ends when the handle is closed: also when we are killed.
    """
    argv = _process_1(layout, FABRIC)
    log = layout.log / "fabric.log"
    reads, writes = os.pipe()
    try:
        try:
            with log.open("ab") as out:
                starter = command.spawn(
                    ["setsid", "--fork", *_UNSHARE, "--net", *argv], stdin=reads, stdout=out, stderr=out
                )
        finally:
            os.close(reads)
        starter.wait(timeout_s)
        marker = layout.log / f"{FABRIC}.{BOOTED}"
        return _await({argv: marker}, {argv: log}, clock, timeout_s)[argv], writes
    except BaseException:
        os.close(writes)
        raise


def _await(
    markers: Mapping[_Argv, Path], logs: Mapping[_Argv, Path], clock: Clock, timeout_s: float
) -> dict[_Argv, ProcessId]:
    """Return the processes 1 once all have made their marker."""

    def give_up(argv: _Argv, problem: str) -> None:
        name = argv[1].rpartition("/")[2]
        raise did_not_start(name, problem, logs[argv].read_text(encoding="utf-8", errors="replace")[-2000:])

    start = look = clock.monotonic()
    while not all(marker.exists() for marker in markers.values()):
        now = clock.monotonic()
        if now > look + _LOOK_AGAIN_S:
            look = now
            gone = set(markers) - set(first_processes(list(markers)))
            for argv in gone:
                if not markers[argv].exists():
                    give_up(argv, "its first process ended")
        if now > start + timeout_s:
            late = next(argv for argv, marker in markers.items() if not marker.exists())
            give_up(late, f"not ready after {timeout_s:g} s")
        clock.sleep(_PAUSE_S)
    found = first_processes(list(markers))
    for argv in markers.keys() - found.keys():
        give_up(argv, "its first process ended")
    return found


@dataclass(frozen=True, slots=True)
class Namespaced:
    """The running machines of a sandbox: all their processes end when the fabric's process 1, the keeper, ends."""

    layout: SandboxLayout
    settings: SandboxSettings
    keeper: ProcessId
    clock: Clock

    @classmethod
    @contextmanager
    def started(
        cls, layout: SandboxLayout, wanted: SandboxSettings, clock: Clock, timeout_s: float
    ) -> Iterator[Namespaced]:
        """Start the fabric and all machines; they stay when the block ends well, and end when it fails."""
        keeper, handle = _start_keeper(layout, clock, timeout_s)
        try:
            try:
                machines = cls(layout, wanted, keeper, clock)
                machines._ip(shape.fabric(wanted.shape))
                machines._start(wanted.shape.machines, timeout_s)
                yield machines
                os.write(handle, f"{STAY}\n".encode())
            finally:
                os.close(handle)
        except BaseException:
            end_keeper(keeper, clock)
            raise

    def in_fabric(self, argv: Sequence[str], stdin: str = "") -> str:
        """Run a command among the switches, and return what it wrote."""
        done = command.finish(["nsenter", "-t", str(self.keeper.pid), "-m", "-n", "-p", *argv], stdin=stdin)
        return command.answer_of(replace(done, argv=tuple(argv)))

    def _ip(self, lines: Sequence[str]) -> None:
        self.in_fabric(["ip", "-batch", "-"], "\n".join(lines) + "\n")

    def _start(self, names: Sequence[str], timeout_s: float) -> None:
        """Give each machine a fresh network, lay its cable, start it, and keep its process 1 in mind."""
        lines = []
        for name in names:
            namespace = self.layout.networks / name
            (self.layout.machine(name) / BOOTED).unlink(missing_ok=True)
            # A power cycle forgets connections: those of an old network would answer for the new machine.
            self.in_fabric(["sh", "-c", _FRESH_NETWORK, "sh", str(namespace), cable(name)])
            lines += shape.plug(self.settings.shape, name, namespace)
        self._ip(lines)
        for name in names:
            self._launch(name)
        argvs = {name: _process_1(self.layout, name) for name in names}
        found = _await(
            {argv: self.layout.machine(name) / BOOTED for name, argv in argvs.items()},
            {argv: self.layout.log / f"{name}.log" for name, argv in argvs.items()},
            self.clock,
            timeout_s,
        )
        for name, argv in argvs.items():
            found[argv].keep(self._pid_file(name))

    def _launch(self, name: str) -> None:
        pid = str(self.keeper.pid)
        network_of = f"/proc/{pid}/root{self.layout.networks / name}"
        enter = ["nsenter", "-t", pid, "-m", "-p", "-u", "-i", f"--net={network_of}"]
        with (self.layout.log / f"{name}.log").open("ab") as out:
            starter = command.spawn(
                [*enter, "setsid", "--fork", *_UNSHARE, *_process_1(self.layout, name)], stdout=out, stderr=out
            )
        starter.wait(_END_S)

    def _pid_file(self, name: str) -> Path:
        return self.layout.boot / f"{name}.pid"

    def process_1(self, machine: str) -> ProcessId | None:
        """Return the process that all others of a machine end with; None when it is powered off."""
        return ProcessId.kept(self._pid_file(machine))

    def _running(self, machine: str) -> ProcessId:
        first = self.process_1(machine)
        if first is None:
            raise NotRunningError(machine, self.layout.name)
        return first

    def enter(self, machine: str, argv: Sequence[str], env: Mapping[str, str], *, root: bool) -> list[str]:
        """Return the command that runs `argv` on a machine, in the user's home."""
        user, first = self.settings.user, self._running(machine)
        uid, gid = (0, 0) if root else (user.uid, user.gid)
        become = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--pdeathsig=TERM"]
        variables = [f"{key}={value}" for key, value in env.items()]
        inside = ["nsenter", "-t", str(first.pid), "-a", *become, "env", "-i", "-C", str(user.home)]
        return [*inside, *variables, *argv]

    def cut(self, part: str) -> None:
        """Take the cable out that connects a machine, leaf or spine to the switch above."""
        self._ip([f"link set {cable(part)} down"])

    def heal(self, part: str) -> None:
        """Put the cable back in; raises what `cut` raises."""
        self._ip([f"link set {cable(part)} up"])

    def crash(self, machine: str, *, keep_link: bool) -> None:
        """End all processes of a machine at once, its link cut first unless that is kept."""
        first = self._running(machine)
        if not keep_link:
            self.cut(machine)
        first.send(signal.SIGKILL)
        wait_until(lambda: not first.alive, self.clock, _END_S)

    def boot(self, machine: str, timeout_s: float) -> None:
        """Start a crashed machine; on a running one start its daemon if that is gone, and heal its link."""
        first = self.process_1(machine)
        if first is None:
            self._start([machine], timeout_s)
            return
        self.heal(machine)
        if self.daemon(machine, table()) is None:
            start = daemon_command(machine, str(self.layout.slurm_conf), rebooted=False)
            done = command.finish(["nsenter", "-t", str(first.pid), "-a", *start], timeout_s=timeout_s)
            if done.code:
                raise did_not_start(machine, f"{start[0]} exited {done.code}", done.stderr)

    def daemon(self, machine: str, processes: Mapping[int, ProcessEntry]) -> int | None:
        """Return the number, on the host, of a machine's Slurm daemon; None when it does not run."""
        first = self.process_1(machine)
        if first is None:
            return None
        program = "slurmctld" if machine == CTL else "slurmd"
        below = descendants(first.pid, processes)
        return next((who.pid for who in below if arguments(who.pid)[:1] == [program] and who.alive), None)

    def links(self) -> dict[str, bool]:
        """Return each cable by what hangs on it, and whether it is whole; empty where there are none."""
        found = {}
        for line in self.in_fabric(["ip", "-br", "link"]).splitlines():
            device, *rest = line.split()
            part = device.partition("@")[0]
            if part.startswith(cable("")):
                found[part.removeprefix(cable(""))] = "UP" in rest[-1].strip("<>").split(",")
        return found

    def end(self) -> None:
        """End every process of the sandbox."""
        end_keeper(self.keeper, self.clock)
