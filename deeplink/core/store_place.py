"""File systems by kind, and where a node keeps its shards unless told otherwise: a folder on its own disks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SHARED = frozenset(
    {
        *("nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "cifs", "smb3", "9p", "afs"),
        *("orangefs", "glusterfs", "wekafs", "panfs", "pvfs2", "gfs2", "ocfs2"),
    }
)
"""File systems of many nodes: each read of theirs may be a round trip."""
_SHARED_BY_FUSE = SHARED | {
    *("ceph-fuse", "daos", "gcsfuse", "goofys", "juicefs", "JuiceFS", "moosefs"),
    *("mountpoint-s3", "rclone", "s3fs", "seaweedfs", "sshfs"),
}
MEMORY = frozenset({"tmpfs", "ramfs"})
_ESCAPES = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}


def parse_mounts(text: str) -> list[tuple[str, str]]:
    r"""Return mount point and file system type of each line of /proc/self/mountinfo, in its order.

    >>> parse_mounts("36 35 98:0 / /mnt/a\\040b rw - ext4 /dev/sda rw")
    [('/mnt/a b', 'ext4')]
    """
    found = []
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        words = before.split()
        if dash and len(words) > 4:  # noqa: PLR2004 - proc(5): the fifth is the mount point
            point = words[4]
            for escape, character in _ESCAPES.items():
                point = point.replace(escape, character)
            found.append((point, after.split()[0]))
    return found


def file_system(path: Path, mounts: list[tuple[str, str]] | None = None) -> str:
    """Return the type of the file system that `path` lies on, or would; empty where that is unknown.

    >>> file_system(Path("/scratch/x"), [("/", "ext4"), ("/scratch", "lustre")])
    'lustre'
    """
    if mounts is None:
        try:
            mounts = parse_mounts(Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return ""
    there = os.path.realpath(path)
    best, kind = "", ""
    for point, found in mounts:
        # The later of two mounts on one point covers the earlier one.
        if (there == point or there.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, found
    return kind


def is_shared(kind: str) -> bool:
    """Return whether many nodes see the files of a type of file system, as /proc/self/mountinfo names it.

    >>> is_shared("nfs4"), is_shared("fuse.glusterfs"), is_shared("fuse.sshfs"), is_shared("fuse.squashfuse")
    (True, True, True, False)
    """
    return kind in SHARED or (kind.startswith("fuse.") and kind.removeprefix("fuse.") in _SHARED_BY_FUSE)


def slowness(store: Path, source: str, mounts: list[tuple[str, str]] | None = None) -> str:
    """Say why reading from `store` may be slower than reading the small files themselves; empty where it is not.

    >>> slowness(Path("/home/a/store"), "/data", [("/", "ext4"), ("/home", "nfs4")])
    '/home/a/store lies on nfs4, which other nodes share: each cold read may be a round trip'
    """
    kind = file_system(store, mounts)
    if is_shared(kind):
        return f"{store} lies on {kind}, which other nodes share: each cold read may be a round trip"
    if source.startswith("/") and kind not in MEMORY and file_system(Path(source), mounts) in MEMORY:
        return f"the source {source} lies in memory, and {store} on {kind or 'a disk'}"
    return ""


USUAL_STORE = Path("~/.cache/deeplink/store")
NAME_STORE = 'store = "/local/ssd/deeplink-$USER"'
_VARIABLES = ("SLURM_TMPDIR", "TMPDIR")
_LAST = Path("/tmp")  # noqa: S108 - what is made in it is made 0700
_LOCAL = "local*"
_SCRATCH = "scratch/local"
_BELOW = ("", "ssd", "nvme", "scratch", "tmp")


def shared_store(store: str, nodes: str) -> DeepLinkError:
    """Return the error of nodes with one folder as their store: each would take the others' shards for its own."""
    return DeepLinkError(
        f"store {store}: {nodes} share it, and a store is one node's own",
        remedy=f"Put a folder of the nodes' own disks into ~/.config/deeplink/config.toml, such as {NAME_STORE}",
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
