"""What the nodes told of themselves. Each docstring is what `--explain` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.doctor.evidence import alike, together
from deeplink.scheduler.doctor.finding import error, note, ok, unknown, warning
from deeplink.scheduler.doctor.running_settings import RANK_PORTS
from deeplink.text import counted, sized

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deeplink.scheduler.doctor.evidence import SiteEvidence
    from deeplink.scheduler.doctor.finding import DoctorFinding
    from deeplink.scheduler.doctor.report import NodeReport

_LEAST_FILES = 4096
_LEAST_SHARED_MEMORY = 1 << 30
_MUST_AGREE = ("deeplink", "code", "python", "torch")
_SHOULD_AGREE = ("slurm", "driver", "kernel")
_WHAT = {
    "deeplink": "DeepLink",
    "code": "DeepLink's files",
    "python": "Python",
    "torch": "torch",
    "slurm": "Slurm's commands",
    "driver": "the NVIDIA driver",
    "kernel": "the kernel",
}


def usable(evidence: SiteEvidence) -> dict[str, NodeReport]:
    """Return the reports of nodes that could tell everything."""
    return {node: report for node, report in evidence.reports.items() if not report.host.problem}


def nodes_answer(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell which nodes of the step said nothing, or could not run DeepLink.

    `deeplink run` starts an agent on each node in the same way, with the same Python at the same path.
    """
    why = evidence.problems.get("hosts")
    if why:
        yield unknown(why) if not evidence.silent else error(why, _TRY, together(evidence.silent))
    elif evidence.silent:
        yield error("said nothing in time", _TRY, together(evidence.silent))
    for problem, nodes in alike(evidence.reports, lambda report: report.host.problem).items():
        if problem:
            yield error(problem, "mend it on the nodes named", nodes)
    if usable(evidence):
        yield ok(f"{counted(len(usable(evidence)), 'host')} answered", together(usable(evidence)))


_TRY = "try `srun -w NODE deeplink --version`; the same environment must be at the same path on every node"


