"""A node's part in the step: it tells of itself, answers for its clock, then tries the others, and ends.

It ends whatever happens: when it is told to, when its standard input ends, and at its own deadline.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import platform
import re
import resource
import select
import socket
from dataclasses import dataclass, replace
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.core.errors import DeepLinkError
from deeplink.core.store_place import file_system
from deeplink.core.tcp import connect_all
from deeplink.rpc.daemon import member_name
from deeplink.rpc.resolving import UnresolvedError, addresses, primary_address
from deeplink.rpc.tokens import TokenError, read_token
from deeplink.scheduler.liveness.watchdog_client import asked_watchdog
from deeplink.scheduler.node.disk import measured_disk
from deeplink.scheduler.sitecheck.running_settings import RANK_PORTS
from deeplink.scheduler.sitecheck.site_evidence import (
    FOLDERS,
    FolderReport,
    HostFacts,
    Measured,
    NodeProbePlan,
    to_lines,
)
from deeplink.scheduler.slurm import command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deeplink.core.clock import Clock
    from deeplink.core.config import Config

ALIKE = ("catalog", "store", "state", "watch", "members", "agent_bind")
"""Keys of the configuration that must say the same on every node."""
LONGEST_S = 180.0
_LONGEST_LINE = 16 << 20
_VERSION_S = 10.0
_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}
_SCRIPT_BYTES = 64 << 10
_MOST_LINES = 20
_MOST_SCRIPTS = 64
_WIPES = re.compile(
    r"\brm\s+(?:-\w+\s+)*-\w*[rR]|\s-delete\b|\b(?:pkill|killall)\b|\bmkfs|\bwipefs\b|\bfstrim\b|\bblkdiscard\b"
)
WATCH_S = 5.0
_AGAIN_S = 0.25
CONNECT_S = 3.0  # Linux sends a second SYN after 1 s: a single lost packet is no closed port
_TRIED = (RANK_PORTS.start, 24_000, 28_000, RANK_PORTS.stop - 8)
_NEXT = 8  # ports tried one after another where one is taken
_AGENT_PORTS = 2  # an agent listens on two: control, samples
_MOST_PEERS = 16


def this_host(config: Config, listening: Mapping[str, tuple[int, ...]]) -> HostFacts:
    """Return what there is to tell of this host."""
    return HostFacts(
        node=member_name(config.node),
        address=primary_address().ip,
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
    root = Path(str(resources.files("deeplink")))
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
    most = _text(Path("/proc/sys/user/max_user_namespaces"))
    allowed = _text(Path("/proc/sys/kernel/unprivileged_userns_clone"))  # Debian's and Ubuntu's own switch
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
        mode=found.st_mode & 0o7777,
        free=room.f_bavail * room.f_frsize,
        identity=f"{found.st_ino}-{found.st_ctime_ns}",
        problem="" if base.is_dir() else f"{base} is no folder",
    )


def dangers(scripts: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the lines of scripts that remove files or end processes, and the scripts that are not readable."""
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


