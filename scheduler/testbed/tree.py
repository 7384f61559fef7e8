"""The file tree that machines of a sandbox see: the host's, with doors opened and rooms of their own. Pure.

A machine's root is a small tmpfs with the host's top folders bound in, and a copy of its /etc. So `/local` and
`/etc/hosts` can be there though the host has none, nothing is ever made or mounted on the host, and a folder that
others may not enter (a 0700 /root that holds the interpreter, a clone in a 0700 temporary folder) can be replaced
by one that they may, with only what was exposed in it.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.scheduler.testbed.errors import not_exposed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Step = tuple[str, ...]
"""One command of a plan."""

OWN = frozenset({"tmp", "run", "local"})
"""Top folders that every machine has its own of."""
_COPIED = frozenset({"etc"})
"""Top folders in which the machines have files that the host may lack, or has others of."""
_MOUNTED_LATER = frozenset({"proc", "sys"})
_LEFT_OUT = frozenset({"lost+found"})
_MOST_LINKS = 40


class ThisHost:
    """What planning asks about the file tree of the machine we run on. Links are not followed."""

    def children(self, folder: Path) -> list[str]:
        """Return the names in a folder, sorted."""
        return sorted(entry.name for entry in folder.iterdir())

    def is_folder(self, path: Path) -> bool:
        """Tell whether there is a folder."""
        return path.is_dir() and not path.is_symlink()

    def exists(self, path: Path) -> bool:
        """Tell whether there is anything."""
        return os.path.lexists(path)

    def link(self, path: Path) -> str | None:
        """Return what a symbolic link points to; None where there is no link."""
        return str(path.readlink()) if path.is_symlink() else None

    def closed(self, path: Path) -> bool:
        """Tell whether others may not enter (a folder) or read (a file)."""
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return False  # a dry run names what is yet to be made
        wanted = stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH
        return not mode & wanted


@dataclass(frozen=True, slots=True)
class MountPlan:
    """Commands that put the tree together."""

    shared: tuple[Step, ...]  # once, before anything else, for all machines
    own: tuple[Step, ...]  # on each machine, once it has its own /tmp and /run: what was exposed in there


def follow(host: ThisHost, path: Path) -> tuple[list[tuple[Path, str]], Path]:
    """Return the symbolic links met on the way to a path, and where it really is."""
    done = Path("/")
    links: list[tuple[Path, str]] = []
    todo = list(path.parts[1:])
    while todo:
        part = todo.pop(0)
        if part == "..":
            done = done.parent
            continue
        target = host.link(done / part)
        if target is None:
            done /= part
            continue
        links.append((done / part, target))
        if len(links) > _MOST_LINKS:
            raise not_exposed(path, "its links go in circles")
        if target.startswith("/"):
            done = Path("/")
        todo = [word for word in Path(target).parts if word != "/"] + todo
    if not host.exists(done):
        raise not_exposed(path, "it does not exist")
    if len(done.parts) < 2:  # noqa: PLR2004
        raise not_exposed(path, "that is everything")
    return links, done


def _below(path: Path, folder: Path) -> bool:
    return folder in path.parents


def cover_of(host: ThisHost, real: Path, around: Path) -> Path | None:
    """Return the folder to replace so that others reach `real`, seen below `around`; None where they do."""
    top = Path("/", real.parts[1])
    if around == Path("/") and top.name in OWN:
        return top
    way = [folder for folder in reversed(real.parents) if _below(folder, around)]
    return next((folder for folder in way if host.closed(folder)), None)


@dataclass(frozen=True, slots=True)
class _Item:
    """One thing to show: a path to bind, or a link to make again (then `target` is set)."""

    path: Path
    target: str | None = None


def _items(host: ThisHost, path: Path) -> list[_Item]:
    """Return what to show so that others reach all of `path` as it is spelled.

    The mode of a folder comes along when it is bound: a closed one is made again, and what it holds is shown.
    """
    links, real = follow(host, path)
    items = [_Item(link, target) for link, target in links]
    if not host.closed(real):
        return [*items, _Item(real)]
    if not host.is_folder(real):
        raise not_exposed(path, "others may not read it")
    inside = [_Item(real / name, host.link(real / name)) for name in host.children(real)]
    return [*items, *(item for item in inside if item.target is not None or not host.closed(item.path))]


def _point(host: ThisHost, source: Path, place: str) -> list[Step]:
    """Make what `source` can be mounted on."""
    if host.is_folder(source):
        return [("mkdir", "-p", place)]
    return [("mkdir", "-p", str(Path(place).parent)), ("touch", place)]


def _bind(host: ThisHost, source: Path, place: str) -> list[Step]:
    return [
        *_point(host, source, place),
        ("mount", "--rbind", str(source), place),
        ("mount", "-o", "remount,bind,ro", place),
    ]


def _make_link(item: _Item, place: str) -> list[Step]:
    return [("mkdir", "-p", str(Path(place).parent)), ("ln", "-sfn", str(item.target), place)]


def _cover(new: Path, folder: Path) -> Step:
    return ("mount", "-t", "tmpfs", "-o", "mode=755", "cover", f"{new}{folder}")


def _top(host: ThisHost, new: Path) -> list[Step]:
    """Show the host's top folders; those that differ between machines, or are closed, are made empty."""
    steps: list[Step] = []
    names = {name for name in host.children(Path("/")) if name not in _LEFT_OUT}
    # The folder that holds `new` comes first, when there is nothing in `new` that would be bound along with it.
    for name in sorted({*names, *OWN, *_MOUNTED_LATER}, key=lambda name: (name != new.parts[1], name)):
        path, target = Path("/", name), host.link(Path("/", name))
        if target is not None:
            steps.append(("ln", "-s", target, f"{new}{path}"))
        elif name in OWN or name in _MOUNTED_LATER or (host.is_folder(path) and host.closed(path)):
            steps.append(("mkdir", f"{new}{path}"))
        elif name in _COPIED:
            steps.append(("cp", "-a", str(path), f"{new}{path}"))
        elif host.is_folder(path):
            steps += [("mkdir", f"{new}{path}"), ("mount", "--rbind", str(path), f"{new}{path}")]
    if new.parts[1] not in OWN and not host.closed(Path("/", new.parts[1])):
        steps.append(("umount", f"{new}{new}"))
    return steps


