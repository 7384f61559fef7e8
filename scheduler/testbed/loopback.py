"""A cluster without root: several slurmd on this host's loopback, each below a warden. Links cannot be cut."""

from __future__ import annotations

import os
import pwd
import select
import signal
import socket
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.core.clock import SystemClock, wait_until
from deeplink.core.prctl import become_subreaper
from deeplink.scheduler.slurm import command
from deeplink.scheduler.testbed import settings
from deeplink.scheduler.testbed.errors import NotRunningError, SandboxError, did_not_start, not_root
from deeplink.scheduler.testbed.processes import ProcessId, arguments, descendants, marked, table
from deeplink.scheduler.testbed.shape import CTL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from deeplink.core.clock import Clock
    from deeplink.scheduler.testbed.processes import ProcessEntry
    from deeplink.scheduler.testbed.programs import Programs
    from deeplink.scheduler.testbed.settings import DaemonPlace, SandboxSettings, User
    from deeplink.scheduler.testbed.state import SandboxLayout

MUNGE = "munge"
_MARK = "DEEPLINK_SANDBOX_FOLDER"
_ON = "DEEPLINK_SANDBOX_MACHINE"
_END_S = 10.0
STAY = b"stay\n"
_LOOK_S = 0.5
_WARDEN_END_S = 8.0
_PAUSE_S = 0.01
# Below the ports that Linux gives to outgoing connections (ip_local_port_range).
_FIRST_PORT, _LAST_PORT = 20_000, 32_000


def this_user(layout: SandboxLayout) -> User:
    """Return the user we are: without root, jobs can run as no one else."""
    uid = os.geteuid()
    try:
        known = pwd.getpwuid(uid)
    except KeyError:
        raise did_not_start("slurm", f"user {uid} has no name on this machine, and Slurm wants one") from None
    return settings.User(known.pw_name, uid, known.pw_gid, layout.homes / known.pw_name)


def own_address() -> tuple[str, bool]:
    """Return the address that this host's name stands for, and whether Slurm can be told to listen there alone.

    Slurm knows two ways: all addresses, or the one of the host's name: on most machines that is on loopback.
    """
    try:
        return socket.gethostbyname(socket.gethostname()), True
    except OSError:
        return "127.0.0.1", False


def free_ports(address: str, machines: Sequence[str]) -> dict[str, int]:
    """Return a port for each machine that no one listens on now."""
    found: dict[str, int] = {}
    # Sandboxes that start at once look from different places on.
    start = _FIRST_PORT + (os.getpid() * 97) % (_LAST_PORT - _FIRST_PORT)
    with ExitStack() as held:
        for port in [*range(start, _LAST_PORT), *range(_FIRST_PORT, start)]:
            if len(found) == len(machines):
                return found
            listener = held.enter_context(socket.socket())
            try:
                listener.bind((address, port))
            except OSError:
                continue
            found[machines[len(found)]] = port
    raise did_not_start("slurm", f"no free ports on {address}")


def place(layout: SandboxLayout, ports: Mapping[str, int], programs: Programs, user: User) -> DaemonPlace:
    """Return where the daemons of a cluster on loopback live."""
    host = socket.gethostname().partition(".")[0]
    address, alone = own_address()
    return settings.DaemonPlace(
        control=f"{host}({address})",
        port=ports[CTL],
        owner=user.name,
        own=f"{layout.machines}/%n",
        address=lambda node: f"NodeHostname={host} NodeAddr={address} Port={ports[node]}",
        more=(
            *(["CommunicationParameters=NoCtldInAddrAny,NoInAddrAny"] if alone else []),
            *([f"PluginDir={programs.plugins}"] if programs.plugins else []),
        ),
    )


def daemon(layout: SandboxLayout, programs: Programs, machine: str) -> list[str]:
    """Return the command of a machine's daemon, in the foreground."""
    munge, conf = layout.munge, str(layout.slurm_conf)
    if machine == MUNGE:
        options = {"key-file": munge / "key", "socket": layout.munge_socket, "pid-file": munge / "pid"}
        options |= {"log-file": munge / "log", "seed-file": munge / "seed"}
        # --force: a home folder that its group may write to is a warning, and no reason to refuse.
        return [programs.munged, "--foreground", "--force", *(f"--{key}={path}" for key, path in options.items())]
    if machine == CTL:
        return [programs.slurmctld, "-D", "-f", conf]
    step = ["-d", programs.slurmstepd] if programs.slurmstepd else []
    return [programs.slurmd, "-D", "-N", machine, "-f", conf, *step]