@dataclass(slots=True)
class NodePart:
    """One node's part."""

    config: Config
    run: str
    clock: Clock

    @contextlib.contextmanager
    def host(self, bind: str = "0.0.0.0") -> Iterator[HostFacts]:  # noqa: S104 - ports for the other nodes to try
        """Give what this host tells of itself; its ports are open and its markers there until the block ends."""
        with opened_ports(bind) as listening, contextlib.ExitStack() as stack:
            host = this_host(self.config, listening)
            marked = {
                key: replace(folder, marked=self._mark(stack, folder.base, self._marker(key, host.node)))
                for key, folder in host.folders.items()
            }
            yield replace(host, folders=marked)

    @staticmethod
    def _mark(stack: contextlib.ExitStack, folder: str, name: str) -> bool:
        if not folder:
            return False
        marker = Path(folder) / name
        try:
            # Never what lies there already: the folder may be /tmp, and others see our name in `ps`.
            descriptor = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except OSError:
            return False
        os.close(descriptor)

        def remove() -> None:
            with contextlib.suppress(OSError):
                marker.unlink(missing_ok=True)

        stack.callback(remove)
        return True

    def _marker(self, key: str, node: str) -> str:
        return f".deeplink-doctor-{self.run}-{key}-{node}"  # two folders may be one

    def measure(self, host: HostFacts, plan: NodeProbePlan) -> Measured:
        """Try what there is to try, all of it bounded."""
        # Each name is looked up for the first time here: NFS remembers a name that was not there for a while.
        markers = {
            key: tuple(
                node
                for node in plan.peers
                if os.path.exists(f"{folder.base}/{self._marker(key, node)}")  # noqa: PTH110 - False for every error
            )
            for key, folder in host.folders.items()
            if folder.base
        }
        scripts, unread = dangers(plan.scripts)
        base = host.folders["store"].base
        return Measured(
            markers=markers,
            reached=tried_peers(
                {node: peer for node, peer in plan.peers.items() if node != host.node}, self.clock
            ),
            services=self._services(plan),
            scripts=scripts,
            unread=unread,
            disk=measured_disk(Path(base), plan.disk_bytes, self.clock) if plan.disk_bytes and base else None,
        )

    def _services(self, plan: NodeProbePlan) -> dict[str, str]:
        found = tried_services(plan.services, self.clock)
        # A port that takes connections says little: what counts is whether a call from here is answered.
        if found.get(self.config.watch) == "":
            found[self.config.watch] = watchdog_answer(self.config, self.clock) or ""
        return found


def sweep(config: Config, run: str) -> None:
    """Remove what nodes that were killed have left of their markers, as far as it is seen from here."""
    for key in FOLDERS:
        base = looked_at(getattr(config, key)).base
        with contextlib.suppress(OSError):
            for marker in Path(base).glob(f".deeplink-doctor-{run}-*") if base else ():
                marker.unlink(missing_ok=True)


def take_part(part: NodePart, stdin: int, say: Callable[[str], None]) -> None:
    """Do what is asked for on `stdin`, one JSON object a line, until the end."""
    with part.host() as host:
        _tell(say, host.node, {"host": host})
        for asked in _asked(stdin, part.clock):
            if "ping" in asked:
                _tell(say, host.node, {"pong": asked["ping"], "unix": part.clock.unix()})
            elif host.node in asked.get("plans", {}):
                measured = part.measure(host, NodeProbePlan.of(asked["plans"][host.node]))
                _tell(say, host.node, {"measured": measured})
            elif "end" in asked:
                return


def tell_problem(node: str, problem: str, say: Callable[[str], None]) -> None:
    """Tell why this node can take no part."""
    _tell(say, node, {"host": HostFacts(node=node, problem=problem)})


def _tell(say: Callable[[str], None], node: str, message: Mapping[str, Any]) -> None:
    for line in to_lines(node, message):
        say(line)


def _asked(stdin: int, clock: Clock) -> Iterator[dict[str, Any]]:
    deadline = clock.monotonic() + LONGEST_S
    held = b""
    while (left := deadline - clock.monotonic()) > 0 and len(held) < _LONGEST_LINE:
        ready, _, _ = select.select([stdin], [], [], left)
        said = os.read(stdin, 1 << 16) if ready else b""
        if not said:
            return
        *lines, held = (held + said).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                asked = json.loads(line)
                if isinstance(asked, dict):
                    yield asked


@contextlib.contextmanager
def opened_ports(host: str) -> Iterator[dict[str, tuple[int, ...]]]:
    """Listen where agents do (any free port) and where rank 0 does, until the end of the block."""
    with contextlib.ExitStack() as stack:
        agent = [_listening(stack, host, 0) for _ in range(_AGENT_PORTS)]
        rank = [_first_free(stack, host, start) for start in _TRIED]
        yield {"agent": tuple(filter(None, agent)), "rank": tuple(filter(None, rank))}


