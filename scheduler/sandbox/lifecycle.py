"""From nothing to a running sandbox and back, and telling which of the two it is."""

from __future__ import annotations

import dataclasses
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deeplink.scheduler.sandbox import blueprint, loopback, state, storage
from deeplink.scheduler.sandbox.errors import BusyError, NotUpError, RecordUnreadableError, SandboxNameError
from deeplink.scheduler.sandbox.layout import SandboxLayout, default_root
from deeplink.scheduler.sandbox.loopback import Loopback
from deeplink.scheduler.sandbox.machines import Namespaces, end_keeper, find_keeper
from deeplink.scheduler.sandbox.namespaced import Namespaced

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from deeplink.clock import Clock
    from deeplink.scheduler.sandbox.hardware import Hardware
    from deeplink.scheduler.sandbox.processes import ProcessId
    from deeplink.scheduler.sandbox.shape import Shape


def layout_of(name: str) -> SandboxLayout:
    """Return where a sandbox of that name lies, for who we are.

    Raises:
        SandboxNameError: no sandbox can be called so, or the place is somebody else's.
    """
    layout = SandboxLayout.of(default_root(os.environ, root=os.geteuid() == 0), name)
    there = next(place for place in (layout.folder, *layout.folder.parents) if os.path.exists(place))  # noqa: PTH110
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        raise SandboxNameError(
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
    return Namespaced(layout, record.settings, record.keeper, Namespaces(layout, record.settings.shape, clock))


def running(layout: SandboxLayout, clock: Clock) -> tuple[state.Record, Hardware] | None:
    """Return what is up; None when nothing is, though its folder may be there.

    Raises:
        RecordUnreadableError: what it was made of cannot be read.
    """
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
    layout: SandboxLayout, drawn: blueprint.Blueprint, clock: Clock, wait_s: float
) -> Iterator[tuple[state.Record, Hardware]]:
    """Start what was drawn; it stays when the block ends well."""
    base = state.Record(
        settings=drawn.settings, path=drawn.path, programs=drawn.programs, addresses=drawn.addresses
    )
    if drawn.programs is not None:
        with Loopback(layout, drawn.settings, drawn.programs, clock).started(wait_s) as hardware:
            yield base, hardware
    else:
        with Namespaced.started(layout, drawn.settings, clock, wait_s) as machines:
            yield dataclasses.replace(base, keeper=machines.keeper), machines


def plan(name: str, shape: Shape, options: blueprint.Options) -> dict[Path, str]:
    """Return every file that `Sandbox.up` would write, scripts of the processes 1 included; nothing is done."""
    return blueprint.draw(layout_of(name), shape, options).texts


def clear(layout: SandboxLayout, clock: Clock) -> bool:
    """End everything of a sandbox, whole or in pieces, and remove it; tell whether there was anything.

    Raises:
        BusyError: somebody else is changing it.
        BootError: a process does not end.
    """
    try:
        with state.locked(layout, clock):
            _end(layout, clock)
            loopback.sweep(layout, clock)
            state.remove(layout)
    except NotUpError:
        return False
    return True


def _end(layout: SandboxLayout, clock: Clock) -> None:
    storage.thaw(layout)  # who hangs in a write cannot be ended
    try:
        up = running(layout, clock)
    except RecordUnreadableError:
        up = None
    if up is not None:
        up[1].end()
    elif keeper := find_keeper(layout):
        end_keeper(keeper, clock)


def names() -> list[str]:
    """Return the names of all sandboxes of which there is a folder."""
    root = default_root(os.environ, root=os.geteuid() == 0)
    return sorted(folder.name for folder in root.glob("*/"))


def left_over(clock: Clock) -> list[str]:
    """Return the names of sandboxes of which there is a folder, and nobody who runs or is changing them.

    Whoever reads them removes them: a folder that holds anything else is none, wherever DEEPLINK_SANDBOX_ROOT is.
    """
    found = []
    for name in names():
        try:
            layout = layout_of(name)
            with state.locked(layout, clock, wait_s=0.0):
                if running(layout, clock) is None and layout.is_all_ours():
                    found.append(layout.name)
        except (NotUpError, BusyError, SandboxNameError, RecordUnreadableError):
            continue  # gone, somebody is at it, none of ours, or it may be up
    return found


def remains(layout: SandboxLayout, clock: Clock) -> list[str]:
    """Return what `clear` would end and remove, one thing a line."""
    firsts: Iterable[ProcessId | None]
    try:
        up = running(layout, clock)
    except RecordUnreadableError:
        up = None
    if up is None:
        firsts = [find_keeper(layout)]
    else:
        record, hardware = up
        firsts = [record.keeper] if record.keeper else map(hardware.process_1, record.settings.shape.machines)
    lines = [f"end process {first.pid} and all below it" for first in firsts if first is not None]
    return [*lines, *([f"remove {layout.folder}"] if layout.folder.exists() else [])]