@dataclass(frozen=True, slots=True)
class Loopback:
    """The running machines of a sandbox on loopback."""

    layout: SandboxLayout
    settings: SandboxSettings
    programs: Programs
    clock: Clock

    @contextmanager
    def started(self, timeout_s: float) -> Iterator[Loopback]:
        """Start all machines; they stay when the block ends well, and end when it fails."""
        with ExitStack() as held:
            held.callback(self.end)
            handles = [self._start(MUNGE)]
            held.callback(lambda: _close(handles))
            if not wait_until(self.layout.munge_socket.exists, self.clock, timeout_s):
                said = (self.layout.log / f"{MUNGE}.log").read_text(encoding="utf-8", errors="replace")
                raise did_not_start(MUNGE, f"no socket after {timeout_s:g} s", said[-2000:])
            handles += [self._start(machine) for machine in self.settings.shape.machines]
            yield self
            for handle in handles:
                os.write(handle, STAY)
            held.pop_all()
            _close(handles)

    def _start(self, machine: str) -> int:
        """Start a machine's warden, and return what to write to so that it stays."""
        argv = [sys.executable, "-m", "deeplink.scheduler.testbed.loopback"]
        argv += daemon(self.layout, self.programs, machine)
        env = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "SRUN"))}
        env |= {**self.programs.env, "PATH": self.programs.path, "SLURM_CONF": str(self.layout.slurm_conf)}
        env[_MARK] = str(self.layout.folder)
        reads, writes = os.pipe()
        try:
            with (self.layout.log / f"{machine}.log").open("ab") as out:
                process = command.spawn(argv, env=env, cwd=self.layout.folder, stdin=reads, stdout=out, stderr=out)
        except BaseException:
            os.close(writes)
            raise
        finally:
            os.close(reads)
        process.returncode = 0  # it outlives us: no one here waits for it
        who = ProcessId.of(process.pid)
        if who is None:
            os.close(writes)
            raise did_not_start(machine, "its warden ended at once")
        who.keep(self._pid_file(machine))
        return writes

    def _pid_file(self, machine: str) -> Path:
        return self.layout.boot / f"{machine}.pid"

    def process_1(self, machine: str) -> ProcessId | None:
        """Return the process that all others of a machine end with; None when it is powered off."""
        return ProcessId.kept(self._pid_file(machine))

    def enter(self, machine: str, argv: Sequence[str], env: Mapping[str, str], *, root: bool) -> list[str]:
        """Return the command that runs `argv` on a machine, in the user's home."""
        if root and os.geteuid() != 0:
            raise not_root("exec --root")
        if self.process_1(machine) is None:
            raise NotRunningError(machine, self.layout.name)
        named = {_ON: str(self.layout.machine(machine))}
        named |= {} if machine == CTL else {"SLURMD_NODENAME": machine}
        variables = [f"{key}={value}" for key, value in {**env, **named}.items()]
        home = str(self.settings.user.home)
        return ["setpriv", "--pdeathsig=TERM", "env", "-i", "-C", home, *variables, *argv]

    def cut(self, part: str) -> None:
        """Take the cable out that connects a machine, leaf or spine to the switch above."""
        raise _no_network(f"cut {part}")

    def heal(self, part: str) -> None:
        """Put the cable back in; raises what `cut` raises."""
        raise _no_network(f"heal {part}")

    def crash(self, machine: str, *, keep_link: bool) -> None:
        """End all processes of a machine at once, its link cut first unless that is kept."""
        del keep_link
        warden = self.process_1(machine)
        if warden is None:
            raise NotRunningError(machine, self.layout.name)
        warden.send(signal.SIGTERM)
        if not wait_until(lambda: not warden.alive, self.clock, _END_S):
            raise did_not_start("crash", f"process {warden.pid} does not end")
        for who in self._brought_to(machine):
            who.send(signal.SIGKILL)

    def _brought_to(self, machine: str) -> list[ProcessId]:
        """Return what `exec` started there: below no warden, as jobs are that it submitted from there."""
        found, processes = marked(f"{_ON}={self.layout.machine(machine)}"), table()
        wardens = [who for one in self.settings.shape.machines if (who := self.process_1(one)) is not None]
        jobs = {who for warden in wardens for who in descendants(warden.pid, processes)}
        return [who for who in found if who not in jobs]

    def boot(self, machine: str, timeout_s: float) -> None:
        """Start a crashed machine; on a running one start its daemon if that is gone, and heal its link."""
        warden = self.process_1(machine)
        if warden is None:
            handle = self._start(machine)
            os.write(handle, STAY)
            os.close(handle)
        else:
            warden.send(signal.SIGHUP)
        if not wait_until(lambda: self.daemon(machine, table()) is not None, self.clock, timeout_s):
            raise did_not_start(machine, f"its daemon does not run after {timeout_s:g} s")

    def daemon(self, machine: str, processes: Mapping[int, ProcessEntry]) -> int | None:
        """Return the number, on the host, of a machine's Slurm daemon; None when it does not run."""
        warden = self.process_1(machine)
        if warden is None:
            return None
        program = daemon(self.layout, self.programs, machine)[0]
        below = descendants(warden.pid, processes)
        return next((who.pid for who in below if arguments(who.pid)[:1] == [program] and who.alive), None)

    def links(self) -> dict[str, bool]:
        """Return each cable by what hangs on it, and whether it is whole; empty where there are none."""
        return {}

    def end(self) -> None:
        """End every process of the sandbox."""
        sweep(self.layout, self.clock)


