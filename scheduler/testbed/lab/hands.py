"""Does the steps of a fault to a sandbox that is up.

As a program it is a straggler's other half: it stops processes and lets them go on by turns, until it is told to
end or none is left: `python -m deeplink.scheduler.testbed.lab.hands SHARE PERIOD_S PID:START...`.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.core.descriptors import opened
from deeplink.core.publish import published_file
from deeplink.scheduler.slurm import command
from deeplink.scheduler.testbed import state
from deeplink.scheduler.testbed.errors import did_not_start
from deeplink.scheduler.testbed.lab import scene
from deeplink.scheduler.testbed.lab.scene import FaultStep, Started, Verb
from deeplink.scheduler.testbed.namespaced import daemon_command
from deeplink.scheduler.testbed.processes import ProcessId, arguments, table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from deeplink.scheduler.testbed.cluster import Sandbox

DUTY = "deeplink.scheduler.testbed.lab.hands"
_LONGEST_DUTY_S = 3600.0
_COMMAND_S = 20.0


def do(sandbox: Sandbox, step: FaultStep) -> None:  # noqa: C901, PLR0912 - one branch for each verb
    """Do one step; done twice it changes nothing."""
    on, words = step.on, step.words
    match step.verb:
        case Verb.CUT:
            sandbox.cut(on)
        case Verb.HEAL:
            sandbox.heal(on)
        case Verb.OFF:
            sandbox.crash(on, keep_link=not sandbox.has_network)
        case Verb.BOOT:
            sandbox.boot(on)
        case Verb.PAUSE:
            sandbox.clock.sleep(float(words[0]))
        case Verb.SIGNAL:
            for who in processes_of(words[1:]):
                who.send(signal.Signals[words[0]])
        case Verb.RUN:
            _run(sandbox, on, words)
        case Verb.DAEMON:
            _daemon(sandbox, on)
        case Verb.FREEZE:
            state.freeze(sandbox.layout)
        case Verb.THAW:
            state.thaw(sandbox.layout)
        case Verb.AGAIN:
            _again(sandbox, on, Started.unpacked(words[0]))
        case Verb.DUTY:
            if not _on_duty(words):
                _leave(command.spawn([sys.executable, "-m", DUTY, *words], stdout=command.DEVNULL))
        case Verb.REST:
            for who in _on_duty(words):
                who.send(signal.SIGTERM)
        case Verb.TEAR:
            _tear(Path(words[0]), Path(words[1]))
        case Verb.MEND:
            _mend(Path(words[0]), Path(words[1]))
        case Verb.CHMOD:
            _chmod(Path(words[0]), int(words[1], 8), int(words[2], 8))
        case Verb.WRITE:
            _write(sandbox, Path(words[0]), words[1])
        case Verb.REMOVE:
            Path(words[0]).unlink(missing_ok=True)


def _run(sandbox: Sandbox, machine: str, argv: tuple[str, ...]) -> None:
    done = sandbox.run(machine, argv, root=True, timeout_s=_COMMAND_S)
    if done.code and not _is_so_already(argv, done.stderr):
        raise command.CommandError(argv, done.code, done.stderr)


def _is_so_already(argv: tuple[str, ...], said: str) -> bool:
    """Whether a command failed because a rule is there, or gone, already.

    >>> _is_so_already(("ip", "rule", "add"), "RTNETLINK answers: File exists")
    True
    >>> _is_so_already(("sh", "-c", "mount x y"), "mount: y: No such file or directory")
    False
    """
    return argv[:2] == ("ip", "rule") and ("File exists" in said or "No such file" in said)


def _daemon(sandbox: Sandbox, machine: str) -> None:
    if sandbox.hardware.daemon(machine, table()) is not None:
        return
    if not sandbox.has_network:
        sandbox.boot(machine)
        return
    argv = daemon_command(machine, str(sandbox.layout.slurm_conf), rebooted=False)
    done = sandbox.run(machine, argv, root=True, timeout_s=_COMMAND_S)
    if done.code:
        raise did_not_start(machine, f"{argv[0]} exited {done.code}", done.stderr)


def _again(sandbox: Sandbox, machine: str, started: Started) -> None:
    if any(arguments(who.pid) == [*started.argv] for who in scene.processes_on(sandbox, machine)):
        return
    argv = sandbox.hardware.enter(machine, started.argv, started.env, root=started.uid == 0)
    with open(started.log or os.devnull, "ab") as log:  # noqa: PTH123 - either of the two
        _leave(command.spawn(argv, stdout=log, stderr=log))


def _leave(process: command.Process[bytes]) -> None:
    """Let a process live on: no one here waits for it."""
    process.returncode = 0


def _on_duty(words: tuple[str, ...]) -> list[ProcessId]:
    tail = [DUTY, *words]
    return [
        who for pid in table() if arguments(pid)[-len(tail) :] == tail and (who := ProcessId.of(pid)) is not None
    ]


def _tear(file: Path, kept: Path) -> None:
    if kept.exists():
        return
    kept.parent.mkdir(exist_ok=True)
    shutil.copy2(file, kept)
    os.truncate(file, file.stat().st_size // 2)


def _mend(file: Path, kept: Path) -> None:
    # Whoever wrote a new one there, or removed it, is not undone.
    with suppress(FileNotFoundError):
        if file.stat().st_size == kept.stat().st_size // 2:
            shutil.copyfile(kept, file)
    kept.unlink(missing_ok=True)


def _chmod(folder: Path, mode: int, new: int) -> None:
    # Whoever removed the folder, or gave it a mode, is not undone; nor does a link in its place lead us elsewhere.
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
    with suppress(FileNotFoundError, NotADirectoryError), opened(folder, flags) as held:
        if stat.S_IMODE(os.fstat(held).st_mode) == mode:
            os.chmod(f"/proc/self/fd/{held}", new)  # noqa: PTH101 - O_PATH takes no fchmod


def _write(sandbox: Sandbox, file: Path, text: str) -> None:
    with published_file(file, mode=0o644) as draft:
        draft.write_text(text, encoding="utf-8")
        if os.geteuid() == 0:  # before it appears: whom it is for may read and remove it at once
            os.chown(draft, sandbox.user.uid, sandbox.user.gid)


def processes_of(words: Sequence[str]) -> list[ProcessId]:
    """Return the processes that `PID:START` words name."""
    pairs = (word.partition(":") for word in words)
    return [ProcessId(int(pid), int(start)) for pid, _, start in pairs]


def take_turns(words: Sequence[str]) -> int:
    """Take turns; 0 once it is over, with every process going on."""
    share, period_s, those = float(words[0]), float(words[1]), processes_of(words[2:])
    ended = False

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal ended
        ended = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    deadline = time.monotonic() + _LONGEST_DUTY_S
    while not ended and time.monotonic() < deadline:
        stopped = [who.send(signal.SIGSTOP) for who in those]
        time.sleep(share * period_s)
        for who in those:
            who.send(signal.SIGCONT)
        if not any(stopped):
            break
        time.sleep((1 - share) * period_s)
    return 0


if __name__ == "__main__":
    sys.exit(take_turns(sys.argv[1:]))
