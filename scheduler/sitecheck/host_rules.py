"""What the nodes told of themselves and of their folders. Each docstring is what `--explain` prints."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from deeplink.core.store_place import MEMORY, is_shared
from deeplink.core.text import counted, sized
from deeplink.scheduler.sitecheck.running_settings import RANK_PORTS
from deeplink.scheduler.sitecheck.site_evidence import alike, error, note, ok, together, unknown, warning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deeplink.core.finding import Finding
    from deeplink.scheduler.node.disk import Disk
    from deeplink.scheduler.sitecheck.site_evidence import FolderReport, HostFacts, Measured, SiteEvidence
    from deeplink.scheduler.slurm.settings import SlurmSettings

    Hosts = dict[str, HostFacts]

_LEAST_FILES = 4096
_LEAST_SHARED_MEMORY = 1 << 30
_MUST_AGREE = ("deeplink", "code", "python", "torch")
_VERSIONS = {
    "deeplink": "DeepLink",
    "code": "DeepLink's files",
    "python": "Python",
    "torch": "torch",
    "slurm": "Slurm's commands",
    "driver": "the NVIDIA driver",
    "kernel": "the kernel",
}
_TRY = "try `srun -w NODE deeplink --version`; the same environment must be at the same path on every node"
_LEAST_FREE = 10 << 30
_SLOW_WRITE, _SLOW_READ = 100e6, 200e6  # bytes a second: what a single spinning disk does
_SLOW_RANDOM_S = 1e-3  # for 4 KiB; an SSD takes a tenth of it, a disk or a network ten times
_TELLING = 32 << 20  # bytes; of less, fsync is most of the time
_LAYERED = frozenset({"overlay", "aufs"})
_NAME_STORE = "config.toml: store = a folder of the node's own SSD, such as /local/ssd/deeplink-$USER"


def nodes_answer(evidence: SiteEvidence) -> Iterator[Finding]:
    """Tell which nodes of the step said nothing, or could not run DeepLink.

    `deeplink run` starts an agent on each node in the same way, with the same Python at the same path.
    """
    why = evidence.problems.get("hosts")
    if evidence.silent:
        yield error(why or "said nothing in time", _TRY, together(evidence.silent))
    elif why:
        yield unknown(why)
    for problem, nodes in alike({node: report.host.problem for node, report in evidence.reports.items()}).items():
        if problem:
            yield error(problem, "mend it on the nodes named", nodes)
    if evidence.hosts:
        yield ok(f"{counted(len(evidence.hosts), 'host')} answered", together(evidence.hosts))


def versions_alike(hosts: Hosts) -> Iterator[Finding]:
    """Tell whether all nodes run the same DeepLink, Python and torch, and the same Slurm, driver and kernel.

    Of DeepLink the files are compared too (names and sizes): two nodes may have one version and other code.
    """
    differing = False
    for name, called in _VERSIONS.items():
        by_value = alike({node: host.versions.get(name, "") for node, host in hosts.items()})
        if len(by_value) > 1:
            differing = True
            told = "; ".join(f"{value or 'none'} on {nodes}" for value, nodes in by_value.items())
            odd = together(node for value in list(by_value)[1:] for node in by_value[value].split(","))
            judge = error if name in _MUST_AGREE else warning
            yield judge(f"{called}: {told}", "install the same on all nodes", odd)
    if not differing:
        first = next(iter(hosts.values())).versions
        names = [name for name in ("deeplink", "python", "slurm", "torch") if first.get(name)]
        yield ok(", ".join(f"{name} {first[name]}" for name in names), together(hosts))


def configuration_alike(hosts: Hosts) -> Iterator[Finding]:
    """Tell whether the configuration says the same on all nodes.

    `/etc/deeplink/config.toml` is each node's own; where it names another catalog there, that node finds no
    dataset.
    """
    differing = False
    for key in sorted({key for host in hosts.values() for key in host.settings}):
        by_value = alike({node: host.settings.get(key, "") for node, host in hosts.items()})
        if len(by_value) > 1:
            differing = True
            told = "; ".join(f"{value or 'nothing'} on {nodes}" for value, nodes in by_value.items())
            yield error(f"{key}: {told}", f"config.toml: {key} = the same on all nodes")
    if not differing:
        yield ok("the configuration is one", together(hosts))


def open_files(hosts: Hosts) -> Iterator[Finding]:
    """Tell how many files a process may open (ulimit -n).

    An agent keeps shards and connections open and raises the soft limit to the hard one by itself; of the hard one
    a quarter bounds its connections.
    """
    by_value = alike({node: host.limits.get("nofile", (-1, -1))[1] for node, host in hosts.items()})
    for value, nodes in by_value.items():
        what = "open files (ulimit -Hn)"
        if 0 <= value < _LEAST_FILES:
            yield warning(
                f"{value} {what}", "limits.conf: * - nofile 65536; and the same for slurmd's unit", nodes
            )
        else:
            yield ok(f"{'no bound on' if value < 0 else value} {what}", nodes)


def locked_memory(hosts: Hosts) -> Iterator[Finding]:
    """Tell how much memory a process may lock (ulimit -l), where there is InfiniBand.

    NCCL and MPI register the memory they send from; with a small limit they fail or fall back to TCP.
    """
    fabric = {node: host for node, host in hosts.items() if host.infiniband}
    bounded = [node for node, host in fabric.items() if host.limits.get("memlock", (-1, -1))[0] != -1]
    if bounded:
        said = "locked memory is bounded (ulimit -l), and NCCL registers what it sends"
        remedy = "limits.conf: * - memlock unlimited; LimitMEMLOCK=infinity for slurmd"
        yield error(said, remedy, together(bounded))
    else:
        yield ok("no InfiniBand" if not fabric else "locked memory is unlimited", together(hosts))


def shared_memory(hosts: Hosts) -> Iterator[Finding]:
    """Tell how much room /dev/shm has.

    DataLoader workers hand their batches over in it; where it is full they die of SIGBUS.
    """
    rooms = {node: host.shared_memory or 0 for node, host in hosts.items()}
    small = {node: room for node, room in rooms.items() if room < _LEAST_SHARED_MEMORY}
    if small:
        said = f"shared memory (/dev/shm) has {sized(min(small.values()))} free"
        yield warning(said, "mount -o remount,size=50% /dev/shm; in containers --shm-size=8g", together(small))
    else:
        yield ok("shared memory has room", together(hosts))


def user_namespaces(hosts: Hosts) -> Iterator[Finding]:
    """Tell whether ordinary users may make user namespaces.

    Apptainer, Enroot and Pyxis need them where they are not installed setuid; DeepLink itself does not.
    """
    none = [node for node, host in hosts.items() if host.user_namespaces == 0]
    if none:
        yield note("no user namespaces for users", "sysctl user.max_user_namespaces=31359", together(none))
    else:
        yield ok("users may make namespaces", together(hosts))


def ephemeral_ports(hosts: Hosts) -> Iterator[Finding]:
    """Tell whether the kernel gives rank 0's ports away.

    Rank 0 listens on a port between 20000 and 31999. Linux takes the near end of a connection from 32768 on; a
    node whose ip_local_port_range begins lower may have the port in use just when the job starts.
    """
    ranges = {node: host.ephemeral for node, host in hosts.items()}
    overlapping = {node: (low, high) for node, (low, high) in ranges.items() if high and low < RANK_PORTS.stop}
    if overlapping:
        low, high = min(overlapping.values())
        said = f"the kernel hands out ports {low}-{high}, rank 0's among them"
        yield warning(said, 'sysctl net.ipv4.ip_local_port_range="32768 60999"', together(overlapping))
    else:
        yield ok("rank 0's ports are left alone", together(hosts))


def token_files(hosts: Hosts) -> Iterator[Finding]:
    """Tell whether the token files of the configuration can be used on every node.

    A token that others may read is refused: it is all that keeps them out. 0600 and of who runs the job, or root's
    with 0640 and a group of his.
    """
    remedy = "chmod 600 FILE, and make it the user's own; for a group: root's, and chmod 640 FILE"
    by_tokens = alike({node: tuple(sorted(host.tokens.items())) for node, host in hosts.items()})
    bad = [(key, problem, nodes) for tokens, nodes in by_tokens.items() for key, problem in tokens if problem]
    for key, problem, nodes in bad:
        yield error(f"{key}: {problem}", remedy, nodes)
    if not bad:
        named = sorted({key for host in hosts.values() for key in host.tokens})
        yield ok(f"{', '.join(named)} can be used" if named else "no token file is configured", together(hosts))


def store_usable(hosts: Hosts) -> Iterator[Finding]:
    """Tell whether the user may write to the store's folder, and whether it has room.

    Permissions as well: a store that others may write to could be given false shards under true names, which is
    noticed when they are read, and costs until then.
    """
    stores = {node: host.folders["store"] for node, host in hosts.items()}
    for folder, nodes in alike({node: store.path for node, store in stores.items()}).items():
        of = {node: store for node, store in stores.items() if store.path == folder}
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


def store_on_disk(hosts: Hosts) -> Iterator[Finding]:
    """Tell what kind of file system the store lies on.

    A network file system is what the store is to spare; tmpfs is memory, taken from the job and empty after a
    boot; a container's overlay is slower to write and gone with the container.
    """
    for kind, nodes in alike({node: host.folders["store"].kind for node, host in hosts.items()}).items():
        if is_shared(kind):
            yield error(f"the store lies on {kind}, storage that nodes share", _NAME_STORE, nodes)
        elif kind in MEMORY:
            said = f"the store lies on {kind}: it takes the job's memory, and a boot empties it"
            yield warning(said, _NAME_STORE, nodes)
        elif kind in _LAYERED:
            yield warning(f"the store lies on {kind}, a container's layers", _NAME_STORE, nodes)
        elif not kind:
            yield unknown("the store's file system cannot be told", where=nodes)
        else:
            yield ok(f"the store lies on {kind}", nodes)


def store_private(evidence: SiteEvidence, measured: dict[str, Measured]) -> Iterator[Finding]:
    """Tell whether each node has a store of its own.

    Each node leaves a marker in the store's folder and looks for those of the others. A store that two nodes share
    holds every shard once where two copies are counted, and both evict the other's.
    """
    shared = {node: seen for node, found in measured.items() if (seen := found.markers.get("store", ()))}
    if shared:
        told = together({*shared, *(other for seen in shared.values() for other in seen)})
        yield error("these nodes have one store between them", _NAME_STORE, told)
        return
    unmarked = [node for node in measured if not evidence.hosts[node].folders["store"].marked]
    if unmarked:
        yield unknown("no marker could be left in the store", where=together(unmarked))
    else:
        yield ok("each node has a store of its own", together(measured))


def catalog_shared(evidence: SiteEvidence, measured: dict[str, Measured]) -> Iterator[Finding]:
    """Tell whether all nodes see one catalog.

    The catalog holds the indexes of datasets; every node must see the same one. Markers are used as for the store,
    and where the user may not write there, whether it is the same folder by its inode and its time of change.
    """
    yield from _shared(evidence, measured, "catalog", error)


def state_shared(evidence: SiteEvidence, measured: dict[str, Measured]) -> Iterator[Finding]:
    """Tell whether all nodes see one folder of state.

    Records of a job lie there: events, the chart of its losses, decisions. Where it is each node's own, a job's
    record stays on the node its script ran on, and `deeplink incidents` on the login node does not see it.
    """
    yield from _shared(evidence, measured, "state", warning)


def _shared(
    evidence: SiteEvidence, measured: dict[str, Measured], key: str, judge: Callable[[str, str, str], Finding]
) -> Iterator[Finding]:
    remedy = f"config.toml: {key} = a folder that all nodes see"
    folders = {node: evidence.hosts[node].folders[key] for node in measured}
    broken = {node: why for node, folder in folders.items() if (why := _closed(folder, key))}
    if broken:
        yield error(f"{key}: {next(iter(broken.values()))}", remedy, together(broken))
        return
    marked = {node for node, folder in folders.items() if folder.marked}
    path = next(iter(folders.values())).path
    if marked:
        apart = [
            node
            for node, found in measured.items()
            if found.reached.keys() & marked - {*found.markers.get(key, ())}
        ]
        said = f"{key} {path}: not every node sees what the others write there"
    else:
        by_identity = alike({node: folder.identity for node, folder in folders.items()})
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


def store_speed(evidence: SiteEvidence) -> Iterator[Finding]:
    """Tell how fast the store's disk writes, reads, and reads 4 KiB at random.

    A file of 256 MiB is written until fsync has returned, read back past the page cache (O_DIRECT) and read at
    random places; it never has a name, and no part of it takes longer than eight seconds. An SSD answers a random
    read in 0.1 ms; a disk or shared storage needs ten to a hundred times as long, and small files are random
    reads.
    """
    disks = {node: disk for node, found in evidence.measured.items() if (disk := found.disk) is not None}
    if not disks:
        yield unknown(evidence.problems.get("hosts") or "it was not measured (--disk-mib 0)")
    for node, disk in disks.items():
        yield _speed(node, disk)


def _speed(node: str, disk: Disk) -> Finding:
    if disk.problem or not (disk.written and disk.random_reads):
        return unknown(f"not measured: {disk.problem or 'the time was up'}", where=node)
    write, read = disk.written / max(disk.write_s, 1e-9), disk.written / max(disk.read_s, 1e-9)
    each = disk.random_s / disk.random_reads
    said = f"writes {sized(write)}/s, reads {sized(read)}/s, 4 KiB at random in {each * 1e3:.2f} ms"
    if not disk.cold:
        return note(f"{said}; out of memory, for want of O_DIRECT", where=node)
    checks = {
        "writing": disk.written >= _TELLING and write < _SLOW_WRITE,
        "reading": disk.written >= _TELLING and read < _SLOW_READ,
        "random reads": each > _SLOW_RANDOM_S,
    }
    slow = [what for what, is_slow in checks.items() if is_slow]
    if slow:
        return warning(f"{said}: slow for an SSD at {', '.join(slow)}", _NAME_STORE, node)
    return ok(said, node)


def site_scripts(evidence: SiteEvidence, told: SlurmSettings) -> Iterator[Finding]:
    """Tell what the site's prolog and epilog remove or end on the nodes.

    An epilog that cleans the SSD makes every job bring its shards again; one that ends all of a user's processes
    ends those of his other jobs on that node. Only scripts that the user may read are looked at, and only lines
    that remove (rm -r, -delete, mkfs) or kill (pkill, killall).
    """
    names = scripts_of(told)
    if not names:
        yield ok("no prolog or epilog on the nodes")
        return
    measured = evidence.measured
    if not measured:
        yield unknown(f"{', '.join(names)}: {evidence.why_not('hosts')}")
        return
    store = PurePath(evidence.config.store)
    by_lines = alike({node: found.scripts for node, found in measured.items()})
    for lines, nodes in by_lines.items():
        for line in lines:
            if any(str(folder) in line for folder in (store, *store.parents) if len(folder.parts) > 1):
                yield error(line, f"leave {store} out of it", nodes)
            else:
                yield note(line, f"make sure that it leaves {store} and other jobs' processes alone", nodes)
    by_unread = alike({node: found.unread for node, found in measured.items()})
    for unread, nodes in by_unread.items():
        if unread:
            yield unknown(f"{', '.join(unread)}: not readable for this user", where=nodes)
    if not any([*by_lines, *by_unread]):
        yield ok(f"{', '.join(names)}: nothing is removed")


def scripts_of(told: SlurmSettings) -> tuple[str, ...]:
    """Return the files that slurmd runs before and after jobs and steps."""
    kinds = ("Prolog", "Epilog", "TaskProlog", "TaskEpilog", "ResvProlog", "ResvEpilog")
    return tuple(name for kind in kinds for name in told.listed(kind))