def _no_network(verb: str) -> SandboxError:
    return SandboxError(
        f"{verb}: the nodes of this sandbox share the host's loopback, so there is no link to cut or heal",
        remedy="Bring the sandbox up as root for links that can be cut; `crash` works here too.",
        exit_code=2,
    )


def _close(handles: Sequence[int]) -> None:
    for handle in handles:
        os.close(handle)


def sweep(layout: SandboxLayout, clock: Clock) -> None:
    """End every process of a sandbox on loopback, whole or in pieces."""
    wardens = [who for file in layout.boot.glob("*.pid") if (who := ProcessId.kept(file)) is not None]
    for warden in wardens:
        warden.send(signal.SIGTERM)
    ended = wait_until(lambda: not any(warden.alive for warden in wardens), clock, _END_S)
    for who in marked(f"{_MARK}={layout.folder}"):
        who.send(signal.SIGKILL)
    if not ended:
        raise did_not_start("down", f"processes {[warden.pid for warden in wardens if warden.alive]} do not end")


class Warden:
    """Process 1 of a machine: keeps its daemon, and adopts every orphan, so that nothing of it gets away.

    It ends, and with it everything below it, on SIGTERM, or when standard input ends before `stay` was read.
    SIGHUP starts a daemon again that is gone.
    """

    def __init__(self, daemon: Sequence[str]) -> None:
        self._daemon = daemon
        self._running = 0  # the daemon's process id
        self._ending = self._starting = False

    def run(self) -> None:
        """Return once all is over."""
        become_subreaper()
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        # Signals end the wait below through this pipe; what they mean is decided there.
        signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, self._noted)
        self._start()
        stdin: int | None = sys.stdin.fileno()
        while not self._ending:
            ready, _, _ = select.select([reads, *([] if stdin is None else [stdin])], [], [], _LOOK_S)
            if reads in ready:
                os.read(reads, 4096)
            if stdin in ready and stdin is not None:
                if os.read(stdin, len(STAY)) != STAY:
                    self._ending = True
                stdin = None
            self._reap()
            if self._starting:
                self._starting = False
                self._start()
        self._end()

    def _noted(self, number: int, _frame: object) -> None:
        if number == signal.SIGHUP:
            self._starting = True
        elif number != signal.SIGCHLD:
            self._ending = True

    def _start(self) -> None:
        if not self._running:
            # Should the warden be killed, its daemon goes with it.
            process = command.spawn(["setpriv", "--pdeathsig=KILL", *self._daemon])
            self._running = process.pid
            process.returncode = 0  # `_reap` takes its exit code, as it does for every orphan

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid == self._running:
                self._running = 0

    def _end(self) -> None:
        clock = SystemClock()
        deadline = clock.monotonic() + _WARDEN_END_S
        while below := descendants(os.getpid(), table()):
            for who in below:
                who.send(signal.SIGKILL)
            clock.sleep(_PAUSE_S)
            self._reap()
            if clock.monotonic() > deadline:
                sys.exit(f"still there after {_WARDEN_END_S:g} s: {below}")


if __name__ == "__main__":
    Warden(sys.argv[1:]).run()
