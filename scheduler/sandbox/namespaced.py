"""A cluster whose machines are Linux namespaces: root only, and then everything can fail as on real hardware."""

from __future__ import annotations

import os
import secrets
import signal
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.scheduler.sandbox import network, scripts, settings, tree
from deeplink.scheduler.sandbox.errors import BootError, ExposeError, NotRunningError, SandboxNameError
from deeplink.scheduler.sandbox.machines import Machines, until
from deeplink.scheduler.sandbox.processes import ProcessId, arguments, descendants, parents
from deeplink.scheduler.sandbox.shape import CTL
from deeplink.scheduler.slurm import command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from deeplink.clock import Clock
    from deeplink.scheduler.sandbox.layout import Layout
    from deeplink.scheduler.sandbox.settings import Settings, User

PROGRAMS = ("slurmctld", "slurmd", "munged", "sinfo", "ip", "unshare", "nsenter", "setpriv", "pivot_root")
_END_S = 10.0
_KEY_BYTES = 128


@dataclass(frozen=True, slots=True)
class Files:
    """Everything that is written before a process starts: the dry run shows it, `up` writes it."""

    texts: dict[Path, str]

    @classmethod
    def of(cls, wanted: Settings, layout: Layout, exposed: Sequence[Path], path: str) -> Files:
        """Return every file of the sandbox.

        Raises:
            ExposeError: a path cannot be exposed.
            SandboxNameError: the sandbox would lie where each machine has a place of its own.
        """
        if layout.folder.parts[1] in tree.OWN:
            top = layout.folder.parts[1]
            raise SandboxNameError(
                layout.name,
                f"{layout.folder} lies in /{top}, of which every machine has its own",
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
        return cls(texts)


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def prepare(layout: Layout, wanted: Settings, texts: Mapping[Path, str]) -> None:
    """Make the sandbox's folders and write its files."""
    user = wanted.user
    for folder in layout.folders:
        folder.mkdir(mode=0o755)
    for secret in (layout.state, layout.boot):
        secret.chmod(0o700)
    user.home.mkdir()
    os.chown(user.home, user.uid, user.gid)
    for name in wanted.shape.machines:
        disks = layout.machine(name)
        for folder in (disks, disks / "spool", disks / "tmp"):
            folder.mkdir()
        (disks / "tmp").chmod(0o1777)
        if name != CTL:
            layout.ssd(name).mkdir()
            os.chown(layout.ssd(name), user.uid, user.gid)
            layout.ssd(name).chmod(0o1777)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    for number in range(wanted.shape.gpus):
        # A second name of the null device (1, 3): slurmd wants a device file of each GPU.
        os.mknod(layout.etc / "dev" / f"nvidia{number}", 0o020666, os.makedev(1, 3))
    key = layout.munge / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(_KEY_BYTES))


@dataclass(frozen=True, slots=True)
class Namespaced:
    """The running machines of a sandbox, and what can be done to them."""

    layout: Layout
    settings: Settings
    keeper: ProcessId
    machines: Machines

    @classmethod
    @contextmanager
    def started(cls, layout: Layout, wanted: Settings, clock: Clock, timeout_s: float) -> Iterator[Namespaced]:
        """Start the fabric and all machines; they stay when the block ends well, and end when it fails.

        Raises:
            BootError: something did not come up in time.
        """
        machines = Machines(layout, wanted.shape, clock)
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
            end(keeper, clock)
            raise

    @property
    def cuttable(self) -> bool:
        """Links can be cut."""
        return True

    def enter(self, name: str, argv: Sequence[str], user: User, env: Mapping[str, str]) -> list[str]:
        """Return the command that runs `argv` on a machine (see `Machines.enter`)."""
        return self.machines.enter(name, argv, user, env)

    def cut(self, part: str) -> None:
        """Take the cable between a machine, leaf or spine and the switch above out."""
        self.machines.ip(self.keeper, [f"link set {network.cable(part)} down"])

    def heal(self, part: str) -> None:
        """Put the cable back in."""
        self.machines.ip(self.keeper, [f"link set {network.cable(part)} up"])

    def crash(self, node: str, *, keep_link: bool) -> None:
        """End all processes of a machine at once: with its link cut first nothing of that reaches its peers."""
        if self.machines.process_1(node) is None:
            raise NotRunningError(node, self.layout.name)
        if not keep_link:
            self.cut(node)
        self.machines.kill(node)

    def boot(self, node: str, timeout_s: float) -> None:
        """Start a crashed machine; on a running one start its daemon again if that is gone, and heal the link."""
        first = self.machines.process_1(node)
        if first is None:
            self.machines.start(self.keeper, [node], timeout_s)
            return
        self.heal(node)
        if self.daemon(node, parents()) is None:
            start = scripts.daemon(node, str(self.layout.slurm_conf), rebooted=False)
            done = command.finish(["nsenter", "-t", str(first.pid), "-a", *start], timeout_s=timeout_s)
            if done.code:
                raise BootError(node, f"{start[0]} exited {done.code}", done.stderr)

    def daemon(self, name: str, parent_of: Mapping[int, int]) -> int | None:
        """Return the process id, as seen on the host, of a machine's Slurm daemon; None when it does not run."""
        first = self.machines.process_1(name)
        if first is None:
            return None
        program = "slurmctld" if name == CTL else "slurmd"
        below = descendants(first.pid, parent_of)
        return next((pid for pid in below if arguments(pid)[:1] == [program] and ProcessId.of(pid)), None)

    def process_1(self, name: str) -> ProcessId | None:
        """Return a machine's process 1; None when it is powered off."""
        return self.machines.process_1(name)

    def links(self) -> dict[str, bool]:
        """Return each cable by what hangs on it, and whether it is whole."""
        return self.machines.links(self.keeper)

    def end(self, clock: Clock) -> None:
        """End every process of the sandbox."""
        end(self.keeper, clock)


def end(keeper: ProcessId, clock: Clock) -> None:
    """End the fabric's process 1: the kernel ends all that its namespaces hold, and with them mounts and links.

    Raises:
        BootError: it is still there (a process hangs in the kernel).
    """
    keeper.send(signal.SIGKILL)
    # Process 1 is gone only when all others of its pid namespace are (pid_namespaces(7)).
    if not until(lambda: not Path(f"/proc/{keeper.pid}").exists() or not keeper.alive, clock, _END_S):
        raise BootError("down", f"process {keeper.pid} does not end")
