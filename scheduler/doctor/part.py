"""A node's part in the step: it tells of itself, answers for its clock, then tries the others, and ends.

It ends whatever happens: when it is told to, when its standard input ends, and at its own deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.scheduler.doctor.disk import measured_disk
from deeplink.scheduler.doctor.frames import to_lines
from deeplink.scheduler.doctor.here import dangers, looked_at, this_host
from deeplink.scheduler.doctor.reach import opened_ports, tried_peers, tried_services, watchdog_answer
from deeplink.scheduler.doctor.report import FOLDERS, HostFacts, Measured, NodeProbePlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from deeplink.clock import Clock
    from deeplink.config import Config

LONGEST_S = 180.0
_LONGEST_LINE = 16 << 20


@dataclass(slots=True)
class NodePart:
    """One node's part.

    Args:
        config: of this process.
        run: names this run of the doctor, in the markers.
        clock: time.
    """

    config: Config
    run: str
    clock: Clock

    @contextlib.contextmanager
    def host(self, bind: str = "0.0.0.0") -> Iterator[HostFacts]:  # noqa: S104 - ports for the other nodes to try
        """Give what this host tells of itself; its ports are open and its markers there until the block ends."""
        with opened_ports(bind) as listening, contextlib.ExitStack() as stack:
            host = this_host(self.config, listening)
            marked = {
                key: replace(
                    folder,
                    marked=self._mark(stack, Path(folder.base) / self._marker(key, host.node))
                    if folder.base
                    else False,
                )
                for key, folder in host.folders.items()
            }
            yield replace(host, folders=marked)

    @staticmethod
    def _mark(stack: contextlib.ExitStack, marker: Path) -> bool:
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
                node for node in plan.peers if _there(Path(host.folders[key].base) / self._marker(key, node))
            )
            for key in FOLDERS
            if host.folders[key].base
        }
        scripts, unread = dangers(plan.scripts)
        return Measured(
            markers=markers,
            reached=tried_peers({node: plan.peers[node] for node in plan.peers if node != host.node}, self.clock),
            services=self._services(plan),
            scripts=scripts,
            unread=unread,
            disk=self._disk(host, plan.disk_bytes),
        )

    def _services(self, plan: NodeProbePlan) -> dict[str, str]:
        found = tried_services(plan.services, self.clock)
        # A port that takes connections hears nobody yet: what counts is whether a call from here is answered.
        if found.get(self.config.watch) == "":
            found[self.config.watch] = watchdog_answer(self.config, self.clock) or ""
        return found

    def _disk(self, host: HostFacts, size: int) -> Any:
        base = host.folders["store"].base
        return measured_disk(Path(base), size, self.clock) if size and base else None


def sweep(config: Config, run: str) -> None:
    """Remove what nodes that were killed have left of their markers, as far as it is seen from here."""
    for key in FOLDERS:
        base = looked_at(getattr(config, key)).base
        with contextlib.suppress(OSError):
            for marker in Path(base).glob(f".deeplink-doctor-{run}-*") if base else ():
                marker.unlink(missing_ok=True)


def _there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def take_part(part: NodePart, stdin: int, say: Callable[[str], None]) -> None:
    """Do what is asked for on `stdin`, one JSON object a line, until the end."""
    with part.host() as host:
        _tell(say, host.node, {"host": host.as_dict()})
        for asked in _asked(stdin, part.clock):
            if "ping" in asked:
                _tell(say, host.node, {"pong": asked["ping"], "unix": part.clock.unix()})
            elif host.node in asked.get("plans", {}):
                measured = part.measure(host, NodeProbePlan.of(asked["plans"][host.node]))
                _tell(say, host.node, {"measured": measured.as_dict()})
            elif "end" in asked:
                return


def tell_problem(node: str, problem: str, say: Callable[[str], None]) -> None:
    """Tell why this node can take no part."""
    _tell(say, node, {"host": HostFacts(node=node, problem=problem).as_dict()})


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