def _is_own(folder: Path) -> bool:
    return folder.parent == Path("/") and folder.name in OWN


def _hidden(host: ThisHost, kept: Path, exposed: Iterable[Path]) -> Iterator[tuple[_Item, Path]]:
    """Yield what must be shown again, with the folder that hides it; outer paths come before those inside."""
    bound = [kept]
    for path in sorted(exposed, key=lambda path: len(path.parts)):
        for item in _items(host, path):
            outer = [other for other in bound if _below(item.path, other)]
            cover = cover_of(host, item.path, max(outer, key=lambda o: len(o.parts), default=Path("/")))
            if cover is not None and item.path not in bound:
                bound.append(item.path)
                yield item, cover


def plan(host: ThisHost, new: Path, stage: Path, kept: Path, exposed: Iterable[Path]) -> MountPlan:
    """Return how to put the machines' tree together below `new`."""
    shared: list[Step] = [("mount", "-t", "tmpfs", "-o", "mode=755", "root", str(new)), *_top(host, new)]
    hidden = cover_of(host, kept, Path("/")) or kept.parent
    shared += [
        _cover(new, hidden),
        ("mkdir", "-p", f"{new}{kept}"),
        ("mount", "--rbind", str(kept), f"{new}{kept}"),  # the homes may be a file system of their own
    ]
    own: list[Step] = []
    covered = {hidden}
    for number, (item, cover) in enumerate(_hidden(host, kept, exposed)):
        if _is_own(cover):
            staged = stage / str(number)
            shared += _bind(host, item.path, f"{new}{staged}") if item.target is None else []
            place = str(item.path)
            mounted = [*_point(host, item.path, place), ("mount", "--rbind", str(staged), place)]
            own += mounted if item.target is None else _make_link(item, place)
            continue
        shared += [] if cover in covered else [_cover(new, cover)]
        covered.add(cover)
        place = f"{new}{item.path}"
        shared += _make_link(item, place) if item.target is not None else _bind(host, item.path, place)
    shared += [("mount", "-o", "remount,ro", f"{new}{cover}") for cover in sorted(covered - {hidden})]
    return MountPlan(tuple(shared), tuple(own))
