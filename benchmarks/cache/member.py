"""One of four members is cut off in the middle of an epoch: real agents on nodes with a network and an SSD each.

The reader runs on a fifth node. Each repeat: an epoch with all members, one in which the cable of a member is
taken out, two after that has been noticed; then the cable is put back. With two copies of each shard, and with
one, where what the lost member held comes from the source, as HVAC redirects it, with a slow source for both.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import select
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.cache import memory
from benchmarks.cache.lab import write_source
from benchmarks.cache.limits import Limits
from benchmarks.cache.local import WrongBytesError
from benchmarks.cache.order import BATCH, expected
from benchmarks.cache.players import ROOT, Player, UnmeasuredError
from benchmarks.rows import make_row
from deeplink.core.errors import DeepLinkError
from deeplink.rpc import tokens
from deeplink.scheduler.testbed.cluster import Options, Sandbox
from deeplink.scheduler.testbed.processes import descendants, table
from deeplink.scheduler.testbed.shape import Shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.cache.lab import Lab, Source
    from benchmarks.cache.players import Answer
    from benchmarks.rows import Row

SIZE = 33_000
MEMBERS = ("n0", "n1", "n2", "n3")
READER, LOST = "n4", "n3"
_PORT = 7411
_DATASETS = {"both": 2, "single": 1}
_SOURCE_BYTES_S = 8 << 20
_STEP = 32
_STEP_S = 0.02
_EARLY = 0.4
"""Of an epoch, when the cable is taken out."""
_RETURNS = 10
_START_S = 20.0
_SHARD = "1M"
_EPOCH_S = 3.0
_UNDISTURBED_S = 0.3


@dataclass(frozen=True, slots=True)
class Nodes:
    """The sandbox, as the experiments see it.

    Attributes:
        lab: where they are measured.
        sandbox: its nodes, agents running.
        base: variables of every process on them.
        sources: of each dataset.
    """

    lab: Lab
    sandbox: Sandbox
    base: dict[str, str]
    sources: dict[str, Source]

    def reader(self, name: str) -> Player:
        """Return a reader of a dataset, opened, on its node."""
        side = "ours.OursRemote"
        command = self.sandbox.inside(READER, ["python", "-m", "benchmarks.cache.child", side], env=self.base)
        player = Player(side, self.lab.work / f"reader-{name}.log", command)
        player.ask("open", source="", packed=name)
        return player


@dataclass(frozen=True, slots=True)
class Reading:
    """How a reader reads.

    Attributes:
        nodes: where.
        player: the reader.
        name: of the dataset.
        batch: samples in a step.
        step_s: what a step takes when its batch is there.
        passes: of all samples in an epoch.
    """

    nodes: Nodes
    player: Player
    name: str
    batch: int
    step_s: float = 0.0
    passes: int = 1

    def begin(self) -> None:
        """Begin an epoch; the source's pages are dropped first."""
        source = self.nodes.sources[self.name]
        memory.evict(memory.files_below(source.root))
        request = {"seed": self.nodes.lab.seed(), "samples": len(source.digests), "passes": self.passes}
        self.player.tell("paced", batch=self.batch, step_s=self.step_s, **request)

    def end(self) -> Answer:
        """Return the answer of an epoch begun.

        Raises:
            WrongBytesError: it did not read the bytes that were written, though nothing failed.
        """
        answer, digests = self.player.hear(), self.nodes.sources[self.name].digests
        if not answer.failed and answer.digest != expected(digests, [*range(len(digests))] * self.passes):
            raise WrongBytesError("an epoch from members came to another digest than the files have")
        return answer

    def epoch(self) -> Answer:
        """Return the answer of one epoch. Raises as `end` does."""
        self.begin()
        return self.end()

    def loss(self) -> list[Answer]:
        """Return an epoch with all, the one in which a cable is taken out, two after it; the cable is put back."""
        before = self.epoch()
        self.begin()
        time.sleep(before.seconds * _EARLY)
        self.nodes.sandbox.cut(LOST)
        answers = [before, self.end(), self.epoch(), self.epoch()]
        self.nodes.sandbox.heal(LOST)
        self._await_return()
        return answers

    def _await_return(self) -> None:
        """Read until the member is used again: connections to it are made again."""
        for _ in range(_RETURNS):
            time.sleep(1)
            if self.epoch().longest_s < _UNDISTURBED_S:
                return


