"""What the folders of the configuration are like on the nodes. Each docstring is what `--explain` prints."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from deeplink.mounts import MEMORY, is_shared
from deeplink.scheduler.doctor.evidence import alike, together
from deeplink.scheduler.doctor.finding import error, note, ok, unknown, warning
from deeplink.scheduler.doctor.node_rules import usable
from deeplink.text import sized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deeplink.scheduler.doctor.evidence import SiteEvidence
    from deeplink.scheduler.doctor.finding import DoctorFinding
    from deeplink.scheduler.doctor.report import Disk, FolderReport, NodeReport

_LEAST_FREE = 10 << 30
_SLOW_WRITE, _SLOW_READ = 100e6, 200e6  # bytes a second: what a single spinning disk does
_SLOW_RANDOM_S = 1e-3  # for 4 KiB; an SSD takes a tenth of it, a disk or a network ten times
_TELLING = 32 << 20  # bytes; of less, fsync is most of the time
_LAYERED = frozenset({"overlay", "aufs"})
_TWO = 2


def store_usable(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell whether the user may write to the store's folder, and whether it has room.

    Permissions as well: a store that others may write to could be given false shards under true names, which is
    noticed when they are read, and costs until then.
    """
    reports = usable(evidence)
    if not reports:
        yield unknown(evidence.why_not("hosts"))
        return
    for folder, nodes in alike(reports, lambda report: report.host.folders["store"].path).items():
        of = {node: reports[node].host.folders["store"] for node in _split(reports, folder)}
        closed = [node for node, one in of.items() if one.problem or not one.writable]
        small = [node for node, one in of.items() if not one.problem and one.free < _LEAST_FREE]
        opened = [node for node, one in of.items() if one.there and one.mode & 0o002 and not one.mode & 0o1000]
        if closed:
            first = of[closed[0]]
            why = first.problem or f"{first.base} is not writable for this user"
            yield error(f"store {folder}: {why}", _NAME_STORE, together(closed))
        if small:
            least = sized(min(of[node].free for node in small))
            yield warning(f"store {folder}: {least} free", _NAME_STORE, together(small))
        if opened:
            yield warning(f"store {folder}: everybody may write there", f"chmod o-w {folder}", together(opened))
        if not (closed or small or opened):
            yield ok(f"store {folder}: {sized(min(one.free for one in of.values()))} free or more", nodes)


_NAME_STORE = "config.toml: store = a folder of the node's own SSD, such as /local/ssd/deeplink-$USER"


def _split(reports: dict[str, NodeReport], folder: str) -> list[str]:
    return [node for node, report in reports.items() if report.host.folders["store"].path == folder]


