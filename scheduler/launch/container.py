"""Ranks inside a container image: what is mounted into it, and the command that enters it; pure.

The starter of a rank runs on the host, sets the rank's environment, which the runtimes here hand on to the
container, and becomes the runtime. Pyxis is a part of srun: there the starter itself runs inside.
Imported by every rank, so it imports next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from deeplink.scheduler.launch.environment import NodeFacts

FOUND = {"apptainer": "apptainer", "singularity": "singularity", "charliecloud": "ch-run"}
"""Each runtime that can be found by itself, and its program."""
PYXIS = "pyxis"
RUNTIMES = (*FOUND, PYXIS)


class ContainerError(DeepLinkError):
    """A container cannot be entered as asked."""

    exit_code = 2

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"--container: {problem}", remedy=remedy)
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Container:
    """The container every rank runs in.

    Attributes:
        runtime: one of `RUNTIMES`.
        image: as the runtime takes it: a file, a folder, a URL.
        mounts: `FOLDER` or `FOLDER:INSIDE`, besides what DeepLink needs.
        options: of the runtime, as they are.
    """

    runtime: str
    image: str
    mounts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def chosen_runtime(wanted: str | None, which: Callable[[str], str | None]) -> str:
    """Return the runtime that was asked for, or the first that is installed.

    Raises:
        ContainerError: none is.
    """
    if wanted is not None:
        return wanted
    for runtime, program in FOUND.items():
        if which(program):
            return runtime
    raise ContainerError(
        f"none of {', '.join(FOUND.values())} is on PATH",
        "Install one on every node (and here), or say --container-runtime pyxis where srun has that plugin.",
    )


def needed(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the paths a rank needs besides its image: those in its environment, and where it was started.

    The token file and the catalog are reached by path, the agent by its address; the store is read where it lies.
    """
    folders = [
        str(Path(env["DEEPLINK_TOKEN_FILE"]).parent) if env.get("DEEPLINK_TOKEN_FILE") else "",
        env.get("DEEPLINK_STORE", ""),
        env.get("DEEPLINK_CATALOG", ""),
        str(Path(env["DEEPLINK_HOSTFILE"]).parent) if env.get("DEEPLINK_HOSTFILE") else "",
        env.get("DEEPLINK_WATCH_TOKEN_FILE", ""),
    ]
    return _unique(folders)


def entering(
    container: Container,
    command: Iterable[str],
    env: Mapping[str, str],
    *,
    here: str,
    exists: Callable[[str], bool],
) -> list[str]:
    """Return the command that runs `command` in the container, with all that a rank needs mounted.

    Args:
        container: which.
        command: the rank's.
        env: the rank's environment.
        here: the folder to start in, mounted too.
        exists: whether a path is on this node: what is not cannot be mounted.

    Raises:
        ContainerError: a path cannot be written as a mount.
    """
    folders = tuple(folder for folder in _unique([*needed(env), here]) if folder != "/" and exists(folder))
    mounts = (*map(_as_it_is, folders), *mounted(container.mounts))
    if container.runtime == "charliecloud":
        binds = [f"--bind={source}:{inside}" for source, inside in mounts]
        return ["ch-run", *container.options, *binds, f"--cd={here}", container.image, "--", *command]
    binds = [word for source, inside in mounts for word in ("--bind", f"{source}:{inside}")]
    return [container.runtime, "exec", *container.options, *binds, "--pwd", here, container.image, *command]


def pyxis_options(
    container: Container, nodes: Iterable[NodeFacts], env: Mapping[str, str], *, exists: Callable[[str], bool]
) -> list[str]:
    """Return the srun options that start a step in the container.

    They are the same for all nodes, so what has a name of its own on each node is mounted by the folder above it.

    Args:
        container: which.
        nodes: those the step is on.
        env: the settings that are the same for all ranks, with paths that all nodes share.
        exists: whether such a path is there: a catalog, say, that nobody has made yet would fail the step.

    Raises:
        ContainerError: a path cannot be written as a mount.
    """
    each = [facts for facts in nodes if facts.token_file]
    own = [str(Path(facts.token_file).parent.parent) for facts in each] + [facts.store for facts in each]
    folders = _unique([*own, *filter(exists, needed(env))])
    mounts = (*map(_as_it_is, folders), *mounted(container.mounts))
    joined = ",".join(f"{source}:{inside}" for source, inside in mounts)
    return [f"--container-image={container.image}", f"--container-mounts={joined}", *container.options]


def mounted(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return for each mount what is mounted, and where.

    Raises:
        ContainerError: one is none.
    """
    return tuple(map(_mount, texts))


def _mount(text: str) -> tuple[str, str]:
    source, _, inside = text.partition(":")
    inside = inside or source
    if not (source.startswith("/") and inside.startswith("/")) or "," in text or ":" in inside:
        raise _not_a_mount(text)
    return source, inside


def _as_it_is(folder: str) -> tuple[str, str]:
    if ":" in folder:  # would be taken for two folders, and one mounted over the other
        raise _not_a_mount(folder)
    return _mount(folder)


def _not_a_mount(text: str) -> ContainerError:
    return ContainerError(
        f"{text!r} cannot be mounted",
        "A mount is an absolute path, or two with a colon between; runtimes take no comma or colon in one.",
    )


def _unique(folders: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(folder for folder in folders if folder))