def versions_alike(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell whether all nodes run the same DeepLink, Python and torch, and the same Slurm, driver and kernel.

    Of DeepLink the files are compared too (names and sizes): two nodes may have one version and other code.
    """
    reports = usable(evidence)
    if not reports:
        yield unknown(evidence.why_not("hosts"))
        return
    differing = 0
    for name in (*_MUST_AGREE, *_SHOULD_AGREE):
        by_value = alike(reports, lambda report, name=name: report.host.versions.get(name, ""))  # type: ignore[misc]
        if len(by_value) > 1:
            differing += 1
            told = "; ".join(f"{value or 'none'} on {nodes}" for value, nodes in by_value.items())
            odd = together(node for value in list(by_value)[1:] for node in by_value[value].split(","))
            judge = error if name in _MUST_AGREE else warning
            yield judge(f"{_WHAT[name]}: {told}", "install the same on all nodes", odd)
    if not differing:
        first = next(iter(reports.values())).host.versions
        told = ", ".join(
            f"{name} {first[name]}" for name in ("deeplink", "python", "slurm", "torch") if first.get(name)
        )
        yield ok(told, together(reports))


def configuration_alike(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell whether the configuration says the same on all nodes.

    `/etc/deeplink/config.toml` is each node's own; where it names another catalog there, that node finds no
    dataset.
    """
    reports = usable(evidence)
    if not reports:
        yield unknown(evidence.why_not("hosts"))
        return
    keys = sorted({key for report in reports.values() for key in report.host.settings})
    differing = 0
    for key in keys:
        by_value = alike(reports, lambda report, key=key: report.host.settings.get(key, ""))  # type: ignore[misc]
        if len(by_value) > 1:
            differing += 1
            told = "; ".join(f"{value or 'nothing'} on {nodes}" for value, nodes in by_value.items())
            yield error(f"{key}: {told}", f"config.toml: {key} = the same on all nodes")
    if not differing:
        yield ok("the configuration is one", together(reports))


def open_files(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell how many files a process may open (ulimit -n).

    An agent keeps shards and connections open and raises the soft limit to the hard one by itself; of the hard one
    a quarter bounds its connections.
    """
    yield from _limit(evidence, "nofile", _LEAST_FILES, "open files (ulimit -Hn)", "nofile 65536", hard=True)


def locked_memory(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell how much memory a process may lock (ulimit -l), where there is InfiniBand.

    NCCL and MPI register the memory they send from; with a small limit they fail or fall back to TCP.
    """
    reports = usable(evidence)
    if not reports:
        yield unknown(evidence.why_not("hosts"))
        return
    fabric = {node: report for node, report in reports.items() if report.host.infiniband}
    bounded = [node for node, report in fabric.items() if report.host.limits.get("memlock", (-1, -1))[0] != -1]
    if bounded:
        said = "locked memory is bounded (ulimit -l), and NCCL registers what it sends"
        yield error(
            said, "limits.conf: * - memlock unlimited; LimitMEMLOCK=infinity for slurmd", together(bounded)
        )
        return
    yield ok("no InfiniBand" if not fabric else "locked memory is unlimited", together(reports))


def _limit(
    evidence: SiteEvidence, name: str, least: int, what: str, line: str, *, hard: bool
) -> Iterator[DoctorFinding]:
    reports = usable(evidence)
    if not reports:
        yield unknown(evidence.why_not("hosts"))
        return
    by_value = alike(reports, lambda report: report.host.limits.get(name, (-1, -1))[hard])
    for value, nodes in by_value.items():
        if 0 <= value < least:
            yield warning(f"{value} {what}", f"limits.conf: * - {line}; and the same for slurmd's unit", nodes)
        else:
            yield ok(f"{'no bound on' if value < 0 else value} {what}", nodes)


def shared_memory(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell how much room /dev/shm has.

    DataLoader workers hand their batches over in it; where it is full they die of SIGBUS.
    """
    reports = usable(evidence)
    if not reports:
        yield unknown(evidence.why_not("hosts"))
        return
    small = {
        node: report.host.shared_memory or 0
        for node, report in reports.items()
        if (report.host.shared_memory or 0) < _LEAST_SHARED_MEMORY
    }
    if small:
        said = f"shared memory (/dev/shm) has {sized(min(small.values()))} free"
        yield warning(said, "mount -o remount,size=50% /dev/shm; in containers --shm-size=8g", together(small))
        return
    yield ok("shared memory has room", together(reports))


def user_namespaces(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell whether ordinary users may make user namespaces.

    Apptainer, Enroot and Pyxis need them where they are not installed setuid; DeepLink itself does not.
    """
    reports = usable(evidence)
    if not reports:
        yield unknown(evidence.why_not("hosts"))
        return
    none = [node for node, report in reports.items() if report.host.user_namespaces == 0]
    if none:
        yield note("no user namespaces for users", "sysctl user.max_user_namespaces=31359", together(none))
        return
    yield ok("users may make namespaces", together(reports))


def ephemeral_ports(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell whether the kernel gives rank 0's ports away.

    Rank 0 listens on a port between 20000 and 31999. Linux takes the near end of a connection from 32768 on; a
    node whose ip_local_port_range begins lower may have the port in use just when the job starts.
    """
    reports = usable(evidence)
    if not reports:
        yield unknown(evidence.why_not("hosts"))
        return
    overlapping = {
        node: report.host.ephemeral
        for node, report in reports.items()
        if report.host.ephemeral[1] and report.host.ephemeral[0] < RANK_PORTS.stop
    }
    if overlapping:
        low, high = min(overlapping.values())
        said = f"the kernel hands out ports {low}-{high}, rank 0's among them"
        yield warning(said, 'sysctl net.ipv4.ip_local_port_range="32768 60999"', together(overlapping))
        return
    yield ok("rank 0's ports are left alone", together(reports))


def token_files(evidence: SiteEvidence) -> Iterator[DoctorFinding]:
    """Tell whether the token files of the configuration can be used on every node.

    A token that others may read is refused: it is all that keeps them out. 0600 and of who runs the job, or root's
    with 0640 and a group of his.
    """
    reports = usable(evidence)
    if not reports:
        yield unknown(evidence.why_not("hosts"))
        return
    told = 0
    by_tokens: Mapping[tuple[tuple[str, str], ...], str] = alike(
        reports, lambda report: tuple(sorted(report.host.tokens.items()))
    )
    for tokens, nodes in by_tokens.items():
        for key, problem in tokens:
            if problem:
                told += 1
                yield error(
                    f"{key}: {problem}",
                    "chmod 600 FILE, and make it the user's own; for a group: root's, and chmod 640 FILE",
                    nodes,
                )
    if not told:
        named = sorted({key for report in reports.values() for key in report.host.tokens})
        yield ok(f"{', '.join(named)} can be used" if named else "no token file is configured", together(reports))