def _first_free(stack: contextlib.ExitStack, host: str, start: int) -> int:
    return next((port for offset in range(_NEXT) if (port := _listening(stack, host, start + offset))), 0)


def _listening(stack: contextlib.ExitStack, host: str, port: int) -> int:
    server = stack.enter_context(socket.socket(socket.AF_INET))
    try:
        server.bind((host, port))
        server.listen(4 * _MOST_PEERS)
    except OSError:
        return 0
    return int(server.getsockname()[1])


def connected(targets: Sequence[tuple[str, int]], clock: Clock, within_s: float = CONNECT_S) -> list[str]:
    """Connect to all targets at once, and return what came of each: empty where it was connected, else why not."""
    return [_outcome(code, within_s) for code in connect_all(targets, within_s, clock.monotonic)]


def _outcome(code: int | None, within_s: float) -> str:
    if code is None:
        return f"no answer within {within_s:g} s"
    if code < 0:  # of getaddrinfo
        return "no address"
    return os.strerror(code) if code else ""


def tried_peers(peers: Mapping[str, tuple[str, tuple[int, ...]]], clock: Clock) -> dict[str, dict[str, str]]:
    """Connect to every port of every peer; return what came of it by node and port."""
    targets = [(node, host, port) for node, (host, ports) in peers.items() for port in ports]
    outcomes = connected([(host, port) for _, host, port in targets], clock)
    found: dict[str, dict[str, str]] = {node: {} for node in peers}
    for (node, _, port), outcome in zip(targets, outcomes, strict=True):
        found[node][str(port)] = outcome
    return found


def tried_services(addresses: Sequence[str], clock: Clock) -> dict[str, str]:
    """Connect to `host:port` addresses; return what came of each."""
    found: dict[str, str] = {}
    targets: list[tuple[str, tuple[str, int]]] = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        ip = _resolved(host.strip("[]"), clock) if port.isdigit() else None
        if ip is None:
            found[address] = f"{host or address} is no host that is known here"
        else:
            targets.append((address, (ip, int(port))))
    outcomes = connected([target for _, target in targets], clock)
    return found | {address: outcome for (address, _), outcome in zip(targets, outcomes, strict=True)}


def _resolved(host: str, clock: Clock) -> str | None:
    try:
        found = addresses(host, 0, clock)
    except UnresolvedError:
        return None
    return next((str(where[0]) for family, _, _, _, where in found if family == socket.AF_INET), None)


def watchdog_answer(config: Config, clock: Clock) -> str | None:
    """Ask the watchdog as launchers and agents do; return what is wrong, None where it cannot be asked."""
    if not config.watch:
        return None
    if config.watch_token_file is None:
        return asked_watchdog(config.watch, timeout_s=WATCH_S) or _unproved(config.watch, config.node, clock)
    try:
        token = read_token(config.watch_token_file)
    except TokenError:
        return None  # the check of token files says so
    return asked_watchdog(config.watch, token, timeout_s=WATCH_S)


def _unproved(address: str, name: str, clock: Clock) -> str:
    """Have MUNGE prove this process to the watchdog; return what is wrong, permissions aside."""
    # Not above: see `asked_watchdog`.
    import grpc  # noqa: PLC0415

    from deeplink.scheduler.liveness.watchdog_client import WatchdogClient  # noqa: PLC0415

    until = clock.monotonic() + WATCH_S
    while True:
        try:
            line = WatchdogClient(address, None, member_name(name))
            try:
                line.call(lambda _stub: None)
            finally:
                line.close()
        except grpc.RpcError as refused:
            status, said = refused.code(), str(refused.details())
            if status is grpc.StatusCode.PERMISSION_DENIED and not said.startswith("MUNGE:"):
                return ""
            if status is not grpc.StatusCode.RESOURCE_EXHAUSTED or clock.monotonic() >= until:
                return f"{status.name.lower().replace('_', ' ')}: {said}"
            clock.sleep(_AGAIN_S)  # every node of the doctor's step asks at this moment
        except DeepLinkError as problem:
            return str(problem)
        else:
            return ""
