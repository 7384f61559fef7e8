"""Slurm's programs: the installed ones, or, without root, those of packages unpacked into a cache folder."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.core.publish import DRAFT_PREFIX
from deeplink.scheduler.slurm import command
from deeplink.scheduler.testbed.errors import INSTALL, PACKAGES, SlurmMissingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DOWNLOAD_TIMEOUT_S = 300.0
_CLIENTS = ("sinfo", "sbatch", "srun", "squeue", "scontrol")


@dataclass(frozen=True, slots=True)
class Programs:
    """Where the daemons are, and what they and the commands need around them."""

    slurmctld: str
    slurmd: str
    munged: str
    slurmstepd: str = ""  # what slurmd starts for each step; empty: where it was built to look
    plugins: Path | None = None  # folder of Slurm's plugins; None: where it was built to look
    path: str = SYSTEM_PATH  # folders of the commands, joined by colons
    env: dict[str, str] = field(default_factory=dict)  # further variables


def missing(names: Sequence[str]) -> list[str]:
    """Return those programs that the system does not have."""
    return [name for name in names if shutil.which(name, path=SYSTEM_PATH) is None]


def installed() -> Programs | None:
    """Return the system's own programs; None where one is missing."""
    found = [shutil.which(name, path=SYSTEM_PATH) for name in ("slurmctld", "slurmd", "munged")]
    slurmctld, slurmd, munged = found
    if slurmctld is None or slurmd is None or munged is None or missing(_CLIENTS):
        return None
    return Programs(slurmctld, slurmd, munged)


def cache_folder(env: Mapping[str, str]) -> Path:
    """Return the folder that packages are unpacked into, one folder below for each version."""
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deeplink" / "slurm"


def unpacked(cache: Path) -> Programs:
    """Return programs of packages in `cache`, downloading and unpacking them where they are not there yet.

    Nothing is installed, no rights are needed; it takes seconds the first time.
    """
    if lacking := missing(("apt-get", "apt-cache", "dpkg", "dpkg-query")):
        raise SlurmMissingError(lacking, "Without apt, Slurm must be installed by an administrator.")
    folder = cache / _version()
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        draft = cache / f"{DRAFT_PREFIX}{folder.name}-{os.getpid()}"
        try:
            _unpack(draft)
            _settle(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return _in(folder / "usr")


def _settle(draft: Path, folder: Path) -> None:
    try:
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise  # else another one unpacked the same meanwhile


def _apt(argv: Sequence[str], cwd: Path | None = None) -> str:
    done = command.finish(argv, timeout_s=_DOWNLOAD_TIMEOUT_S, cwd=cwd)
    if done.code:
        said = done.stderr.strip().splitlines()[-1:] or [f"{argv[0]} exited {done.code}"]
        raise SlurmMissingError(
            ["Slurm"], f"Downloading its packages failed ({said[0]}). Run `apt-get update` as root, or {INSTALL}"
        )
    return done.stdout


def _version() -> str:
    for line in _apt(["apt-cache", "show", "--no-all-versions", "slurmd"]).splitlines():
        if line.startswith("Version: "):
            return line.removeprefix("Version: ").replace("/", "_").replace(":", "_")
    raise SlurmMissingError(["Slurm"], "apt knows no package slurmd.")


def _unpack(draft: Path) -> None:
    wanted = [package for package in PACKAGES if package != "iproute2"]
    # As if nothing were installed: what is does not matter then, even when its dependencies are broken.
    nothing = f"Dir::State::status={os.devnull}"
    simulated = _apt(["apt-get", "-o", nothing, "install", "--simulate", "--no-install-recommends", *wanted])
    listed = _apt(["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n"]).splitlines()
    here = {line.split()[0] for line in listed if line.endswith(" installed")}
    closure = [line.split()[1] for line in simulated.splitlines() if line.startswith("Inst ")]
    depended = [package for package in closure if package not in here]
    packages = draft / "packages"
    packages.mkdir(parents=True)
    _apt(["apt-get", "download", *dict.fromkeys([*wanted, *depended])], packages)
    for package in sorted(packages.glob("*.deb")):
        _apt(["dpkg", "-x", str(package), str(draft)])
    shutil.rmtree(packages)


def _in(usr: Path) -> Programs:
    def program(name: str) -> str:
        # Installing would give the plain name as a link to this one.
        for path in (usr / "sbin" / f"{name}-wlm", usr / "sbin" / name):
            if path.exists():
                return str(path)
        raise SlurmMissingError([name], f"Remove {usr.parent} and try again.")

    libraries = [*usr.glob("lib/*/slurm-wlm"), *usr.glob("lib/*-linux-gnu*")]
    return Programs(
        slurmctld=program("slurmctld"),
        slurmd=program("slurmd"),
        munged=program("munged"),
        slurmstepd=program("slurmstepd"),
        plugins=next(iter(usr.glob("lib/*/slurm-wlm")), None),
        path=f"{usr}/bin:{usr}/sbin:{SYSTEM_PATH}",
        env={"LD_LIBRARY_PATH": ":".join(map(str, libraries))},
    )
