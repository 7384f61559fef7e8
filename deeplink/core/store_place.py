"""Where a node keeps its shards unless told otherwise: a folder of the node's own disks, chosen by one rule."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.core.mounts import MEMORY, file_system, is_shared

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

USUAL_STORE = Path("~/.cache/deeplink/store")
NAME_STORE = 'store = "/local/ssd/deeplink-$USER"'
_VARIABLES = ("SLURM_TMPDIR", "TMPDIR")
_LAST = Path("/tmp")  # noqa: S108 - what is made in it is made 0700
_LOCAL = "local*"
_SCRATCH = "scratch/local"
_BELOW = ("", "ssd", "nvme", "scratch", "tmp")


class SharedStoreError(DeepLinkError):
    """Several nodes have one folder as their store: each would take the others' shards for its own copies."""

    def __init__(self, store: str, nodes: str) -> None:
        super().__init__(
            f"store {store}: {nodes} share it, and a store is one node's own",
            remedy="Put a folder of the nodes' own disks into ~/.config/deeplink/config.toml, such as "
            f"{NAME_STORE}",
            exit_code=2,
        )


@dataclass(frozen=True, slots=True)
class StorePlace:
    """A folder for shards, and why it was chosen."""

    path: Path
    why: str


def chosen_store(
    env: Mapping[str, str], *, root: Path = Path("/"), mounts: list[tuple[str, str]] | None = None
) -> StorePlace:
    """Return where shards are kept where no setting says it; `root` is where the machine's folders begin.

    Outside of Slurm's jobs, and with the home folder on a disk of this machine, that is `USUAL_STORE`. Else it is
    the folder `deeplink-UID` in the first of these that is on a local disk and can be written to: $SLURM_TMPDIR,
    $TMPDIR (unless that is /tmp), /local* and /scratch/local (or in them the folder of the user's name, ssd, nvme,
    scratch or tmp), /tmp.
    """
    usual = USUAL_STORE.expanduser()
    kind = file_system(usual, mounts)
    if not env.get("SLURM_JOB_ID") and not is_shared(kind):
        return StorePlace(usual, f"the home folder lies on {kind or 'an unknown file system'}, not in a Slurm job")
    because = "in a Slurm job" if env.get("SLURM_JOB_ID") else f"the home folder lies on {kind}"
    last = root / _LAST.relative_to("/")
    for name, folder in _candidates(env, root):
        found = file_system(folder, mounts)
        if found and not is_shared(found) and found not in MEMORY and os.access(folder, os.W_OK | os.X_OK):
            why = f"{because}, the first folder on a local disk ({found}): {name}"
            return StorePlace(folder / f"deeplink-{os.getuid()}", why)
    return StorePlace(last / f"deeplink-{os.getuid()}", f"{because}, and no folder on a local disk was found")


def _candidates(env: Mapping[str, str], root: Path) -> Iterator[tuple[str, Path]]:
    for name in _VARIABLES:
        # /tmp is last, also where a shell named it.
        if env.get(name) and Path(env[name]) != _LAST and Path(env[name]).is_dir():
            yield f"${name}", Path(env[name])
    for folder in (*sorted(root.glob(_LOCAL)), root / _SCRATCH):
        for below in (*filter(None, [env.get("USER", "")]), *_BELOW):
            if (folder / below).is_dir():
                yield str(folder / below), folder / below
    yield str(_LAST), root / _LAST.relative_to("/")
