"""Started once per rank, on its node: sets the rank's environment and becomes the user's command.

`python -m deeplink.scheduler.launch.rank --task RANK LOCAL_RANK NODE | --mpi -- COMMAND...`; with --mpi, mpiexec
says which rank it is. Where Slurm starts ranks, slots of theirs do what this program does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.core.clock import SystemClock, wait_until
from deeplink.core.descriptors import try_lock
from deeplink.core.errors import DeepLinkError
from deeplink.rpc.tokens import token_file_of
from deeplink.scheduler.launch.container import PYXIS, entering
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
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


def main(argv: Sequence[str]) -> int:
    """Become the command; returns an exit code only where that fails."""
    try:
        launch = left_launch(os.environ)
        task, command = arguments(list(argv), launch, os.environ)
    except DeepLinkError as problem:
        return _told(problem)
    return become(command, launch, task, os.environ)


def become(command: Sequence[str], launch: Launch, task: RankTask, given: Mapping[str, str]) -> int:
    """Become the command as a rank, with the environment `given` and its own; returns only where that fails."""
    try:
        env = rank_environment(launch, task, given)
        env["DEEPLINK_MEMBERS"] = members_variable(given)
        env["DEEPLINK_TOKEN_FILE"] = str(token_file_of(Path(env["DEEPLINK_TOKEN_FILE"]), launch.attempt))
        if launch.container is not None and launch.container.runtime != PYXIS:
            command = entering(launch.container, command, env, here=str(Path.cwd()), exists=os.path.exists)
        _outwait_predecessor(Path(env["DEEPLINK_TOKEN_FILE"]).parent, env["LOCAL_RANK"])
    except DeepLinkError as problem:
        return _told(problem)
    try:
        os.execvpe(command[0], [*command], env)  # noqa: S606 - the user's own command, as an argument list
    except FileNotFoundError:
        sys.stderr.write(f"deeplink rank: {command[0]}: no such command on {env['DEEPLINK_NODE']}\n")
        return _NOT_FOUND
    except OSError as problem:
        sys.stderr.write(f"deeplink rank: {command[0]}: {problem.strerror} on {env['DEEPLINK_NODE']}\n")
        return _NOT_EXECUTABLE


def _told(problem: DeepLinkError) -> int:
    sys.stderr.write(f"deeplink rank: {problem}\n  {problem.remedy}\n")
    return problem.exit_code


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


def _outwait_predecessor(folder: Path, local_rank: str) -> None:
    # The attempt before may still be dying here, with its GPU memory and its ports. Its ranks hold this lock until
    # the last of their processes is gone; the kernel lets go of it for them.
    try:
        held = os.open(folder / f"rank-{local_rank}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return  # no agent's folder, no predecessor to know of
    os.set_inheritable(held, True)  # noqa: FBT003 - its only form
    if not wait_until(lambda: try_lock(held), SystemClock(), PREDECESSOR_WAIT_S):
        sys.stderr.write(f"deeplink rank: an earlier rank still runs here after {PREDECESSOR_WAIT_S:g} s\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
