"""What this host tells of itself: versions, limits, folders, tokens. Reads; writes nothing but its markers."""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import re
import resource
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink import errors
from deeplink.address import primary_address
from deeplink.daemon import member_name
from deeplink.errors import DeepLinkError
from deeplink.mounts import file_system
from deeplink.scheduler.doctor.report import FOLDERS, FolderReport, HostFacts
from deeplink.scheduler.slurm import command
from deeplink.tokens import read_token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.config import Config

ALIKE = ("catalog", "store", "state", "watch", "members", "agent_bind")
"""Keys of the configuration that must say the same on every node."""
_VERSION_S = 10.0
_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}
_SCRIPT_BYTES = 64 << 10
_MOST_LINES = 20
_MOST_SCRIPTS = 64
_WIPES = re.compile(
    r"\brm\s+(?:-\w+\s+)*-\w*[rR]|\s-delete\b|\b(?:pkill|killall)\b|\bmkfs|\bwipefs\b|\bfstrim\b|\bblkdiscard\b"
)


def this_host(config: Config, listening: Mapping[str, tuple[int, ...]]) -> HostFacts:
    """Return what there is to tell of this host.

    Args:
        config: of this process.
        listening: the ports that were opened.
    """
    return HostFacts(
        node=member_name(config.node),
        address=primary_address().ip,
        uid=os.getuid(),
        versions=_versions(),
        settings={key: str(getattr(config, key)) for key in ALIKE},
        folders={key: looked_at(getattr(config, key)) for key in FOLDERS},
        tokens=_tokens(config),
        limits={name: _limit(number) for name, number in _LIMITS.items()},
        user_namespaces=_user_namespaces(),
        shared_memory=_free(Path("/dev/shm")),  # noqa: S108 - the kernel's name for it
        infiniband=_has_entries(Path("/sys/class/infiniband")),
        ephemeral=_ephemeral(),
        listening=listening,
        step_nodes=os.environ.get("SLURM_STEP_NODELIST", ""),
    )


def _versions() -> dict[str, str]:
    try:
        slurm = command.run(["scontrol", "--version"], timeout_s=_VERSION_S).strip().rpartition(" ")[2]
    except DeepLinkError:
        slurm = ""
    driver = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*)", _text(Path("/proc/driver/nvidia/version")))
    return {
        "deeplink": _installed("deeplink"),
        "code": _code(),
        "python": platform.python_version(),
        "slurm": slurm,
        "torch": _installed("torch"),
        "kernel": platform.release(),
        "driver": driver[1] if driver else "",
    }


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _code() -> str:
    """Return a digest of the names and sizes of our own files: two installations of one version may differ."""
    root = Path(errors.__file__).parent
    digest = hashlib.sha256()
    # The links to cache/ and scheduler/ are followed, as imports do.
    for folder, folders, files in os.walk(root, followlinks=True):
        folders.sort()
        for name in sorted(name for name in files if name.endswith(".py")):
            path = Path(folder) / name
            digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:12]


def _limit(number: int) -> tuple[int, int]:
    soft, hard = resource.getrlimit(number)
    return tuple(-1 if one == resource.RLIM_INFINITY else one for one in (soft, hard))  # type: ignore[return-value]


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_SCRIPT_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _user_namespaces() -> int | None:
    most, allowed = (
        _text(Path("/proc/sys/user/max_user_namespaces")),
        _text(
            Path("/proc/sys/kernel/unprivileged_userns_clone")  # Debian's and Ubuntu's own switch
        ),
    )
    if not most.strip().isdigit():
        return None
    return 0 if allowed.strip() == "0" else int(most)


def _ephemeral() -> tuple[int, int]:
    words = _text(Path("/proc/sys/net/ipv4/ip_local_port_range")).split()
    return (int(words[0]), int(words[1])) if len(words) == 2 and all(map(str.isdigit, words)) else (0, 0)  # noqa: PLR2004


def _free(path: Path) -> int | None:
    try:
        room = os.statvfs(path)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize


def _has_entries(path: Path) -> bool:
    try:
        return any(path.iterdir())
    except OSError:
        return False


def _tokens(config: Config) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in ("token_file", "watch_token_file"):
        path = getattr(config, key)
        if path is not None:
            try:
                read_token(path)
                found[key] = ""
            except DeepLinkError as problem:
                found[key] = str(problem)
    return found


def looked_at(path: Path) -> FolderReport:
    """Return what a folder is like, or the nearest one above it that is there."""
    path = path.absolute()
    try:
        base = next(folder for folder in (path, *path.parents) if folder.exists())
        found, room = base.stat(), os.statvfs(base)
    except OSError as problem:
        return FolderReport(path=str(path), problem=problem.strerror or str(problem))
    return FolderReport(
        path=str(path),
        base=str(base),
        kind=file_system(base),
        readable=os.access(base, os.R_OK | os.X_OK),
        writable=os.access(base, os.W_OK | os.X_OK),
        owner=found.st_uid,
        mode=found.st_mode & 0o7777,
        free=room.f_bavail * room.f_frsize,
        total=room.f_blocks * room.f_frsize,
        identity=f"{found.st_ino}-{found.st_ctime_ns}",
        problem="" if base.is_dir() else f"{base} is no folder",
    )


def dangers(scripts: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the lines of prologs and epilogs that remove files or end processes, and the scripts not readable.

    Slurm takes patterns, too (`/etc/slurm/epilog.d/*`).
    """
    found: list[str] = []
    files = [file for script in scripts for file in _files_of(script)]
    unread = tuple(file for file in files if not os.access(file, os.R_OK))
    for script in files:
        for number, line in enumerate(_text(Path(script)).splitlines(), start=1):
            if _WIPES.search(line.partition("#")[0]) and len(found) < _MOST_LINES:
                found.append(f"{script}:{number}: {line.strip()[:160]}")
    return tuple(found), unread


def _files_of(script: str) -> list[str]:
    """Return the files a pattern names, or itself; a pattern in a folder that may not be read stays as it is."""
    folder, pattern = Path(script).parent, Path(script).name
    if not glob.has_magic(pattern) or not os.access(folder, os.R_OK | os.X_OK):
        return [script]
    return sorted(str(file) for file in folder.glob(pattern) if file.is_file())[:_MOST_SCRIPTS]
