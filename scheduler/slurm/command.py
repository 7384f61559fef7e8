"""The one place that starts processes: argument lists only, never a shell, every wait bounded."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn, Protocol

from deeplink.core.errors import DeepLinkError
from deeplink.core.private import private_folder
from deeplink.core.publish import write_text
from deeplink.core.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


COMMAND_TIMEOUT_S = 20.0
"""Bound on one short command. Slurm's own clients give up on a dead controller after 9 s with default settings."""
_KILLED_WAIT_S = 2.0  # a process that hangs in the kernel, on dead storage, does not even end when killed
_umasks: list[int] = []  # what is spawned gets the last one
_unfinished: set[subprocess.Popen[bytes]] = set()
_ODD = re.compile(r"[^\n\t -~]")
_PLAIN = bytes(range(ord(" "), ord("~") + 1)) + b"\n\t"
_UNANSWERED = re.compile(r"^slurm_load_\w+ error: ", re.MULTILINE | re.ASCII)
PIPE = subprocess.PIPE
DEVNULL = subprocess.DEVNULL
Process = subprocess.Popen
TimeoutExpired = subprocess.TimeoutExpired
STAND_INS = ("srun", "torchrun")
_MARK = b"-m deeplink shim "
_HEAD = 4096  # bytes
FORWARDED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_CHUNK = 1 << 16
_SILENT = re.compile(
    r"Unable to contact slurm controller|Socket timed out on send/recv operation|in standby mode"
    r"|Communication connection failure|Communication shutdown failure|Zero Bytes were transmitted or received"
)
_STEP = re.compile(r"srun: error: Unable to (?:confirm allocation|create step) for job \d+: (?P<why>.*)")
_COMING_UP = "Job is pending execution"
TAKEN = "Memory required by task is not available"
"""Of a step before that is not over, or of a node that has never had so much: that alone time can tell."""


class CommandError(DeepLinkError):
    """A command ran and failed."""

    def __init__(self, argv: Sequence[str], code: int, stderr: str) -> None:
        said = stderr.strip() or "(it said nothing)"
        super().__init__(f"{argv[0]} exited {code}: {said}")
        self.argv, self.code, self.stderr = tuple(argv), code, stderr


class CommandTimeoutError(DeepLinkError):
    """A command did not end in time and was killed."""

    def __init__(self, argv: Sequence[str], timeout_s: float) -> None:
        super().__init__(
            f"{argv[0]} did not answer within {timeout_s:g} s and was stopped",
            remedy="Is slurmctld up? `scontrol ping` tells; `sinfo` should answer at once.",
        )
        self.argv, self.timeout_s = tuple(argv), timeout_s


class CommandMissingError(DeepLinkError):
    """A program is not installed, or not on PATH."""

    exit_code = 127

    def __init__(self, program: str) -> None:
        super().__init__(
            f"{program} is not on PATH",
            remedy="Install Slurm's client commands, or try `deeplink sandbox up` for a cluster on this machine.",
        )
        self.program = program


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended, and what it wrote."""

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str


class Runner(Protocol):
    """Runs one short command and returns its standard output. Tests pass a function of their own."""

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Return what `run` returns, raise what it raises."""


