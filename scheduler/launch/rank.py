"""Started once per rank, on its node: sets the rank's environment and becomes the user's command.

`python -m deeplink.scheduler.launch.rank --task RANK LOCAL_RANK NODE | --mpi -- COMMAND...`; with --mpi, mpiexec
says which rank it is. Where Slurm starts ranks, slots of theirs do what this program does.
"""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from deeplink.core.clock import SystemClock, wait_until
from deeplink.core.descriptors import try_lock
from deeplink.core.errors import DeepLinkError
from deeplink.rpc.tokens import token_file_of
from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.launch.container import entering
from deeplink.scheduler.launch.environment import (
    Launch,
    RankTask,
    left_launch,
    members_variable,
    mpi_task,
    not_launched,
    rank_environment,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PREDECESSOR_WAIT_S = 30.0  # How long a rank waits for the one it replaces to be gone; Slurm kills it long before
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as shells have them


def main(argv: Sequence[str]) -> int:
    """Become the command; returns an exit code only where that fails."""
    try:
        launch = left_launch(os.environ)
        task, command = arguments(list(argv), launch, os.environ)
        program_of(command, launch, task, os.environ).start()
    except DeepLinkError as problem:
        sys.stderr.write(f"deeplink rank: {problem}\n  {problem.remedy}\n")
        return problem.exit_code


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What a rank's process is to become."""

    command: tuple[str, ...]
    env: dict[str, str]
    locks: tuple[int, ...]  # what it holds to its end, open

    def start(self) -> NoReturn:
        """Become it. Raises LaunchError."""
        try:
            os.execvpe(self.command[0], [*self.command], self.env)  # noqa: S606 - the user's own, a list
        except FileNotFoundError as problem:
            code, why = NOT_FOUND, "no such command"
            raise self._unstarted(why, code) from problem
        except OSError as problem:
            # Of the command, as a shell has it; or of the node, which has no memory, say, or no such storage.
            code = NOT_EXECUTABLE if problem.errno in {errno.EACCES, errno.ENOEXEC, errno.ENOTDIR} else 1
            raise self._unstarted(problem.strerror or str(problem), code) from problem

    def _unstarted(self, why: str, code: int) -> LaunchError:
        remedy = "Every node must have it, on PATH or where it is named, and room to start it."
        return LaunchError(f"{self.command[0]}: {why} on {self.env['DEEPLINK_NODE']}", remedy, exit_code=code)


def program_of(command: Sequence[str], launch: Launch, task: RankTask, given: Mapping[str, str]) -> RankProgram:
    """Return what this process is to become as a rank; waits for its predecessor's end.

    `given`: the environment, to which a rank's own is added. Raises DeepLinkError.
    """
    env = rank_environment(launch, task, given)
    env["DEEPLINK_MEMBERS"] = members_variable(given)
    env["DEEPLINK_TOKEN_FILE"] = str(token_file_of(Path(env["DEEPLINK_TOKEN_FILE"]), launch.attempt))
    if launch.container is not None and not launch.container.is_entered_by_srun:
        command = entering(launch.container, command, env, here=str(Path.cwd()), exists=os.path.exists)
    locks = _outwait_predecessor(Path(env["DEEPLINK_TOKEN_FILE"]).parent, env["LOCAL_RANK"])
    return RankProgram(tuple(command), env, locks)


def arguments(argv: list[str], launch: Launch, env: Mapping[str, str]) -> tuple[RankTask, list[str]]:
    """Return which rank this is and what it is to become."""
    if argv[:1] == ["--task"] and len(argv) > 4:  # noqa: PLR2004 - three values and the double dash
        task = RankTask(int(argv[1]), int(argv[2]), argv[3])
        argv = argv[4:]
    elif argv[:1] == ["--mpi"]:
        task = mpi_task(launch, env)
        argv = argv[1:]
    else:
        raise not_launched("nothing says which one")
    if argv[:1] != ["--"] or len(argv) == 1:
        raise not_launched("no command is given")
    return task, argv[1:]


def _outwait_predecessor(folder: Path, local_rank: str) -> tuple[int, ...]:
    # The attempt before may still be dying here, with its GPU memory and its ports. Its ranks hold this lock until
    # the last of their processes is gone; the kernel lets go of it for them.
    try:
        held = os.open(folder / f"rank-{local_rank}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return ()  # no agent's folder, no predecessor to know of
    os.set_inheritable(held, True)  # noqa: FBT003 - its only form
    if not wait_until(lambda: try_lock(held), SystemClock(), PREDECESSOR_WAIT_S):
        sys.stderr.write(f"deeplink rank: an earlier rank still runs here after {PREDECESSOR_WAIT_S:g} s\n")
    return (held,)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
