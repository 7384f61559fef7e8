"""From nothing to a running sandbox and back, and telling which of the two it is."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from deeplink.core.clock import Clock, SystemClock
from deeplink.scheduler.slurm import command
from deeplink.scheduler.testbed import loopback, namespaced, settings, state
from deeplink.scheduler.testbed.errors import (
    NotUpError,
    SandboxError,
    SlurmMissingError,
    bad_name,
    bad_user,
    not_root,
)
from deeplink.scheduler.testbed.loopback import Loopback
from deeplink.scheduler.testbed.namespaced import Namespaced, end_keeper, find_keeper
from deeplink.scheduler.testbed.programs import SYSTEM_PATH, cache_folder, installed, missing, unpacked
from deeplink.scheduler.testbed.settings import SandboxSettings
from deeplink.scheduler.testbed.shape import CTL
from deeplink.scheduler.testbed.state import DEFAULT_USER, SandboxLayout, choose_user, default_root

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from deeplink.scheduler.testbed.processes import ProcessId
    from deeplink.scheduler.testbed.settings import User
    from deeplink.scheduler.testbed.shape import Shape

Hardware: TypeAlias = Namespaced | Loopback
"""The running machines of one sandbox."""
_KEY_BYTES = 128
_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What can be asked of `Sandbox.up` besides name and shape."""

    # who jobs run as, by name or number: one of the host's, else one that exists in the sandbox alone; empty:
    # `deeplink`, or ourselves on loopback
    user: str = ""
    # paths the user can reach (read-only) though a folder above is closed to others, besides the running
    # interpreter and DeepLink itself
    expose: tuple[Path, ...] = ()
    slurmd_timeout: int = 10  # seconds a node may be silent until Slurm calls it down
    return_to_service: int = 2  # ReturnToService of slurm.conf
    extra: tuple[str, ...] = ()  # further lines of slurm.conf
    wait_s: float = 30.0  # how long to wait until all nodes are idle, s
    loopback: bool = False  # no namespaces: several slurmd on this host's loopback (always so without root)
    unpacked: bool = False  # on loopback, use packages unpacked into a cache folder though Slurm is installed
    freezable: bool = False  # make the homes a file system of their own, so that shared storage can stall


def draw(layout: SandboxLayout, shape: Shape, options: Options) -> tuple[state.Record, dict[Path, str]]:
    """Return what a sandbox of a shape and options is made of here, and for who we are; and each file's text."""
    if options.freezable and os.geteuid() != 0:
        raise not_root("up --freezable")
    if options.loopback or os.geteuid() != 0 or not _namespaces_allowed():
        return _on_loopback(layout, shape, options)
    if lacking := missing((*namespaced.PROGRAMS, *(state.PROGRAMS if options.freezable else ()))):
        raise SlurmMissingError(lacking)
    wanted = _settings(shape, options, choose_user(options.user or DEFAULT_USER, layout))
    path = f"{sys.prefix}/bin:{SYSTEM_PATH}"
    texts = namespaced.files(wanted, layout, exposures(options), path)
    return state.Record(settings=wanted, path=path), texts


def _on_loopback(layout: SandboxLayout, shape: Shape, options: Options) -> tuple[state.Record, dict[Path, str]]:
    user = loopback.this_user(layout)
    if options.user not in {"", user.name, str(user.uid)}:
        raise bad_user(options.user, "without namespaces jobs run as who brings the sandbox up")
    programs = None if options.unpacked else installed()
    if programs is None:
        programs = unpacked(cache_folder(os.environ))
    address, _ = loopback.own_address()
    ports = loopback.free_ports(address, [CTL, *shape.nodes])
    wanted = _settings(shape, options, user)
    record = state.Record(
        settings=wanted,
        path=f"{sys.prefix}/bin:{programs.path}",
        programs=programs,
        addresses={machine: f"{address}:{port}" for machine, port in ports.items()},
    )
    return record, settings.files(wanted, layout, loopback.place(layout, ports, programs, user))


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
        state.make(layout)
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


