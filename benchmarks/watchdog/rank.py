"""A rank as light as can be, and yet a rank: it steps together with the others, saves, resumes, and keeps a log.

    rank.py FOLDER STEPS [--pause S] [--every N] [--torch] [--dataset NAME --epochs N --batch N] [--child]

A user's file: copied into the sandbox, run by `deeplink run` or by stock srun. Every step waits for all ranks (a
socket each to rank 0, or DDP's all-reduce with --torch), as in training: a rank that hangs holds up all, one that
dies is seen by its peers as a connection reset, one that is cut off as silence. Rank 0 saves every N steps: by
deeplink.Checkpoints in a job of DeepLink's, else as a resuming script does, a file put in place whole.

FOLDER/log/<attempt>.rank<N>.jsonl: {"what": "process"|"imported"|"resumed"|"joined"|"step"|"end", "unix", "step"}.
FOLDER/fail: `RANK STEP CODE once|always`: that rank exits so at that step (0: at its next).
With --child it starts a process that leaves its session and says "child" in the log until the rank's end.
With --dataset every step reads its samples; FOLDER/digest.json is what all epochs were fed, by rank 0 at the end.
"""

# ruff: noqa: PLC0415 - what takes time is imported where it is timed
from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from typing_extensions import override

CONNECT_S = 120.0
_SUM = struct.Struct("<IIQ")


