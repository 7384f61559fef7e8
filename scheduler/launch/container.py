"""Ranks inside a container image: what is mounted into it, and the command that enters it; pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.core.publish import BY_FILE
from deeplink.scheduler.launch.backend import LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from deeplink.scheduler.launch.environment import NodeFacts

FOUND = {"apptainer": "apptainer", "singularity": "singularity", "charliecloud": "ch-run"}  # runtime: program
PYXIS = "pyxis"
RUNTIMES = (*FOUND, PYXIS)


@dataclass(frozen=True, slots=True)
class Container:
    """The container every rank runs in."""

    runtime: str  # one of `RUNTIMES`
    image: str  # as the runtime takes it: a file, a folder, a URL
    mounts: tuple[str, ...] = ()  # `FOLDER` or `FOLDER:INSIDE`, besides what DeepLink needs
    options: tuple[str, ...] = ()  # of the runtime, as they are

    @property
    def is_entered_by_srun(self) -> bool:
        """Whether the tasks of a step are inside already; else each rank's command enters it."""
        return self.runtime == PYXIS


def chosen_runtime(wanted: str | None, which: Callable[[str], str | None]) -> str:
    """Return the runtime that was asked for, or the first that is installed."""
    if found := wanted or next((runtime for runtime, program in FOUND.items() if which(program)), None):
        return found
    raise LaunchError(
        f"--container: none of {', '.join(FOUND.values())} is on PATH",
        "Install one on every node (and here), or say --container-runtime pyxis where srun has that plugin.",
    )


def needed(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the paths a rank needs besides its image: those in its environment, and where it was started."""
    # The token file and the catalog are reached by path, the agent by its address; the store is read where it
    # lies.
    files = [env.get(name, "") for name in ("DEEPLINK_TOKEN_FILE", "DEEPLINK_HOSTFILE")]
    token_folder, host_folder = (str(Path(file).parent) if file else "" for file in files)
    store, catalog = env.get("DEEPLINK_STORE", ""), env.get("DEEPLINK_CATALOG", "")
    tokens = [env.get(name, "") for name in ("DEEPLINK_WATCH_TOKEN_FILE", "DEEPLINK_SITE_TOKEN_FILE")]
    listed = [env.get(name, "") for name in ("DEEPLINK_MEMBERS", "DEEPLINK_SITE_MEMBERS")]
    lists = [value.removeprefix(BY_FILE) for value in listed if value.startswith(BY_FILE)]
    outside = [path for path in lists if str(Path(path).parent) != host_folder]
    return _unique([token_folder, store, catalog, host_folder, *tokens, *outside])


def entering(
    container: Container,
    command: Iterable[str],
    env: Mapping[str, str],
    *,
    here: str,
    exists: Callable[[str], bool],
) -> list[str]:
    """Return the command that runs `command` in the container, with all that a rank needs mounted."""
    folders = [folder for folder in _unique([*needed(env), here]) if folder != "/" and exists(folder)]
    mounts = (*map(_as_it_is, folders), *mounted(container.mounts))
    if container.runtime == "charliecloud":
        binds = [f"--bind={source}:{inside}" for source, inside in mounts]
        return ["ch-run", *container.options, *binds, f"--cd={here}", container.image, "--", *command]
    binds = [word for source, inside in mounts for word in ("--bind", f"{source}:{inside}")]
    return [container.runtime, "exec", *container.options, *binds, "--pwd", here, container.image, *command]


def pyxis_options(
    container: Container, nodes: Iterable[NodeFacts], env: Mapping[str, str], *, exists: Callable[[str], bool]
) -> list[str]:
    """Return the srun options that start a step in the container."""
    # They are the same for all nodes, so what has a name of its own on each node is mounted by the folder above
    # it.
    each = [facts for facts in nodes if facts.token_file]
    own = [str(Path(facts.token_file).parent.parent) for facts in each] + [facts.store for facts in each]
    folders = _unique([*own, *filter(exists, needed(env))])
    mounts = (*map(_as_it_is, folders), *mounted(container.mounts))
    joined = ",".join(f"{source}:{inside}" for source, inside in mounts)
    return [f"--container-image={container.image}", f"--container-mounts={joined}", *container.options]


def mounted(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return for each mount what is mounted, and where."""
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


def _not_a_mount(text: str) -> LaunchError:
    return LaunchError(
        f"--container: {text!r} cannot be mounted",
        "A mount is an absolute path, or two with a colon between; runtimes take no comma or colon in one.",
    )


def _unique(folders: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, folders)))
