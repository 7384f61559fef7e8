"""A small Slurm for the actions' tests: jobs, nodes and their states, and a death of its caller at any command.

What it does with an order was seen of the real one (docs/decisions/0006, 0022); the real one is in tests/cluster.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deeplink.core.types import NodeName
from deeplink.scheduler.liveness.probe import Address
from deeplink.scheduler.recovery.evidence import ProbeResult
from deeplink.scheduler.slurm.command import CommandError, CommandTimeoutError
from deeplink.scheduler.slurm.nodeset import unfold

NODES = tuple(f"n{number}" for number in range(8))
HELD = "JobHeldUser"


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the caller runs any more."""


@dataclass
class Job:
    id: int
    state: str = "RUNNING"
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    reason: str = "None"
    excluded: str = ""
    required: str = ""
    comment: str = "(null)"
    ending: int = 0  # so many questions are answered with COMPLETING
    then: str = ""
    ran: int = 1


@dataclass
class Machine:
    """Slurm. `deaths`: at which command its caller dies, before or after it worked, or hears nothing."""

    jobs: dict[int, Job] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=lambda: dict.fromkeys(NODES, "IDLE"))
    dead: set[str] = field(default_factory=set)
    rights: bool = True
    deaths: dict[int, str] = field(default_factory=dict)
    orders: list[str] = field(default_factory=list)
    count: int = 0

    def __call__(self, argv: Sequence[str], /, *, timeout_s: float = 20.0) -> str:
        if argv[0] in {"squeue", "sinfo"} or argv[:2] == ["scontrol", "show"]:
            return self._answer(argv)
        return self._ordered(argv)

    def probe(self, targets: Mapping[NodeName, Address], deadline_s: float) -> dict[NodeName, ProbeResult]:
        return {name: ProbeResult.SILENT if name in self.dead else ProbeResult.ANSWERS for name in targets}

    def _ordered(self, argv: Sequence[str]) -> str:
        self.count += 1
        death = self.deaths.get(self.count, "")
        if death == "before":
            raise Killed
        self.orders.append(" ".join(argv))
        said = self._obey(list(argv))
        if death == "after":
            raise Killed
        if death == "unheard":
            raise CommandTimeoutError(argv, 8.0)
        return said

    # Questions.

    def _answer(self, argv: Sequence[str]) -> str:
        line = " ".join(argv)
        if argv[0] == "sinfo":
            return "\n".join(NODES)
        if argv[0] == "squeue":
            return self._squeue(list(argv), line)
        if argv[2] == "config":
            return "Configuration data as of now\nSlurmdPort = 6818\n"
        if argv[2] == "node":
            return "\n".join(self._node(name) for name in (unfold(argv[4]) if len(argv) > 4 else NODES))
        return ""

    def _node(self, name: str) -> str:
        return f"NodeName={name} NodeAddr={name} NodeHostName={name} State={self.states[name]} BootTime=x"

    def _squeue(self, argv: list[str], line: str) -> str:
        found = re.search("~[0-9a-f]{16}~", line)
        end = found[0] if found else "\n"
        number = int(argv[argv.index("-j") + 1]) if "-j" in argv else 0
        if number and number not in self.jobs:  # forgotten: it ended more than MinJobAge ago
            raise CommandError(argv, 1, "slurm_load_jobs error: Invalid job id specified")
        wanted = [self.jobs[number]] if number else list(self.jobs.values())
        return "".join(self._told(job, line, end) for job in wanted)

    def _told(self, job: Job, line: str, end: str) -> str:
        if "%P" in line:
            fields = [str(job.id), "main", "2", job.excluded, job.required]
        elif "%x" in line:
            fields = [str(job.id), job.excluded]
        elif "%k" in line:
            fields = [str(job.id), job.comment]
        else:
            fields = self._columns(job)
        return "".join(word + end for word in fields)

    def _columns(self, job: Job) -> list[str]:
        state, reason = job.state, job.reason
        if job.ending:
            job.ending -= 1
            state = "COMPLETING"
        elif job.then:
            job.state, job.then = job.then, ""
            state = job.state
        nodes = ",".join(job.nodes) if job.state == "RUNNING" else ""
        host = job.nodes[0] if nodes else "n/a"
        return [str(job.id), str(job.id), state, reason, str(job.restarts), "1", "ada", nodes, host, "resnet"]

    # Orders.

    def _obey(self, argv: list[str]) -> str:
        if argv[1] == "update" and argv[2].startswith("nodename="):
            return self._tell_node(argv)
        job = self.jobs[int(argv[2].removeprefix("jobid="))]
        match argv[1]:
            case "requeue":
                self._requeue(argv, job, "BeginTime")
            case "requeuehold":
                self._requeue(argv, job, "job requeued in held state")
            case "uhold":
                job.reason = HELD
            case "release":
                self._start(job)
            case _:
                self._update(argv, job)
        return ""

    def _tell_node(self, argv: list[str]) -> str:
        if not self.rights:
            raise CommandError(argv, 1, "slurm_update error: Invalid user id")
        name, order = argv[2].partition("=")[2], argv[3].partition("=")[2]
        self.states[name] = {"drain": "IDLE+DRAIN", "down": "DOWN+DRAIN"}[order]
        for job in self.jobs.values():
            if order == "down" and job.state == "RUNNING" and name in job.nodes:
                job.nodes = tuple(node for node in job.nodes if node != name)  # --no-kill
        return ""

    def _requeue(self, argv: list[str], job: Job, reason: str) -> None:
        if job.state == "PENDING" or job.then == "PENDING":
            raise CommandError(argv, 1, f"Job is pending execution for job {job.id}")
        assert not {*job.nodes} & self.dead, "a requeue while an allocated node is unreachable"
        job.ending, job.then, job.restarts, job.reason = 2, "PENDING", job.restarts + 1, reason

    def _update(self, argv: list[str], job: Job) -> None:
        fields = dict(word.split("=", 1) for word in argv[3:])
        if "NodeList" in fields:
            left = tuple(fields["NodeList"].replace("n[", "n").replace("]", "").split(","))
            if job.nodes[0] not in left:
                raise CommandError(argv, 1, "Invalid node name specified")
            job.nodes = left
        job.comment = fields.get("Comment", job.comment)
        job.excluded = fields.get("ExcNodeList", job.excluded)
        job.required = fields.get("ReqNodeList", job.required)
        if "StartTime" in fields and job.state == "PENDING":
            self._start(job)

    def _start(self, job: Job) -> None:
        job.state, job.reason, job.ran = "RUNNING", "None", job.ran + 1
        job.nodes = tuple(name for name in NODES if name not in self.dead)[-2:]
