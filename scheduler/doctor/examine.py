"""Gathering the evidence: from Slurm, from this host or from a step on some nodes, from the watchdog."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from deeplink.call_with_timeout import call_with_timeout
from deeplink.daemon import is_loopback
from deeplink.errors import DeepLinkError
from deeplink.scheduler.doctor.asking import asked_slurm, nodes_to_look_at, step_command
from deeplink.scheduler.doctor.folder_rules import scripts_of
from deeplink.scheduler.doctor.network_rules import services_of
from deeplink.scheduler.doctor.part import NodePart, sweep
from deeplink.scheduler.doctor.reach import watchdog_answer
from deeplink.scheduler.doctor.report import NodeProbePlan, NodeReport
from deeplink.scheduler.doctor.step import RunningStep, plans_for
from deeplink.scheduler.launch.process import python_command
from deeplink.scheduler.launch.stepenv import step_environment
from deeplink.scheduler.slurm.nodeset import unfold
from deeplink.scheduler.slurm.programs import real_program

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deeplink.clock import Clock
    from deeplink.config import Config
    from deeplink.scheduler.doctor.evidence import SiteEvidence
    from deeplink.scheduler.slurm.command import Runner
    from deeplink.types import NodeName

HERE_S = 60.0
SWEEP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRequest:
    """What is to be looked at besides Slurm.

    Attributes:
        nodes: how many nodes; None for all of the allocation, else a few idle ones.
        here: this host instead.
        quick: neither.
        disk_bytes: how much to write and read in each store; 0 for nothing.
        srun_options: of the user's, for the step.
    """

    nodes: int | None = None
    here: bool = False
    quick: bool = False
    disk_bytes: int = 0
    srun_options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Examination:
    """One run of the doctor.

    Args:
        config: what the configuration says here.
        wish: what is to be looked at.
        run: the way to Slurm's commands.
        clock: time.
        say: told what is going on.
        env: this process's environment.
    """

    config: Config
    wish: DoctorRequest
    run: Runner
    clock: Clock
    say: Callable[[str], None]
    env: Mapping[str, str]

    def evidence(self) -> SiteEvidence:
        """Return everything that could be had, and why the rest could not."""
        self.say("asking Slurm")
        evidence = asked_slurm(self.config, self.run, self.clock)
        evidence = replace(evidence, watch_answer=_watch_answer(self.config, self.clock))
        everyone = NodeProbePlan(
            services=services_of(self.config.watch, self.config.members),
            scripts=scripts_of(evidence),
            disk_bytes=self.wish.disk_bytes,
        )
        if self.wish.here:
            return self._this_host(evidence, everyone)
        if self.wish.quick:
            return _without(evidence, "no node was looked at (--quick)")
        return self._step(evidence, everyone)

    def _this_host(self, evidence: SiteEvidence, plan: NodeProbePlan) -> SiteEvidence:
        self.say("looking at this host")
        part = NodePart(self.config, secrets.token_hex(4), self.clock)

        def examined() -> NodeReport:
            with part.host() as host:
                return NodeReport(host=host, measured=part.measure(host, plan))

        try:
            report = call_with_timeout(examined, HERE_S)
        except TimeoutError:
            return _without(evidence, f"this host's folders did not answer within {HERE_S:g} s: is a mount dead?")
        finally:
            self._sweep(part.run)
        return replace(evidence, reports={report.host.node: report})

    def _sweep(self, run: str) -> None:
        with contextlib.suppress(TimeoutError):
            call_with_timeout(partial(sweep, self.config, run), SWEEP_S)

    def _step(self, evidence: SiteEvidence, everyone: NodeProbePlan) -> SiteEvidence:
        inside = _allocation(self.env)
        count = self.wish.nodes or len(inside) or nodes_to_look_at(evidence)
        if not count:
            why = "no node is idle: run it in an allocation, or wait for nodes with --nodes N"
            return _without(evidence, why if evidence.nodes is not None else evidence.why_not("nodes"))
        if inside and count > len(inside):
            return _without(evidence, f"this allocation has {len(inside)} nodes, not {count}")
        run = secrets.token_hex(4)
        program = python_command("deeplink", "doctor", "--as-node", run)
        # Not a stand-in of ours, as `deeplink sbatch --deeplink-shim` puts it on PATH.
        srun = real_program("srun", self.env.get("PATH", "")) or "srun"
        name = f"deeplink-doctor-{run}"
        argv = step_command(count, inside=bool(inside), options=self.wish.srun_options, program=program, name=name)
        env = step_environment(self.env, resources=False) if inside else dict(self.env)
        expected = inside if count == len(inside) else ()
        cancel = partial(self._cancel, name) if not inside else _nothing
        step = RunningStep([srun, *argv[1:]], env, count, self.clock, self.say, expected, cancel)
        try:
            result = step.run(partial(plans_for, everyone=everyone))
        except DeepLinkError as failed:
            return _without(evidence, str(failed))
        finally:
            self._sweep(run)
        problems = {**evidence.problems, **({"hosts": result.problem} if result.problem else {})}
        return replace(evidence, reports=result.reports, silent=result.silent, problems=problems)

    def _cancel(self, name: str) -> None:
        with contextlib.suppress(DeepLinkError):  # the step's own time limit ends it then
            self.run(["scancel", "--quiet", f"--name={name}"])


def _nothing() -> None:
    """Do nothing: in an allocation the step ends with its input, and the allocation is not ours to end."""


def _without(evidence: SiteEvidence, why: str) -> SiteEvidence:
    return replace(evidence, problems={**evidence.problems, "hosts": why})


def _allocation(env: Mapping[str, str]) -> tuple[NodeName, ...]:
    listed = env.get("SLURM_JOB_NODELIST", "")
    return unfold(listed) if listed and env.get("SLURM_JOB_ID", "").isdigit() else ()


def _watch_answer(config: Config, clock: Clock) -> str | None:
    """Return what the watchdog answers this host; None where it cannot be asked."""
    if not config.watch or is_loopback(config.watch.rpartition(":")[0].strip("[]")):
        return None
    return watchdog_answer(config, clock)
