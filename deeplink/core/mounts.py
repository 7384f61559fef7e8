"""The kind of file system that a folder lies on, so that a store that cannot be fast is said to be slow."""

from __future__ import annotations

import os
from pathlib import Path

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