def measure(lab: Lab) -> list[Row]:
    """Return the rows of a lost member.

    Raises:
        UnmeasuredError: we are not root, or the sandbox does not come up.
    """
    if os.geteuid() != 0:
        raise UnmeasuredError("only root can give nodes a network of their own")
    name = f"bench-{os.getpid()}-{secrets.token_hex(2)}"
    lab.say(f"a lost member: sandbox {name} of five nodes")
    try:
        sandbox = Sandbox.up(name, Shape.of(5), Options(expose=(ROOT / "benchmarks",)))
    except DeepLinkError as problem:
        raise UnmeasuredError(f"no sandbox: {problem}") from problem
    try:
        if not sandbox.has_network:
            raise UnmeasuredError("the sandbox's nodes have no network of their own here")
        return _in_sandbox(lab, sandbox)
    finally:
        sandbox.down()


def _in_sandbox(lab: Lab, sandbox: Sandbox) -> list[Row]:
    files = min(lab.scale.most_files, lab.scale.bytes // SIZE)
    lab.say(f"a lost member: twice {files} files of 33 KB, packed onto four nodes")
    # Other bytes for each: shards of the same content would be one.
    sources = {
        name: write_source(sandbox.home / name, files, SIZE, seed) for seed, name in enumerate(_DATASETS, 1)
    }
    token = sandbox.home / "token"
    tokens.write_token(token, tokens.new_token())
    os.chown(token, sandbox.user.uid, sandbox.user.gid)
    base = {
        "PYTHONPATH": str(ROOT),
        "DEEPLINK_CATALOG": str(sandbox.home / "catalog"),
        "DEEPLINK_STATE": str(sandbox.home / "state"),
        "DEEPLINK_STORE": "/local/ssd/store",
        "DEEPLINK_TOKEN_FILE": str(token),
    }
    with ExitStack() as ends:
        members = ",".join(ends.enter_context(_agent(lab, sandbox, node, base)) for node in MEMBERS)
        base["DEEPLINK_MEMBERS"] = members
        for name, copies in _DATASETS.items():
            _pack(sandbox, name, base, copies)
        nodes = Nodes(lab, sandbox, base, sources)
        return [*_full_speed(nodes), *_training(nodes)]


@contextmanager
def _agent(lab: Lab, sandbox: Sandbox, node: str, base: dict[str, str]) -> Iterator[str]:
    """Run a node's agent; gives `NAME=HOST:PORT`."""
    argv = ["deeplink", "node", "--name", node, "--bind", f"0.0.0.0:{_PORT}"]
    with (lab.work / f"{node}.log").open("wb") as log:
        process = sandbox.spawn(node, argv, env=base, stdout=subprocess.PIPE, stderr=log)
    try:
        out = process.stdout
        if out is None or not select.select([out], [], [], _START_S)[0]:
            raise UnmeasuredError(f"the agent of {node} did not come up within {_START_S:g} s")
        line = out.readline()
        if not line:
            raise UnmeasuredError(f"the agent of {node} ended: {(lab.work / f'{node}.log').read_text()[-300:]}")
        yield f"{node}={json.loads(line)['address']}"
    finally:
        process.terminate()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


def _pack(sandbox: Sandbox, name: str, base: dict[str, str], copies: int) -> None:
    argv = ["deeplink", "pack", "--json", str(sandbox.home / name), name, "--replicas", str(copies)]
    argv += ["--shard-size", _SHARD, "--members", base["DEEPLINK_MEMBERS"]]
    done = sandbox.run(READER, argv, env=base, timeout_s=120)
    if done.code:
        raise UnmeasuredError(f"deeplink pack: {done.stderr.strip()[-300:]}")


def _full_speed(nodes: Nodes) -> list[Row]:
    """Return the rows of reading as fast as can be, two copies of each shard."""
    lab = nodes.lab
    lab.say(f"a lost member: {LOST} is cut off {lab.scale.repeats} times, reading at full speed")
    with nodes.reader("both") as player:
        reading = Reading(nodes, player, "both", BATCH)
        passes = max(1, round(_EPOCH_S / reading.epoch().seconds))
        reading = dataclasses.replace(reading, passes=passes)
        found = [reading.loss() for _ in range(lab.scale.repeats)]
    before, during, after, later = zip(*found, strict=True)
    what = "one of four members cut off in mid-epoch, full speed, two copies"
    every = [answer for of in found for answer in of]
    for answer in every:
        if answer.failed:
            lab.say(f"a lost member: {answer.failed} batches failed: {answer.why}")
    stalls = [answer.longest_s for answer in during]
    return [
        make_row(f"{what}: failed reads, all runs together", [sum(a.failed for a in every)], "batches", at_most=0),
        make_row(f"{what}: longest stall, worst of {len(stalls)} runs", [max(stalls)], "s", at_most=2),
        make_row(f"{what}: longest stall", stalls, "s"),
        make_row(f"{what}: longest stall in the epoch after", [answer.longest_s for answer in after], "s"),
        make_row(f"{what}: epoch once detected, over no failure", _over(after, before), "of it", at_most=1.1),
        make_row(f"{what}: the second epoch then, over no failure", _over(later, before), "of it"),
        make_row(f"{what}: the epoch it happens in, over no failure", _over(during, before), "of it"),
        make_row(f"{what}: samples per second before", [answer.rate for answer in before], "1/s"),
        make_row(
            f"{what}: CPU of the reader before", [a.cpu_s / (a.samples * SIZE / 1e9) for a in before], "s/GB"
        ),
    ]


def _over(answers: Sequence[Answer], base: Sequence[Answer]) -> list[float]:
    return [answer.seconds / other.seconds for answer, other in zip(answers, base, strict=True)]


def _training(nodes: Nodes) -> list[Row]:
    """Return the rows of a paced training, with a second copy and with the source in its place."""
    lab, rows = nodes.lab, []
    for name, copies in _DATASETS.items():
        lab.say(f"a lost member: training, {copies} of each shard, source slowed to {_SOURCE_BYTES_S >> 20} MiB/s")
        limits = Limits(f"{lab.work.name}-{name}", lab.work, read_bytes_s=_SOURCE_BYTES_S)
        with limits, nodes.reader(name) as player:
            for process in descendants(player.pid, table()):
                limits.hold(process.pid)
            reading = Reading(nodes, player, name, _STEP, _STEP_S)
            found = [reading.loss() for _ in range(max(1, lab.scale.repeats // 2))]
        before, during, after, _ = zip(*found, strict=True)
        how = "two copies" if copies > 1 else "one copy, the rest redirected to the source as HVAC does"
        what = f"one of four members cut off, training of {_STEP} samples in {_STEP_S * 1000:g} ms, {how}"
        samples = len(nodes.sources[name].digests)
        rows += [
            make_row(f"{what}: epoch once detected, over no failure", _over(after, before), "of it"),
            make_row(f"{what}: the epoch it happens in, over no failure", _over(during, before), "of it"),
            make_row(f"{what}: longest stall", [answer.longest_s for answer in during], "s"),
            make_row(
                f"{what}: read by the trainer from the source then",
                [a.from_source / samples for a in after],
                "share",
            ),
        ]
    return rows
