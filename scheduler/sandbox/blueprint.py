"""From what was asked for to every file of a sandbox: the dry run shows them, `up` writes them. Nothing starts."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.scheduler.sandbox import loopback, namespaced, settings, storage, users
from deeplink.scheduler.sandbox.errors import NotRootError, SlurmMissingError, UserError
from deeplink.scheduler.sandbox.programs import SYSTEM_PATH, Programs, cache_folder, installed, missing, unpacked
from deeplink.scheduler.sandbox.settings import SandboxSettings
from deeplink.scheduler.sandbox.shape import CTL
from deeplink.scheduler.slurm import command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deeplink.scheduler.sandbox.layout import SandboxLayout
    from deeplink.scheduler.sandbox.settings import User
    from deeplink.scheduler.sandbox.shape import Shape

_KEY_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What can be asked of `Sandbox.up` besides name and shape.

    Attributes:
        user: who jobs run as, by name or number: one of the host's, else one that exists in the sandbox alone;
            empty: `deeplink`, or ourselves on loopback.
        expose: paths the user can reach (read-only) though a folder above is closed to others, besides the running
            interpreter and DeepLink itself.
        slurmd_timeout: seconds a node may be silent until Slurm calls it down.
        return_to_service: ReturnToService of slurm.conf.
        extra: further lines of slurm.conf.
        wait_s: how long to wait until all nodes are idle, s.
        loopback: no namespaces: several slurmd on this host's loopback (always so without root).
        unpacked: on loopback, use packages unpacked into a cache folder though Slurm is installed.
        freezable: make the homes a file system of their own, so that shared storage can stall.
    """

    user: str = ""
    expose: tuple[Path, ...] = ()
    slurmd_timeout: int = 10
    return_to_service: int = 2
    extra: tuple[str, ...] = ()
    wait_s: float = 30.0
    loopback: bool = False
    unpacked: bool = False
    freezable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A sandbox on paper.

    Attributes:
        texts: every file, by path.
        path: PATH of commands and jobs.
        programs: Slurm's, on loopback; None: the system's, on machines of namespaces.
        addresses: `host:port` of the daemons, on loopback.
    """

    settings: SandboxSettings
    texts: dict[Path, str]
    path: str
    programs: Programs | None = None
    addresses: dict[str, str] = field(default_factory=dict)


def draw(layout: SandboxLayout, shape: Shape, options: Options) -> Blueprint:
    """Return the sandbox that comes of a shape and options, on this machine and for who we are.

    Raises:
        SlurmMissingError: Slurm is not there.
        NotRootError: that takes root.
        UserError, ExposeError, SandboxNameError, BootError: that cannot be had here.
    """
    if options.freezable and os.geteuid() != 0:
        raise NotRootError("up --freezable")
    if options.loopback or os.geteuid() != 0 or not _namespaces_allowed():
        return _on_loopback(layout, shape, options)
    if lacking := missing((*namespaced.PROGRAMS, *(storage.PROGRAMS if options.freezable else ()))):
        raise SlurmMissingError(lacking)
    wanted = _settings(shape, options, users.choose(options.user or users.DEFAULT, layout))
    path = f"{sys.prefix}/bin:{SYSTEM_PATH}"
    return Blueprint(settings=wanted, texts=namespaced.files(wanted, layout, exposures(options), path), path=path)


def _on_loopback(layout: SandboxLayout, shape: Shape, options: Options) -> Blueprint:
    user = loopback.this_user(layout)
    if options.user not in {"", user.name, str(user.uid)}:
        raise UserError(options.user, "without namespaces jobs run as who brings the sandbox up")
    programs = None if options.unpacked else installed()
    if programs is None:
        programs = unpacked(cache_folder(os.environ))
    address, _ = loopback.own_address()
    ports = loopback.free_ports(address, [CTL, *shape.nodes])
    wanted = _settings(shape, options, user)
    return Blueprint(
        settings=wanted,
        texts=settings.files(wanted, layout, loopback.place(layout, ports, programs, user)),
        path=f"{sys.prefix}/bin:{programs.path}",
        programs=programs,
        addresses={machine: f"{address}:{port}" for machine, port in ports.items()},
    )


def _settings(shape: Shape, options: Options, user: User) -> SandboxSettings:
    return SandboxSettings(
        shape=shape,
        user=user,
        slurmd_timeout=options.slurmd_timeout,
        return_to_service=options.return_to_service,
        extra=options.extra,
        freezable=options.freezable,
    )


def _namespaces_allowed() -> bool:
    """Whether root may do what root does: in many containers it may not."""
    try:
        done = command.finish(["unshare", "--pid", "--mount", "--net", "--uts", "--ipc", "--fork", "true"])
    except command.CommandMissingError:
        return False
    return done.code == 0


def exposures(options: Options) -> list[Path]:
    """Return the paths that the user is to reach: DeepLink, what runs it, and what was asked for."""
    package = Path(str(resources.files("deeplink"))).parent
    wanted = [Path(sys.prefix), Path(sys.base_prefix), package, *options.expose]
    return list(dict.fromkeys(path.absolute() for path in wanted))


def build(layout: SandboxLayout, wanted: SandboxSettings, texts: Mapping[Path, str]) -> None:
    """Make the sandbox's folders and write its files; what was there before is gone already."""
    # Others must be able to read them, however careful our own user is with his files.
    before = os.umask(0o022)
    try:
        layout.folder.chmod(0o755)
        _make_folders(layout, wanted)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        for number in range(wanted.shape.gpus):
            # slurmd wants a device of each GPU, and takes the number from the name.
            (layout.etc / "dev" / f"nvidia{number}").symlink_to(os.devnull)
        key = layout.munge / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(_KEY_BYTES))
    finally:
        os.umask(before)


def _make_folders(layout: SandboxLayout, wanted: SandboxSettings) -> None:
    user = wanted.user
    for folder in layout.folders:
        folder.mkdir()
    for secret in (layout.state, layout.boot):
        secret.chmod(0o700)
    if wanted.freezable:
        storage.make(layout)
    user.home.mkdir()
    os.chown(user.home, user.uid, user.gid)
    for machine in wanted.shape.machines:
        disks = layout.machine(machine)
        for folder in (disks, disks / "spool", disks / "tmp"):
            folder.mkdir()
        (disks / "tmp").chmod(0o1777)
        if machine != CTL:
            layout.ssd(machine).mkdir()
            os.chown(layout.ssd(machine), user.uid, user.gid)
            layout.ssd(machine).chmod(0o1777)
