"""The homes on a file system of their own, an image mounted by loop: then it can stall, as shared storage does.

The one mount that a sandbox makes on the host, and only when it is asked for: the host and every machine see the
same paths. `down` takes it away, whole or half taken down.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from deeplink.scheduler.sandbox.errors import BootError, NotFreezableError
from deeplink.scheduler.slurm import command

if TYPE_CHECKING:
    from deeplink.scheduler.sandbox.layout import SandboxLayout

IMAGE_BYTES = 4 << 30
"""Size of the image; it takes what is written to it."""
PROGRAMS = ("mkfs.ext4", "fsfreeze", "losetup", "mount")
_MAKE_S = 30.0


def is_mounted(layout: SandboxLayout) -> bool:
    """Whether the homes are a file system of their own."""
    return os.path.ismount(layout.homes)


def make(layout: SandboxLayout) -> None:
    """Make the file system and mount it over the empty folder of the homes.

    Raises:
        BootError: this machine has no loop devices, or no such file system.
    """
    image = layout.storage_image
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    _run("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1", str(image))
    # Without atime a reader writes nothing, and so does not hang when nothing can be written.
    _run("mount", "-o", "loop,noatime", str(image), str(layout.homes))
    layout.homes.chmod(0o755)


def _run(*argv: str) -> None:
    try:
        done = command.finish(argv, timeout_s=_MAKE_S)
    except (command.CommandMissingError, command.CommandTimeoutError) as problem:
        raise BootError("shared storage", str(problem)) from problem
    if done.code:
        raise BootError("shared storage", f"{argv[0]} exited {done.code}", done.stderr)


def freeze(layout: SandboxLayout) -> None:
    """Let whoever writes to the homes hang until `thaw`; frozen already is no error.

    Raises:
        NotFreezableError: the homes lie on the host's own file system.
        CommandError: it cannot be frozen.
    """
    if not is_mounted(layout):
        raise NotFreezableError(layout.name)
    done = command.finish(["fsfreeze", "--freeze", str(layout.homes)], timeout_s=_MAKE_S)
    if done.code and "busy" not in done.stderr:  # frozen already
        raise command.CommandError(done.argv, done.code, done.stderr)


def thaw(layout: SandboxLayout) -> None:
    """Let writers go on; nothing happens where nothing is frozen."""
    if is_mounted(layout):
        command.finish(["fsfreeze", "--unfreeze", str(layout.homes)], timeout_s=_MAKE_S)


def remove(layout: SandboxLayout) -> None:
    """Take the file system away, if there is one; what was in it is gone."""
    if is_mounted(layout):
        thaw(layout)
        command.finish(["umount", "--lazy", str(layout.homes)], timeout_s=_MAKE_S)
    layout.storage_image.unlink(missing_ok=True)