def store_on_disk(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell what kind of file system the store lies on.

    A network file system is what the store is to spare; tmpfs is memory, taken from the job and empty after a
    boot; a container's overlay is slower to write and gone with the container.
    """
    reports = usable(evidence)
    if not reports:
        yield unknown(evidence.why_not("hosts"))
        return
    for kind, nodes in alike(reports, lambda report: report.host.folders["store"].kind).items():
        if is_shared(kind):
            yield error(f"the store lies on {kind}, storage that nodes share", _NAME_STORE, nodes)
        elif kind in MEMORY:
            yield warning(
                f"the store lies on {kind}: it takes the job's memory, and a boot empties it", _NAME_STORE, nodes
            )
        elif kind in _LAYERED:
            yield warning(f"the store lies on {kind}, a container's layers", _NAME_STORE, nodes)
        elif not kind:
            yield unknown("the store's file system cannot be told", where=nodes)
        else:
            yield ok(f"the store lies on {kind}", nodes)


def store_private(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell whether each node has a store of its own.

    Each node leaves a marker in the store's folder and looks for those of the others. A store that two nodes share
    holds every shard once where two copies are counted, and both evict the other's.
    """
    measured = _measured(evidence)
    if len(measured) < _TWO:
        yield unknown(_alone(evidence))
        return
    shared = {node: seen for node, report in measured.items() if (seen := _seen(report, "store"))}
    if shared:
        told = together({*shared, *(other for seen in shared.values() for other in seen)})
        yield error("these nodes have one store between them", _NAME_STORE, told)
        return
    unmarked = [node for node, report in measured.items() if not report.host.folders["store"].marked]
    if unmarked:
        yield unknown("no marker could be left in the store", where=together(unmarked))
    else:
        yield ok("each node has a store of its own", together(measured))


def _measured(evidence: SiteEvidence) -> dict[str, NodeReport]:
    return {node: report for node, report in usable(evidence).items() if report.measured is not None}


def _seen(report: NodeReport, key: str) -> tuple[str, ...]:
    return report.measured.markers.get(key, ()) if report.measured else ()


def _looked_for(report: NodeReport) -> set[str]:
    return set(report.measured.reached) if report.measured else set()


def _alone(evidence: SiteEvidence) -> str:
    return evidence.problems.get("hosts") or "it takes two nodes to tell: `deeplink doctor --nodes 2`"


def catalog_shared(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell whether all nodes see one catalog.

    The catalog holds the indexes of datasets; every node must see the same one. Markers are used as for the store,
    and where the user may not write there, whether it is the same folder by its inode and its time of change.
    """
    yield from _shared(evidence, "catalog", error)


def state_shared(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell whether all nodes see one folder of state.

    Records of a job lie there: events, the chart of its losses, decisions. Where it is each node's own, a job's
    record stays on the node its script ran on, and `deeplink incidents` on the login node does not see it.
    """
    yield from _shared(evidence, "state", warning)


def _shared(
    evidence: SiteEvidence, key: str, judge: Callable[[str, str, str], DoctorFinding]
) -> Iterator[DoctorFinding]:
    measured = _measured(evidence)
    if len(measured) < _TWO:
        yield unknown(_alone(evidence))
        return
    remedy = f"config.toml: {key} = a folder that all nodes see"
    broken = {node: why for node, report in measured.items() if (why := _closed(report.host.folders[key], key))}
    if broken:
        yield error(f"{key}: {next(iter(broken.values()))}", remedy, together(broken))
        return
    marked = {node for node, report in measured.items() if report.host.folders[key].marked}
    path = next(iter(measured.values())).host.folders[key].path
    if marked:
        apart = [
            node for node, report in measured.items() if _looked_for(report) & marked - set(_seen(report, key))
        ]
        said = f"{key} {path}: not every node sees what the others write there"
    else:
        by_identity = alike(measured, lambda report: report.host.folders[key].identity)
        apart = [node for nodes in list(by_identity.values())[1:] for node in nodes.split(",")]
        said = f"{key} {path}: not the same folder on all nodes"
    if apart:
        yield judge(said, remedy, together(apart))
    else:
        yield ok(f"{key} {path} is one for all nodes", together(measured))


def _closed(folder: FolderReport, key: str) -> str:
    """Return why a folder cannot be used for what it is: catalogs are read, the state is written."""
    if not folder.problem and not folder.readable:
        return f"{folder.base} is not readable for this user"
    if not folder.problem and key == "state" and not folder.writable:
        return f"{folder.base} is not writable for this user"
    return folder.problem


def store_speed(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell how fast the store's disk writes, reads, and reads 4 KiB at random.

    A file of 256 MiB is written until fsync has returned, read back past the page cache (O_DIRECT) and read at
    random places; it never has a name, and no part of it takes longer than eight seconds. An SSD answers a random
    read in 0.1 ms; a disk or shared storage needs ten to a hundred times as long, and small files are random
    reads.
    """
    disks = {
        node: report.measured.disk
        for node, report in usable(evidence).items()
        if report.measured is not None and report.measured.disk is not None
    }
    if not disks:
        yield unknown(evidence.problems.get("hosts") or "it was not measured (--disk-mib 0)")
    for node, disk in disks.items():
        yield _speed(node, disk)


def _speed(node: str, disk: Disk) -> DoctorFinding:
    if disk.problem or not (disk.written and disk.random_reads):
        return unknown(f"not measured: {disk.problem or 'the time was up'}", where=node)
    write, read = disk.written / max(disk.write_s, 1e-9), disk.written / max(disk.read_s, 1e-9)
    each = disk.random_s / disk.random_reads
    said = f"writes {sized(write)}/s, reads {sized(read)}/s, 4 KiB at random in {each * 1e3:.2f} ms"
    if not disk.cold:
        return note(f"{said}; out of memory, for want of O_DIRECT", where=node)
    slow = [
        what
        for what, is_slow in (
            ("writing", disk.written >= _TELLING and write < _SLOW_WRITE),
            ("reading", disk.written >= _TELLING and read < _SLOW_READ),
            ("random reads", each > _SLOW_RANDOM_S),
        )
        if is_slow
    ]
    if slow:
        return warning(f"{said}: slow for an SSD at {', '.join(slow)}", _NAME_STORE, node)
    return ok(said, node)


def site_scripts(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell what the site's prolog and epilog remove or end on the nodes.

    An epilog that cleans the SSD makes every job bring its shards anew; one that ends all of a user's processes
    ends those of his other jobs on that node. Only scripts that the user may read are looked at, and only lines
    that remove (rm -r, -delete, mkfs) or kill (pkill, killall).
    """
    told = evidence.settings
    if told is None:
        yield unknown(evidence.why_not("settings"))
        return
    names = scripts_of(evidence)
    if not names:
        yield ok("no prolog or epilog on the nodes")
        return
    measured = _measured(evidence)
    if not measured:
        yield unknown(f"{', '.join(names)}: {evidence.why_not('hosts')}")
        return
    store = PurePath(evidence.config.store)
    said = 0
    for lines, nodes in alike(measured, lambda report: report.measured.scripts if report.measured else ()).items():
        for line in lines:
            said += 1
            if any(str(folder) in line for folder in (store, *store.parents) if len(folder.parts) > _TWO - 1):
                yield error(line, f"leave {store} out of it", nodes)
            else:
                yield note(line, f"make sure that it leaves {store} and other jobs' processes alone", nodes)
    for unread, nodes in alike(measured, lambda report: report.measured.unread if report.measured else ()).items():
        if unread:
            said += 1
            yield unknown(f"{', '.join(unread)}: not readable for this user", where=nodes)
    if not said:
        yield ok(f"{', '.join(names)}: nothing is removed")


def scripts_of(evidence: SiteEvidence) -> tuple[str, ...]:
    """Return the files that slurmd runs before and after jobs and steps."""
    if evidence.settings is None:
        return ()
    kinds = ("Prolog", "Epilog", "TaskProlog", "TaskEpilog", "ResvProlog", "ResvEpilog")
    return tuple(name for kind in kinds for name in evidence.settings.listed(kind))