def process_unix() -> float:
    """Return when this process was started, by the kernel's word."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    # Not from the boot time in /proc/stat, which has whole seconds.
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


class Log:
    """This rank's own log: a line at once for each thing that happens."""

    def __init__(self, folder: Path, attempt: str, rank: int) -> None:
        self.attempt = attempt
        (folder / "log").mkdir(exist_ok=True)
        self._path = folder / "log" / f"{attempt}.rank{rank}.jsonl"
        self._file = self._path.open("a", buffering=1, encoding="utf-8")
        self._node = os.environ.get("SLURMD_NODENAME", "")

    def say(self, what: str, step: int = 0, unix: float = 0.0) -> None:
        """Write one line."""
        fact = {"what": what, "unix": unix or time.time(), "step": step, "node": self._node}
        self._file.write(json.dumps(fact) + "\n")

    def child(self) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own that writes lines, too: nothing but its environment is ours."""
        said = f'{{"what": "child", "unix": %s, "step": 0, "node": "{self._node}"}}'
        script = (
            f"while :; do printf '{said}\\n' $(date +%s.%N) >> {shlex.quote(str(self._path))}; sleep 0.5; done"
        )
        return subprocess.Popen(["sh", "-c", script], start_new_session=True)


class Sockets:
    """All ranks meet at rank 0, each step."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._peers: list[socket.socket] = []
        where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        deadline = time.monotonic() + CONNECT_S
        if rank == 0:
            with socket.create_server(("", where[1]), reuse_port=False) as server:
                server.settimeout(CONNECT_S)
                for _ in range(world - 1):
                    self._peers.append(server.accept()[0])
        while rank and not self._peers:
            try:
                peer = socket.create_connection(where, timeout=2.0)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                peer.settimeout(None)
                self._peers.append(peer)
        for peer in self._peers:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def step(self, mine: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        """Return everybody's (epoch, count, sum) on rank 0, nothing elsewhere, once all are there."""
        if self._rank:
            self._peers[0].sendall(_SUM.pack(*mine))
            self._received(self._peers[0], 1)
            return []
        found = [mine, *(_SUM.unpack(self._received(peer, _SUM.size)) for peer in self._peers)]
        for peer in self._peers:
            peer.sendall(b"!")
        return found

    @staticmethod
    def _received(peer: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = peer.recv(size - len(data))
            if not part:
                raise ConnectionResetError("a peer has gone")
            data += part
        return data


class Ddp:
    """A small model under DistributedDataParallel: its all-reduce is what the ranks meet in."""

    def __init__(self, rank: int, world: int) -> None:
        import torch
        from torch import distributed
        from torch.nn.parallel import DistributedDataParallel

        del rank, world
        torch.set_num_threads(1)
        distributed.init_process_group("gloo")
        self._torch = torch
        self._model = DistributedDataParallel(torch.nn.Linear(64, 8))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)

    def step(self, mine: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        """Train one step."""
        loss = self._model(self._torch.ones(4, 64)).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return [mine]


class Plain:
    """What a script without DeepLink does: one file, put in place whole."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "state.json"

    def resume(self) -> tuple[int, dict[str, Any]]:
        """Return step and facts of the newest save."""
        if not self._file.exists():
            return 0, {}
        saved = json.loads(self._file.read_text(encoding="utf-8"))
        return saved["step"], saved["meta"]

    def save(self, step: int, meta: dict[str, Any]) -> None:
        """Save."""
        draft = self._file.with_suffix(".draft")
        draft.write_text(json.dumps({"step": step, "meta": meta}), encoding="utf-8")
        draft.replace(self._file)


class Ours:
    """deeplink.Checkpoints: whole or not at all, fenced by attempt."""

    def __init__(self, folder: Path) -> None:
        import deeplink

        self._checkpoints = deeplink.Checkpoints(folder / "checkpoints")

    def resume(self) -> tuple[int, dict[str, Any]]:
        """Return step and facts of the newest whole checkpoint; say what was passed over."""
        found = self._checkpoints.latest()
        for skipped in self._checkpoints.skipped:
            sys.stdout.write(f"skipped {skipped.path.name}: {skipped.reason}\n")
        return (found.step, found.meta) if found else (0, {})

    def save(self, step: int, meta: dict[str, Any]) -> None:
        """Save."""
        with self._checkpoints.save(step=step, meta=meta) as draft:
            (draft / "state").write_bytes(step.to_bytes(8, "little") * 128)


class Nothing:
    """No data: every step is fed nothing."""

    def feed(self) -> tuple[int, int, int] | None:
        """Return what this step is fed."""
        return (0, 0, 0)

    def finished(self, everybody: list[tuple[int, int, int]]) -> None:
        """Take notice that the step is done."""

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {}

    def load(self, meta: dict[str, Any]) -> None:
        """Go on where that was saved."""

    def told(self, folder: Path) -> None:
        """Write down what all epochs were fed."""


class Fed(Nothing):
    """Samples of a packed dataset, each exactly once an epoch, and the audit of that."""

    def __init__(self, name: str, epochs: int, batch: int) -> None:
        from deeplink.cache.reader import Reader
        from deeplink.data.digest import DeliveryDigest, receipts_of
        from deeplink.data.sampler import ResumableSampler

        self._reader, self._epochs, self._receipts = Reader.open(name), epochs, receipts_of
        self._sampler = ResumableSampler(len(self._reader), batch_size=batch, seed=0, version=name)
        self._digest = DeliveryDigest()
        self._pass: Any = None

    @override
    def feed(self) -> tuple[int, int, int] | None:
        """Return epoch, count and sum of receipts of this rank's samples of the step; None once all is done."""
        import numpy as np

        while self._sampler.epoch < self._epochs:
            self._pass = self._pass or iter(self._sampler)
            rows = next(self._pass, None)
            if rows is None:
                self._pass = None
                continue
            wanted = np.asarray(rows, np.int64)
            receipts = self._receipts(wanted, self._reader.read(wanted)).astype(np.uint64)
            return self._sampler.epoch, len(rows), int(receipts.sum(dtype=np.uint64))
        return None

    @override
    def finished(self, everybody: list[tuple[int, int, int]]) -> None:
        """Take everybody's deliveries of a finished step into the audit."""
        from deeplink.data.digest import DeliveryDigest

        for epoch, count, total in everybody:
            state = {"format": "deeplink-digest-1", "epochs": [[epoch, count, f"{total:016x}"]]}
            part = DeliveryDigest()
            part.load_state_dict(state)
            self._digest.merge(part)
        before = self._sampler.epoch
        self._sampler.finished()
        if self._sampler.epoch != before:
            self._pass = None

    @override
    def state(self) -> dict[str, Any]:
        """Return sampler and audit."""
        return {"sampler": self._sampler.state_dict(), "digest": self._digest.state_dict()}

    @override
    def load(self, meta: dict[str, Any]) -> None:
        """Go on where that was saved."""
        if meta:
            self._sampler.load_state_dict(meta["sampler"])
            self._digest.load_state_dict(meta["digest"])

    @override
    def told(self, folder: Path) -> None:
        """Write the audit."""
        draft = folder / "digest.draft"
        draft.write_text(json.dumps(self._digest.state_dict()), encoding="utf-8")
        draft.replace(folder / "digest.json")


def obey(folder: Path, rank: int, step: int) -> None:
    """Exit as FOLDER/fail says, if it means this rank and step."""
    file = folder / "fail"
    try:
        which, when, code, often = file.read_text(encoding="utf-8").split()
    except (FileNotFoundError, ValueError):
        return
    if int(which) != rank or int(when) not in {0, step}:
        return
    if often == "once":
        file.unlink(missing_ok=True)
    sys.stderr.write(f"rank {rank} fails at step {step}, as it was told to\n")
    sys.stderr.flush()
    os._exit(int(code))  # no last words to the peers but those of the kernel


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--pause", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--dataset", default="")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--child", action="store_true")
    asked = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stock = f"{os.environ.get('SLURM_JOB_ID', '0')}.{os.environ.get('SLURM_RESTART_COUNT', '0')}.0"
    log = Log(asked.folder, os.environ.get("DEEPLINK_ATTEMPT") or stock, rank)
    # One whose imports were preloaded was started long before it became a rank.
    log.say("process", unix=time.time() if "torch" in sys.modules else process_unix())
    child = log.child() if asked.child else None
    import deeplink

    if asked.torch:
        import torch  # noqa: F401 - timed
    log.say("imported")
    saves = Ours(asked.folder) if "DEEPLINK_ATTEMPT" in os.environ else Plain(asked.folder)
    data = Fed(asked.dataset, asked.epochs, asked.batch) if asked.dataset else Nothing()
    step, meta = saves.resume()
    data.load(meta)
    log.say("resumed", step)
    together = (Ddp if asked.torch else Sockets)(rank, world)
    log.say("joined", step)
    while step < asked.steps and (mine := data.feed()) is not None:
        time.sleep(asked.pause)
        obey(asked.folder, rank, step + 1)
        everybody = together.step(mine)
        step += 1
        data.finished(everybody)
        log.say("step", step)
        sys.stdout.write(f"{log.attempt} {rank} {step}\n")
        sys.stdout.flush()
        deeplink.report(step=step, loss=1.0 / step)
        if rank == 0 and step % asked.every == 0:
            saves.save(step, data.state())
    if rank == 0:
        data.told(asked.folder)
    if child:
        child.kill()
    log.say("end", step)


if __name__ == "__main__":
    main()
