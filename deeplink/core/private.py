"""Opens folders that are this user's alone, and files below a folder without following a link."""

from __future__ import annotations

import errno
import os
import pwd
import stat
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from typing_extensions import override

from deeplink.core.descriptors import opened
from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Mapping

NODE_LOCAL = Path("/tmp")  # noqa: S108 - by convention, unlike TMPDIR; what we make in it is made 0700
_MOST_LINKS = 40
"""As many as the kernel follows on one path (path_resolution(7))."""


class PrivateFolderError(DeepLinkError, PermissionError):
    """A folder that is to be this user's alone belongs to another user, or others can change what is in it."""

    def __init__(self, path: Path, problem: str, remedy: str) -> None:
        super().__init__(f"{path}: {problem}", remedy=remedy)
        self.path, self.problem = path, problem
        self.errno, self.strerror = errno.EPERM, f"{problem}. {remedy}"

    @override
    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


def runtime_base(env: Mapping[str, str]) -> Path:
    """Return a folder of this node's in which a folder for sockets is made: the user's own, or `NODE_LOCAL`."""
    # Slurm hands the submit host's XDG_RUNTIME_DIR on to nodes where that folder need not exist.
    named = env.get("XDG_RUNTIME_DIR", "")
    if named:
        try:
            found = Path(named).stat()
        except OSError:
            pass
        else:
            if found.st_uid == os.getuid() and not found.st_mode & 0o077 and os.access(named, os.W_OK):
                return Path(named)
    return NODE_LOCAL


def private_folder(path: Path, *, parents: bool = True, group_reads: bool = False) -> Path:
    """Return a folder that is this user's alone (0700); it is made where it is not there, its parents if asked.

    Links on the way are followed where they are this user's or root's: on a shared disk another user may have put
    one in the place of the folder. With `group_reads` the folder's group may read where its mode says so.
    """
    if parents and not path.parent.exists():
        private_folder(path.parent)
    _check_way(path, _MOST_LINKS)
    path.mkdir(mode=0o700, exist_ok=True)
    _check_way(path, _MOST_LINKS)  # what came into its place meanwhile
    with opened(path.resolve(), os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW) as folder:
        found = os.fstat(folder)
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != os.geteuid():
            problem = f"it belongs to {_user(found.st_uid)}"
            raise PrivateFolderError(path, problem, "Name another folder, or have that one removed.")
        if mode & 0o022:
            remedy = f"See that everything in it is yours, then `chmod go-w {path}`."
            raise PrivateFolderError(path, f"others may write to it (mode {mode:04o})", remedy)
        allowed = 0o750 if group_reads else 0o700
        if mode & ~allowed & 0o777:  # no other had a hand in it, and now no other reads it
            os.chmod(f"/proc/self/fd/{folder}", mode & allowed)  # noqa: PTH101 - O_PATH takes no fchmod
    return path


def check_private_file(path: Path) -> None:
    """Check a file that is to be this user's, before it is opened or made to be written."""
    _check_way(path, _MOST_LINKS)
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    if found.st_uid != os.geteuid():
        raise PrivateFolderError(path, f"it belongs to {_user(found.st_uid)}", "Name another file.")
    if found.st_mode & 0o022:
        problem = f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o})"
        raise PrivateFolderError(path, problem, f"See that what it holds is yours, then `chmod go-w {path}`.")


def _check_way(path: Path, left: int) -> None:
    """Check that no one else can lead a path elsewhere: no link of another user's, no folder that all may change.

    In a folder with the sticky bit (/tmp) only the owner of an entry puts another one in its place. A group that
    may write to a folder on the way is trusted: folders of projects are so.
    """
    for place in (*reversed(path.parents), path):
        try:
            found = place.lstat()
        except FileNotFoundError:
            return
        if stat.S_ISLNK(found.st_mode):
            if found.st_uid not in {0, os.geteuid()}:
                problem = f"{place} is a link of {_user(found.st_uid)}"
                raise PrivateFolderError(path, problem, "Name another folder, or have the link removed.")
            if not left:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            _check_way(place.parent / place.readlink(), left - 1)
        elif place != path and found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            mode = stat.S_IMODE(found.st_mode)
            problem = f"everybody may put something else in its place (mode {mode:04o} of {place})"
            remedy = f"Name another folder, or have the administrator `chmod +t {place}`."
            raise PrivateFolderError(path, problem, remedy)


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def open_beneath(folder: Path, relative: str) -> BinaryIO:
    """Open a regular file below a folder to read it; no part of its path below the folder may be a link."""
    *folders, name = relative.split("/")
    if {"", ".", ".."} & {*folders, name}:
        raise OSError(errno.EINVAL, "no path below a folder", relative)
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in folders:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
            os.close(inside)
            inside = below
        # Without O_NONBLOCK a pipe in the file's place would hold us until somebody writes to it.
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=inside)
    finally:
        os.close(inside)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "no regular file", str(folder / relative))
    return os.fdopen(opened, "rb", buffering=0)