def layout_of(name: str) -> SandboxLayout:
    """Return where a sandbox of that name lies, for who we are."""
    layout = SandboxLayout.of(default_root(os.environ, root=os.geteuid() == 0), name)
    there = next(place for place in (layout.folder, *layout.folder.parents) if os.path.exists(place))  # noqa: PTH110
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        raise bad_name(
            name,
            f"{there} cannot be written to",
            "Be who brought it up (sudo), or put DEEPLINK_SANDBOX_ROOT elsewhere.",
        )
    return layout


def _hardware(layout: SandboxLayout, record: state.Record, clock: Clock) -> Hardware:
    if record.programs is not None:
        return Loopback(layout, record.settings, record.programs, clock)
    if record.keeper is None:
        raise ValueError(f"{layout.record} names neither keeper nor programs")
    return Namespaced(layout, record.settings, record.keeper, clock)


def running(layout: SandboxLayout, clock: Clock) -> tuple[state.Record, Hardware] | None:
    """Return what is up; None when nothing is, though its folder may be there."""
    record = state.Record.read(layout)
    if record is None:
        return None
    hardware = _hardware(layout, record, clock)
    if record.keeper is not None:
        return (record, hardware) if record.keeper.alive else None
    alive = any(hardware.process_1(machine) for machine in record.settings.shape.machines)
    return (record, hardware) if alive else None


@contextmanager
def started(
    layout: SandboxLayout, record: state.Record, clock: Clock, wait_s: float
) -> Iterator[tuple[state.Record, Hardware]]:
    """Start what the record says; it stays when the block ends well."""
    if record.programs is not None:
        with Loopback(layout, record.settings, record.programs, clock).started(wait_s) as hardware:
            yield record, hardware
    else:
        with Namespaced.started(layout, record.settings, clock, wait_s) as machines:
            yield dataclasses.replace(record, keeper=machines.keeper), machines


def plan(name: str, shape: Shape, options: Options) -> dict[Path, str]:
    """Return every file that `Sandbox.up` would write, scripts of the processes 1 included; nothing is done."""
    return draw(layout_of(name), shape, options)[1]


def clear(name: str = "default", clock: Clock = _CLOCK) -> bool:
    """End everything of a sandbox, whole or in pieces, and remove it; tell whether there was anything."""
    layout = layout_of(name)
    try:
        with state.locked(layout, clock):
            _end(layout, clock)
            loopback.sweep(layout, clock)
            state.remove(layout)
    except NotUpError:
        return False
    return True


def _end(layout: SandboxLayout, clock: Clock) -> None:
    state.thaw(layout)  # who hangs in a write cannot be ended
    try:
        up = running(layout, clock)
    except SandboxError:  # the record cannot be read
        up = None
    if up is not None:
        up[1].end()
    elif keeper := find_keeper(layout):
        end_keeper(keeper, clock)


def names() -> list[str]:
    """Return the names of all sandboxes of which there is a folder."""
    root = default_root(os.environ, root=os.geteuid() == 0)
    return sorted(folder.name for folder in root.glob("*/"))


def left_over(clock: Clock = _CLOCK) -> list[str]:
    """Return the names of sandboxes of which there is a folder, and no one who runs or is changing them.

    Whoever reads them removes them: a folder that holds anything else is none, wherever DEEPLINK_SANDBOX_ROOT is.
    """
    found = []
    for name in names():
        try:
            layout = layout_of(name)
            with state.locked(layout, clock, wait_s=0.0):
                if running(layout, clock) is None and layout.is_all_ours():
                    found.append(layout.name)
        except SandboxError:
            continue  # gone, somebody is at it, none of ours, or it may be up
    return found


def remains(name: str = "default", clock: Clock = _CLOCK) -> list[str]:
    """Return what `clear` would end and remove, one thing a line."""
    layout = layout_of(name)
    firsts: Iterable[ProcessId | None]
    try:
        up = running(layout, clock)
    except SandboxError:  # the record cannot be read
        up = None
    if up is None:
        firsts = [find_keeper(layout)]
    else:
        record, hardware = up
        firsts = [record.keeper] if record.keeper else map(hardware.process_1, record.settings.shape.machines)
    lines = [f"end process {first.pid} and all below it" for first in firsts if first is not None]
    return [*lines, *([f"remove {layout.folder}"] if layout.folder.exists() else [])]
