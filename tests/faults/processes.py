"""Members and a reading loop as real processes, each of which can be killed, frozen, thawed and started again."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deeplink.cache.packer import pack
from deeplink.cache.store.store import Store
from deeplink.core.config import Config
from deeplink.core.types import Member, NodeName, format_members
from deeplink.rpc import tokens
from tests.cache.agents import config_below
from tests.faults.reading import Task, digests
from tests.processes import children, free_ports
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
STALL_S = 2.0
"""The issue's bound on how long a fault may hold a batch up."""
MARGIN_S = 1.5
"""On top of it, for each process that a core has to run: this machine may be doing other things besides."""

Record = Callable[[str, object], None]


def started(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start one of our programs; what it says on standard error is appended to `log`."""
    with log.open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
        )


class Lines:
    """The lines of JSON that a process says."""

    def __init__(self, popen: subprocess.Popen[bytes], told: Callable[[], object]) -> None:
        assert popen.stdout is not None
        self._output, self._told = popen.stdout, told
        self._held = b""

    def has_more(self) -> bool:
        """Tell whether something has been said that was not taken yet."""
        return b"\n" in self._held or bool(select.select([self._output], [], [], 0)[0])

    def take(self) -> dict[str, Any] | None:
        """Return the next line; None where the process has ended. Waits for it."""
        while b"\n" not in self._held:
            came = select.select([self._output], [], [], LIMIT_S)[0]
            assert came, f"nothing was said within {LIMIT_S:.0f} s: {self._told()}"
            data = os.read(self._output.fileno(), 1 << 16)
            if not data:
                return None
            self._held += data
        line, _, self._held = self._held.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def next(self) -> dict[str, Any]:
        """Return the next line; the process must not end before it."""
        found = self.take()
        assert found is not None, f"it ended: {self._told()}"
        return found


def tell(popen: subprocess.Popen[bytes], word: bytes) -> None:
    """Write to a process's standard input."""
    assert popen.stdin is not None
    popen.stdin.write(word)
    popen.stdin.flush()


def let_go(popen: subprocess.Popen[bytes]) -> None:
    """Kill a process, unless it has ended, and close what leads to it."""
    popen.kill()
    popen.wait(LIMIT_S)
    for pipe in (popen.stdin, popen.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@dataclass
class Node:
    """A member: an agent's process with a store of its own, always on the same port."""

    name: str
    root: Path
    port: int
    token_file: Path
    env: Mapping[str, str] = field(default_factory=dict)
    domain: str = ""
    popen: subprocess.Popen[bytes] | None = None
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        """Its store."""
        return Store(self.root / self.name)

    @property
    def member(self) -> Member:
        """How others know it."""
        return Member(NodeName(self.name), f"127.0.0.1:{self.port}", domain=self.domain)

    @property
    def log(self) -> Path:
        """What it wrote to standard error, in all its lives."""
        return self.root / f"{self.name}.log"

    @property
    def is_up(self) -> bool:
        """Whether its process runs, frozen or not."""
        return self.popen is not None and self.popen.poll() is None

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended by itself, as no test told it to."""
        return self.popen is not None and not self.is_up and not (self.popen.stdin and self.popen.stdin.closed)

    def start(self) -> None:
        """Begin to run; `await_ready` says when it serves."""
        options = ["--name", self.name, "--bind", f"127.0.0.1:{self.port}", "--store", str(self.root / self.name)]
        self.popen = started(
            ["deeplink", "node", *options, "--token-file", str(self.token_file)], self.log, self.env
        )

    def await_ready(self) -> None:
        """Return once it serves."""
        assert self.popen is not None
        self.said = Lines(self.popen, self.log.read_text).next()

    def kill(self) -> None:
        """End it at once, as a power loss of the process would."""
        self.end(signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM) -> None:
        """End it and wait for it."""
        if self.popen is not None:
            self.popen.send_signal(number)
            self.popen.wait(LIMIT_S)
            let_go(self.popen)

    def freeze(self) -> None:
        """Stop it: its port takes connections on, and nobody answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self.popen is not None
        for pid in (self.popen.pid, *children(self.popen.pid)):
            os.kill(pid, number)


@dataclass
class Nodes:
    """Members n0, n1 ... of one cache, and the dataset "digits" packed onto them."""

    root: Path
    files: Mapping[str, bytes]
    nodes: tuple[Node, ...]
    token: str

    @classmethod
    def make(cls, root: Path, files: Mapping[str, bytes], count: int, domains: Sequence[str] = ()) -> Nodes:
        """Return members whose processes do not run yet; `domains` says what each fails together with."""
        token = tokens.new_token()
        tokens.write_token(root / "token", token)
        ports = free_ports(count)
        env: dict[str, str] = {}
        domains = domains or [""] * count
        made = [
            Node(f"n{i}", root, port, root / "token", env, domain)
            for i, (port, domain) in enumerate(zip(ports, domains, strict=True))
        ]
        env |= {
            "DEEPLINK_MEMBERS": format_members(tuple(node.member for node in made)),
            "DEEPLINK_CATALOG": str(root / "head" / "catalog"),
            "DEEPLINK_STATE": str(root / "state"),
        }
        return cls(root, files, tuple(made), token)

    def __getitem__(self, number: int) -> Node:
        return self.nodes[number]

    @property
    def members(self) -> tuple[Member, ...]:
        """All of them."""
        return tuple(node.member for node in self.nodes)

    def config(self, **settings: Any) -> Config:
        """Return the configuration of a node that is no member.

        What members give is not brought to that node meanwhile: it is their faults that are tried.
        """
        given = {"members": format_members(self.members), "token_file": self.root / "token"}
        return config_below(self.root / "head", **{**given, "fill_on_miss": False, **settings})

    def start(self) -> None:
        """Start who does not run, thaw who does, and return once all serve."""
        down = [node for node in self.nodes if not node.is_up]
        for node in down:
            node.start()
        for node in self.nodes:
            node.thaw()
        for node in down:
            node.await_ready()

    def pack(self, source: Path) -> None:
        """Pack a folder onto the members, and take the folder away: what cannot be had from them is lost."""
        pack(str(source), "digits", config=self.config(), members=self.members, token=self.token)
        source.rename(source.with_name("moved"))

    def stop(self) -> None:
        """End all of them; one that has ended by itself is a failure."""
        gone = [node for node in self.nodes if node.has_ended]
        for node in self.nodes:
            node.kill()
        assert not gone, "\n".join(f"{node.name} ended by itself: {node.log.read_text()[-3000:]}" for node in gone)


class Loop:
    """A reading loop that runs (`tests.faults.reading`)."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.popen, self._log = popen, log
        self._lines = Lines(popen, self.log)
        self.said: dict[str, Any] = {}
        self.worst_s = 0.0

    def log(self) -> str:
        """Return what it wrote to standard error."""
        return self._log.read_text(encoding="utf-8")

    def listen(self) -> dict[str, Any]:
        """Return the next word of it."""
        self._heard(self._lines.next())
        return self.said

    def await_epochs(self, count: int) -> None:
        """Return once so many whole epochs have been read from now on."""
        self.catch_up()
        # One is under way: it may have read its samples before what has happened now.
        wanted = int(self.said["epochs"]) + 1 + count
        deadline = time.monotonic() + LIMIT_S
        while self.said["epochs"] < wanted:
            assert time.monotonic() < deadline, f"it does not get on: {self.said}\n{self.log()}"
            self.listen()

    def await_stats(self, true: Callable[[Mapping[str, int]], bool]) -> None:
        """Return once something holds of what the reader counts."""
        deadline = time.monotonic() + LIMIT_S
        while not true(self.listen()["stats"]):
            assert time.monotonic() < deadline, f"that does not come about: {self.said}\n{self.log()}"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have it wait between two batches."""
        tell(self.popen, b".")
        while "held" not in (said := self._lines.next()):
            self._heard(said)
        yield
        tell(self.popen, b".")

    def _heard(self, said: dict[str, Any]) -> None:
        self.said, self.worst_s = said, max(self.worst_s, float(said["stall_s"]))

    def catch_up(self) -> None:
        """Take in what it has said already."""
        self.listen()
        while self._lines.has_more():
            self.listen()

    def end(self) -> dict[str, Any]:
        """Have it read its epoch to the end; return its last word."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        while (said := self._lines.take()) is not None:
            self._heard(said)
        assert self.popen.wait(LIMIT_S) == 0, self.log()
        return self.said


def ready(loop: Loop) -> Loop:
    """Return a loop once it has read a whole epoch."""
    loop.listen()
    while not loop.said["epochs"]:
        loop.listen()
    return loop


@contextmanager
def reading(task: Task, folder: Path) -> Iterator[Loop]:
    """Run a reading loop; on return it has read a whole epoch, and was seen to read without a failure."""
    log = folder / "reading.log"
    log.unlink(missing_ok=True)
    loop = Loop(started(["tests.faults.reading", str(task.write(folder / "task.json"))], log), log)
    try:
        yield ready(loop)
    finally:
        let_go(loop.popen)


def survived(loop: Loop, record: Record) -> dict[str, int]:
    """End a loop; assert that no read failed, all bytes were right and no batch waited too long. Its stats."""
    said = loop.end()
    stats: dict[str, int] = said["stats"]
    seen = {name: count for name, count in stats.items() if count}
    record(
        "figure",
        f"longest wait {loop.worst_s:.2f} s over {said['samples']:,} samples in {said['epochs']} epochs; {seen}",
    )
    assert not said["failures"], f"{said}\n{loop.log()[-6000:]}"
    margin_s = MARGIN_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert loop.worst_s <= STALL_S + margin_s, f"{said}\n{loop.log()[-6000:]}"
    return stats


def task_of(config: Config, files: Mapping[str, bytes], **settings: Any) -> Task:
    """Return the task of reading "digits"."""
    default = Config()
    differs = {
        name: value for name in Config.__slots__ if (value := getattr(config, name)) != getattr(default, name)
    }
    return Task(name="digits", config=differs, model=digests(dict(files)), **settings)
