"""The demonstration's cluster: Slurm on this machine, or, where none can be had, this machine alone."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import write_text
from deeplink.scheduler.launch.process import end_process
from deeplink.scheduler.slurm import command as processes
from deeplink.scheduler.testbed.cluster import Options, Sandbox
from deeplink.scheduler.testbed.shape import CTL, Shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PACK_NODES = 4
RANKS = 4
SPARES = 1
SHAPE = Shape(spines=1, leaves=2, nodes_per_leaf=3, interleave=True, gpus=1)
PACK_TIMEOUT_S = 600.0
SUBMIT_TIMEOUT_S = 30.0
LIVE_STATES = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"}


def demo_failed(problem: str, said: str) -> DeepLinkError:
    """Return the error of a demonstration that ends early, with what was said about it."""
    detail = f":\n{said.strip()}" if said.strip() else ""
    return DeepLinkError(f"{problem}{detail}", remedy="`make demo KEEP=1` leaves everything up to look at.")


def _packed(argv: Sequence[str], env: Mapping[str, str] | None = None) -> dict[str, Any]:
    # Its progress bar is for people: standard error stays the terminal's.
    process = processes.spawn(argv, env=env, stdout=processes.PIPE)
    try:
        said, _ = process.communicate(timeout=PACK_TIMEOUT_S)
    finally:
        end_process(process)
    if process.returncode:
        raise demo_failed(f"packing exited {process.returncode}", said.decode(errors="replace"))
    facts = json.loads(said)
    if not isinstance(facts, dict):
        raise demo_failed("packing said something else than its facts", said.decode(errors="replace"))
    return facts


class SandboxStage:
    """A real Slurm cluster in network namespaces; without root, or if asked for, of several slurmd on loopback."""

    def __init__(self, name: str, data: Path, *, loopback: bool = False) -> None:
        self._sandbox = Sandbox.up(name, SHAPE, Options(expose=(data,), loopback=loopback))
        self.backend = "slurm" if self._sandbox.has_network else "slurm-loopback"
        self.says = f"a real Slurm cluster of {len(self._sandbox.nodes)} nodes on two leaf switches is up"
        if self.backend == "slurm-loopback":
            self.says += " (several slurmd on loopback: nodes share this machine's network, no link can be cut)"
        self.home = self._sandbox.home
        self.job_folder = Path()
        self._job = ""
        self.catalog = self.home / ".local" / "share" / "deeplink" / "catalog"
        self._sandbox.run(CTL, ["mkdir", "-p", ".config/deeplink"])
        store = f'store = "{self._sandbox.ssd_in_jobs}/deeplink"\n'
        self._sandbox.run(CTL, ["tee", ".config/deeplink/config.toml"], stdin=store)

    def pack(self, source: Path, name: str, *options: str) -> dict[str, Any]:
        """Pack a folder onto the SSDs of four nodes and return what `deeplink pack --json` says."""
        argv = ["salloc", "--quiet", f"--nodes={PACK_NODES}", "--exclusive"]
        argv += ["deeplink", "pack", str(source), name, "--json", *options]
        return _packed(self._sandbox.inside(CTL, argv))

    def submit(self, command: Sequence[str]) -> str:
        """Start the job: the ranks of `command` on four nodes, and one to spare. Returns how it is called."""
        script = ["#!/bin/bash", f"#SBATCH --nodes={RANKS + SPARES}", "#SBATCH --exclusive"]
        script += ["#SBATCH --job-name=demo", "#SBATCH --output=demo.log"]
        script += [f"exec deeplink run --spares {SPARES} -- {shlex.join(command)}", ""]
        self._sandbox.run(CTL, ["tee", str(self.home / "train.sh")], stdin="\n".join(script))
        done = self._sandbox.run(CTL, ["deeplink", "sbatch", "--parsable", "train.sh"], timeout_s=SUBMIT_TIMEOUT_S)
        if done.code:
            raise demo_failed("sbatch refused the job", done.stderr)
        self._job = done.stdout.strip().partition(";")[0]
        self.job_folder = self.home / ".local" / "state" / "deeplink" / "jobs" / self._job
        return f"Slurm job {self._job}"

    def leaf(self, node: str) -> str:
        """Return the leaf switch a node hangs on; empty where there is no fabric."""
        return self._sandbox.shape.above(node)

    def ended(self) -> bool:
        """Tell whether the job has ended."""
        state = self._sandbox.run(CTL, ["squeue", "-h", "--states=all", "-o", "%T", "-j", self._job])
        return state.code == 0 and state.stdout.strip() not in LIVE_STATES

    def output(self) -> str:
        """Return what the job wrote."""
        try:
            return (self.home / "demo.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def kill(self, node: str) -> str:
        """Take a node away at once; returns how, for people."""
        self._sandbox.crash(node)
        if self.backend == "slurm":
            return "its link was cut, then everything on it died at once, as in a power loss"
        return "everything on it was killed at once (no link to cut here)"

    def close(self) -> None:
        """Take everything down."""
        self._sandbox.down()


class LocalStage:
    """This machine alone: the same job under `deeplink run --local`, for where no Slurm can be had."""

    def __init__(self, because: str) -> None:
        self.backend = "local"
        self.says = (
            f"no Slurm here ({because}): the same job runs under a local launcher. "
            "Missing: a queue, a fabric, links to cut"
        )
        self.home = Path(tempfile.mkdtemp(prefix="deeplink-demo-"))  # stays, with its job, when it is to be kept
        self.catalog = self.home / "catalog"
        self.job_folder = Path()
        self._process: processes.Process[bytes] | None = None
        self._env = {
            **os.environ,
            "PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "DEEPLINK_STORE": str(self.home / "ssd"),
            "DEEPLINK_CATALOG": str(self.catalog),
            "DEEPLINK_STATE": str(self.home / "state"),
        }

    def pack(self, source: Path, name: str, *options: str) -> dict[str, Any]:
        """Pack a folder onto the SSDs of four nodes and return what `deeplink pack --json` says."""
        argv = [sys.executable, "-m", "deeplink", "pack", str(source), name, "--json", "--local", str(PACK_NODES)]
        argv += options
        return _packed(argv, self._env)

    def submit(self, command: Sequence[str]) -> str:
        """Start the job: the ranks of `command` on four nodes, and one to spare. Returns how it is called."""
        argv = [sys.executable, "-m", "deeplink", "run", "--local", str(RANKS + SPARES), "--spares", str(SPARES)]
        write_text(self.home / "train.sh", shlex.join([*argv, "--", *command]) + "\n")
        with (self.home / "demo.log").open("wb") as log:
            self._process = processes.spawn(
                [*argv, "--", *command], env=self._env, cwd=self.home, stdout=log, stderr=log
            )
        return "the local job"

    def leaf(self, node: str) -> str:  # noqa: ARG002 - there is no fabric
        """Return the leaf switch a node hangs on; empty where there is no fabric."""
        return ""

    def ended(self) -> bool:
        """Tell whether the job has ended."""
        if self.job_folder == Path():
            # Its folder is named by its id, which is the time it started.
            for folder in sorted((self.home / "state" / "jobs").glob("*/events.jsonl")):
                self.job_folder = folder.parent
        return self._process is not None and self._process.poll() is not None

    def output(self) -> str:
        """Return what the job wrote."""
        return (self.home / "demo.log").read_text(errors="replace")

    def kill(self, node: str) -> str:
        """Take a node away at once; returns how, for people."""
        # Ranks and agents know which node they play: everything that does is this node.
        marks = {f"DEEPLINK_NODE={node}".encode()}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                agent = b"node" in words and node.encode() in words
                if agent or marks & set((entry / "environ").read_bytes().split(b"\0")):
                    os.kill(int(entry.name), signal.SIGKILL)
        return "its agent and its ranks were killed at once"

    def close(self) -> None:
        """Take everything down."""
        if self._process is not None:
            end_process(self._process)
        shutil.rmtree(self.home, ignore_errors=True)


Stage: TypeAlias = SandboxStage | LocalStage
"""A place with nodes, where a job can be run and a node be killed."""
