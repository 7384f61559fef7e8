"""A process that waits in a slot with a rank's imports done, to become that rank.

It is started with the rank's very command, and stops before the script (`preload/`). So arguments, `__main__`,
exit code and traceback are Python's own doing. What cannot be right - another environment, say - starts afresh.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.launch.environment import RankTask, rank_environment, slurm_variables
from deeplink.scheduler.slurm.sbatch_options import names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from deeplink.scheduler.launch.environment import Launch, SlotPlace

LOADS_S = 300.0  # imports from a cold shared file system take minutes; one that hangs is ended after so long
TAKEN_S = 5.0  # what does not go on within this, once it may, is ended, and the rank starts afresh
PROBE_S = 60.0
ROOM = 32 << 10  # bytes for what of the rank's environment differs; TF_CONFIG has 30 bytes for each node
_HOOK, _VARIABLE = Path(__file__).with_name("preload"), "DEEPLINK_PRELOADING"
NOTHING = "nothing"  # as a reason: the script begins with nothing that could be imported for it
_HOOKED = 79  # as `preload/deeplink_preload.py` has them
_LARGEST = 1 << 20
_PYTHON = re.compile(r"python\d*(\.\d+)?t?")
_ALONE, _WITH_VALUE = frozenset("uBOqbdPRs"), frozenset("WX")  # Python's options that leave the hook in effect
# What is another for each attempt or rank. Where an import has asked for one of these it is not as it was.
_VARYING = names(
    """RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE
    MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS CROSS_RANK CROSS_SIZE LOCAL_SIZE
    JAX_COORDINATOR_ADDRESS TF_CONFIG"""
)


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """A command that is Python with a script or a module."""

    program: str  # as named
    options: tuple[str, ...]
    script: str = ""
    module: str = ""

    @classmethod
    def of(cls, command: Sequence[str], path: str | None) -> PythonCommand | None:
        """Read a command; None where it is another, or nobody can tell.

        >>> PythonCommand.of(["bash", "train.sh"], None), PythonCommand.of(["python3", "-c", "pass"], os.defpath)
        (None, None)
        """
        program, *words = command
        found = shutil.which(program, path=path)
        if found is None or not _PYTHON.fullmatch(Path(program).name) or not _is_binary(found):
            return None
        options: list[str] = []
        while words and words[0].startswith("-"):
            word = words.pop(0)
            if word == "-m" and words:
                return cls(program, tuple(options), module=words[0])
            options.append(word)
            if word[1:2] in _WITH_VALUE and len(word) > 1:
                if len(word) == 2 and words:  # noqa: PLR2004 - its value is the next word
                    options.append(words.pop(0))
            elif not word[1:] or not set(word[1:]) <= _ALONE:
                return None
        return cls(program, tuple(options), script=words[0]) if words else None


def _is_binary(program: str) -> bool:
    """Whether it is no script: that may start Python as it likes."""
    try:
        with open(program, "rb") as opened:  # noqa: PTH123
            return opened.read(4) == b"\x7fELF"
    except OSError:
        return False


def predicted(launch: Launch, slot: int, place: SlotPlace, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank of the next attempt in this slot, as far as it can be known."""
    here = place.here
    nodes = [facts.node for facts in launch.nodes]
    if here not in nodes:  # a spare: as if in place of the first node
        spare = next(facts for facts in launch.spares if facts.node == here)
        launch = replace(launch, nodes=(spare, *launch.nodes[1:]))
        nodes[0] = here
    rank = sum(launch.started[: nodes.index(here)]) + slot
    task = RankTask(rank, slot, here)
    slurm = slurm_variables(launch, task, place.of_job)
    env = rank_environment(launch, task, {**given, **slurm})
    # Without what is another for each rank and attempt: an import that copies the whole environment has asked for
    # all that is in it. And who has these is taken for a rank.
    of_rank = {name for name, value in env.items() if name in slurm or given.get(name) != value}
    return {name: value for name, value in env.items() if not (name in of_rank and _may_vary(name))}