def finish(
    argv: Sequence[str],
    *,
    timeout_s: float = COMMAND_TIMEOUT_S,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Finished:
    """Run a command to its end and tell how it ended; its process group is killed when the time is up."""
    return ended(begun(argv, env=env, cwd=cwd), argv, timeout_s=timeout_s, stdin=stdin)


def begun(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start what `ended` waits for: for who has something else to do meanwhile. `end_unfinished` ends it, too."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if env is None else dict(env),
            cwd=cwd,
            start_new_session=True,
        )
    except FileNotFoundError as missing:
        raise CommandMissingError(argv[0]) from missing
    _unfinished.add(process)
    return process


def ended(process: subprocess.Popen[bytes], argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> Finished:
    """Wait for what `begun` started, as `finish` does."""
    try:
        stdout, stderr = process.communicate(stdin.encode(errors="surrogateescape"), timeout=timeout_s)
    except subprocess.TimeoutExpired as late:
        _kill(process)
        raise CommandTimeoutError(argv, timeout_s) from late
    except BaseException:
        _kill(process)
        raise
    finally:
        _unfinished.discard(process)
    return Finished(tuple(argv), process.returncode, text_of(stdout), text_of(stderr))


def text_of(said: bytes) -> str:
    r"""Return what a command wrote as text that can be kept, sent and shown: here foreign text enters.

    Job names, reasons and comments hold any bytes. What is no UTF-8, and control characters but newlines and tabs,
    come out as escapes.

    >>> text_of(b"caf\xe9 \x1b[2J\r\n"), text_of("café".encode())
    ('caf\\xe9 \\x1b[2J\n', 'café')
    """
    if not said.translate(None, _PLAIN):  # the regular expression takes 20 times as long, and Slurm says megabytes
        return said.decode("ascii")
    text = said.decode(errors="backslashreplace").replace("\r\n", "\n")
    return _ODD.sub(lambda odd: printable(odd[0]), text)


def _kill(process: subprocess.Popen[bytes]) -> None:
    kill_group(process)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_WAIT_S)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what was started here with all that it started, without waiting for its end."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def end_unfinished() -> None:
    """Kill every command that a thread still waits for in `finish`: for who ends without those threads."""
    for process in tuple(_unfinished):
        if process.poll() is None:
            kill_group(process)


def answer_of(done: Finished) -> str:
    """Return what a command that has ended wrote to standard output.

    Where the controller does not answer, `scontrol show topology` says so on standard error, writes nothing else
    and exits 0 (Slurm 22.05, measured): that is no empty topology.
    """
    if done.code or (not done.stdout.strip() and _UNANSWERED.search(done.stderr)):
        raise CommandError(done.argv, done.code, done.stderr)
    return done.stdout


def run(argv: Sequence[str], /, *, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Run a short command and return what it wrote to standard output."""
    return answer_of(finish(argv, timeout_s=timeout_s))


def within(limit_s: float) -> Runner:
    """Return a `run` in which no command takes longer than this."""

    def bounded(argv: Sequence[str], /, *, timeout_s: float = limit_s) -> str:
        return run(argv, timeout_s=min(timeout_s, limit_s))

    return bounded


class StartedEarly:
    """Runs short commands; one of them was started when this was made, while its caller does something else."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = tuple(argv)
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(CommandMissingError):  # who wants the answer gets the error
            self._process = begun(argv)

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Return what `run` returns, raise what it raises."""
        if tuple(argv) != self._argv or self._process is None:
            return run(argv, timeout_s=timeout_s)
        process, self._process = self._process, None
        return answer_of(ended(process, argv, timeout_s=timeout_s))


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int | IO[bytes] | None = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    new_session: bool = True,
) -> subprocess.Popen[bytes]:
    """Start a command that lives on, and return its handle; the caller bounds every wait on it."""
    try:
        return subprocess.Popen(
            argv,
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=new_session,
            umask=_umasks[-1] if _umasks else -1,
        )
    except FileNotFoundError as missing:
        raise CommandMissingError(argv[0]) from missing


@contextlib.contextmanager
def own_files_private() -> Iterator[None]:
    """Have files that this process itself creates be its user's alone; what it spawns has the umask of now."""
    _umasks.append(os.umask(0o077))
    try:
        yield
    finally:
        os.umask(_umasks.pop())


def detach(argv: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None) -> int:
    """Start a command that outlives us and has nothing of ours but its log; return its process id."""
    adding = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.fspath(log), adding, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
        *((os.POSIX_SPAWN_CLOSE, number) for number in _handed_down()),
    ]
    variables = dict(os.environ if env is None else env)
    log.open("a", encoding="utf-8").close()  # a log that cannot be written is told apart from a missing program
    try:
        return os.posix_spawnp(argv[0], list(argv), variables, file_actions=actions, setsid=True)
    except FileNotFoundError as missing:
        raise CommandMissingError(argv[0]) from missing


def has_ended(number: int) -> bool:
    """Whether a command that this process started with `detach` has ended; then nothing is left of it."""
    try:
        return os.waitpid(number, os.WNOHANG)[0] == number
    except ChildProcessError:
        return True


def _handed_down() -> list[int]:
    """Return files that our caller opened and a program we start would hold, too: its locks and pipes."""
    with contextlib.suppress(OSError):
        numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
        return [number for number in numbers if number > 2 and _is_handed_down(number)]  # noqa: PLR2004
    return []


def _is_handed_down(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:  # that of the listing itself
        return False


def become(argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> NoReturn:
    """Turn this process into a command: terminal, signals and exit code are the command's own from here on."""
    try:
        os.execvpe(argv[0], list(argv), dict(os.environ if env is None else env))  # noqa: S606 - what it is for
    except FileNotFoundError as missing:
        raise CommandMissingError(argv[0]) from missing


def run_passing_on(argv: Sequence[str], *, env: Mapping[str, str], write: Callable[[bytes], None]) -> int:
    """Run a command to its end and return its exit code, or minus the signal that ended it.

    Standard input and error are ours. It ends when the command ends, whenever that is: `sbatch --wait` waits for a
    job. Must be called from the main thread.
    """
    with _forwarding() as started:
        ours, theirs = _channel()
        try:
            try:
                process = spawn(argv, env=env, stdin=None, stdout=theirs, new_session=False)
            finally:
                os.close(theirs)
            started(process)
            while data := _read(ours):
                write(data)
        finally:
            os.close(ours)
        return process.wait()


def _channel() -> tuple[int, int]:
    """Return both ends of a terminal: into a pipe a program writes only when it ends, or has written much.

    Where there are no terminals to be had (a container without devpts) it is a pipe all the same.
    """
    try:
        ours, theirs = os.openpty()
    except OSError:
        return os.pipe()
    plain = termios.tcgetattr(theirs)
    plain[1] &= ~termios.OPOST  # a newline stays a newline
    termios.tcsetattr(theirs, termios.TCSANOW, plain)
    return ours, theirs


def _read(reading: int) -> bytes:
    try:
        return os.read(reading, _CHUNK)
    except OSError:  # how a terminal says that no one holds its other end
        return b""


@contextlib.contextmanager
def _forwarding() -> Iterator[Callable[[Process[bytes]], None]]:
    """Pass signals on to the process that is handed to what this gives; those that came before, then."""
    waiting: list[int] = []
    running: list[Process[bytes]] = []

    def note(number: int, _frame: object) -> None:
        if running:
            running[0].send_signal(number)
        else:
            waiting.append(number)

    def started(process: Process[bytes]) -> None:
        running.append(process)
        for number in waiting:
            process.send_signal(number)

    # What our caller ignores (nohup, a shell's background job) we and the command go on ignoring.
    caught = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in caught}
    try:
        yield started
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_as(code: int) -> int:
    """Return the exit code to end with; where a signal ended the command, end by the same one."""
    if code >= 0:
        return code
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to reset
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code


def make_stand_ins(folder: Path) -> None:
    """Leave stand-ins for srun and torchrun in `folder`, for the front of a job's PATH."""
    private_folder(folder)
    for program in STAND_INS:
        text = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m deeplink shim {program} "$@"\n'
        standin = folder / program
        if not standin.is_file() or standin.read_text(encoding="utf-8") != text:
            write_text(standin, text, mode=0o755)


def real_program(name: str, path: str) -> str | None:
    """Return the file that `name` stands for on `path`, leaving our stand-ins out; None where there is none."""
    for folder in filter(None, path.split(os.pathsep)):
        found = shutil.which(name, path=folder)
        if found is not None and not _stands_in(Path(found)):
            return found
    return None


def _stands_in(program: Path) -> bool:
    try:
        with program.open("rb") as file:
            return _MARK in file.read(_HEAD)
    except OSError:  # executable but not readable: none of ours
        return False


def is_silence(said: str) -> bool:
    """Whether a command that failed with these words got no answer.

    >>> is_silence("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    True
    >>> is_silence("slurm_requeue error: Invalid job id specified")
    False
    """
    return _SILENT.search(said) is not None


def is_unanswered(problem: DeepLinkError) -> bool:
    """Whether a command got no answer, by the error it was raised with: it may be sent again.

    It may have been heard all the same: as it takes a job back, Slurm ends the very scontrol by which that asked.
    """
    if isinstance(problem, CommandError):
        return problem.code < 0 or is_silence(problem.stderr)
    return isinstance(problem, CommandTimeoutError)


def unstarted_step(line: str) -> str:
    """Return why srun got no step, where it may get one later; empty for any other line of srun's.

    >>> unstarted_step("srun: error: Unable to confirm allocation for job 7: Job is pending execution")
    'Job is pending execution'
    >>> unstarted_step("srun: error: Unable to create step for job 7: Job/step already completing or completed")
    ''
    """
    found = _STEP.match(line)
    if found is None:
        return ""
    why = found["why"].strip()
    return why if why in {_COMING_UP, TAKEN} or is_silence(why) else ""