class PreloadedProcess:
    """The process, from its fork until it is a rank or has ended."""

    def __init__(
        self,
        command: Sequence[str],
        python: PythonCommand,
        modules: Sequence[str],
        env: Callable[[], Mapping[str, str]],
        prepare: Callable[[], None],
    ) -> None:
        """`env` and `prepare`, of signals and its group, are called in processes that may wait for storage.

        No `modules`: the script's own.
        """
        self._command, self._env, self._asked = tuple(command), env, frozenset[str]()
        self._ends = time.monotonic() + LOADS_S
        self.is_ready, self.failed = False, ""
        self.status: int | None = None  # once it has ended, for waitpid
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(0.0)
        self.pid = os.fork()
        if not self.pid:
            try:
                prepare()
                _exec(command, python, modules, env(), theirs)
            except (DeepLinkError, OSError) as problem:
                theirs.send(json.dumps({"failed": str(problem)}).encode())
            finally:
                os._exit(1)
        theirs.close()

    @property
    def left_s(self) -> float:
        """For how long it may still load."""
        return self._ends - time.monotonic()

    def listen(self) -> None:
        """Hear what it says; once it says that it failed, or has ended, `failed` tells why."""
        try:
            said = self.control.recv(_LARGEST)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self.failed = self.failed or "it ended"
            return
        told: dict[str, Any] = json.loads(said)
        self.failed = told.get("failed", "")
        if "loaded" in told:
            self.is_ready, self._asked = bool(told["loaded"]), frozenset(told["asked"])
            self.failed = "" if self.is_ready else NOTHING

    def end(self) -> None:
        """Kill it; who forked it waits for it."""
        self.control.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def hand_over(self, command: Sequence[str], env: Mapping[str, str], locks: Iterable[int]) -> str:
        """Let it go on as the rank with this environment and these locks; return why not, empty where it does.

        Called in a child of the slot's: it may wait.
        """
        if tuple(command) != self._command:
            return self._refused("the rank's command is another")
        env = {**env, "SLURM_TASK_PID": str(self.pid)} if "SLURM_TASK_PID" in env else env
        before = self._env()
        changed = {name: value for name, value in env.items() if before.get(name) != value}
        gone = [name for name in before if name not in env]
        differs = {*changed, *gone}
        if unlike := sorted(name for name in differs if not _may_vary(name)):
            return self._refused(f"{unlike[0]} is another")
        if asked := sorted(differs & self._asked):
            return self._refused(f"an import has asked for {asked[0]}, which is another")
        if sum(len(os.fsencode(f"{name}={value}")) + 1 for name, value in changed.items()) > ROOM:
            return self._refused("its environment is too large")
        self.control.settimeout(TAKEN_S)
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", locks))]
        try:
            self.control.sendmsg([json.dumps({"set": changed, "unset": gone}).encode()], passed)
            if self.control.recv(16) == b"ok":
                return ""
        except OSError:
            pass
        return self._refused("it did not go on")

    def _refused(self, why: str) -> str:
        self.end()
        return why


def _may_vary(name: str) -> bool:
    return name in _VARYING or name.startswith(("DEEPLINK_", "SLURM_"))


def _exec(
    command: Sequence[str],
    python: PythonCommand,
    modules: Sequence[str],
    env: Mapping[str, str],
    control: socket.socket,
) -> None:
    before = env.get("PYTHONPATH")
    hooked = {**env, "PYTHONPATH": os.pathsep.join(filter(None, (str(_HOOK), before)))}
    # One that goes by the hook would run the user's script, and be no rank.
    probe = [python.program, *python.options, "-c", ""]
    pid = os.fork()
    if not pid:
        signal.alarm(int(PROBE_S))
        os.execvpe(python.program, probe, {**hooked, _VARIABLE: json.dumps({"pythonpath": before})})  # noqa: S606
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != _HOOKED:
        control.send(json.dumps({"failed": f"{python.program} is no Python that can"}).encode())
        os._exit(0)
    told = {
        "control": control.fileno(),
        "modules": [*modules] or None,
        "pythonpath": before,
        "script": python.script,
        "module": python.module,
    }
    control.set_inheritable(True)
    # The last one, with room for the rank's own: a reader of /proc takes the last of two.
    room = json.dumps(told).ljust(ROOM)
    os.execvpe(command[0], [*command], {**hooked, _VARIABLE: room})  # noqa: S606 - the user's own command
