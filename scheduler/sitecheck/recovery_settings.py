"""Settings that decide what becomes of a job whose node is lost. Docstrings are what `--explain` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.sitecheck.site_evidence import error, note, ok, warning

if TYPE_CHECKING:
    from deeplink.core.finding import Finding
    from deeplink.scheduler.sitecheck.site_evidence import SettingsView

_DEFAULT_CRED_EXPIRE_S = 120
_LONG_HOLD_S = 30
_SHORT_CREDENTIAL_S = 5
_LEAST_JOB_AGE_S = 60
_LONG_SILENCE_S = 300
_SHORT_SILENCE_S = 30
_KILL_WAITS_S = (2, 60)
_UNKILLABLE_S = (30, 300)
_STRANDED, _FENCED = 75, 77  # exit codes of `deeplink run`


def kill_on_bad_exit(site: SettingsView) -> Finding:
    """Tell whether one failed task ends its whole step by the site's default (KillOnBadExit).

    `deeplink run` says for its own steps what it needs. Steps that a script starts with a plain srun take the
    default: where a rank fails while another one's node is dead and not yet down, slurmctld keeps the signal for
    that node and delivers it when the node is back, to the step of the same number of the job's next run. That was
    measured to kill a job 42 s after its restart, and never seen with KillOnBadExit=0.
    """
    value = site.number("KillOnBadExit")
    if value:
        said = "KillOnBadExit=1: a signal kept for a dead node may kill the job's next run"
        return warning(said, "slurm.conf: KillOnBadExit=0 (steps that want it say srun --kill-on-bad-exit=1)")
    return ok("KillOnBadExit=0")


def credential_expiry(site: SettingsView) -> Finding:
    """Tell how long a requeued job is held (cred_expire in AuthInfo).

    A job that Slurm requeues waits cred_expire and one second more before it may start again: 121 s by default, 6
    s with cred_expire=5 (measured). `deeplink watch --act` clears the hold; without it every recovery costs that
    long. Below 5 s a launch on a loaded node may come too late for its credential.
    """
    value = site.item("AuthInfo", "cred_expire") or ""
    seconds = int(value) if value.isascii() and value.isdigit() and len(value) < 9 else _DEFAULT_CRED_EXPIRE_S  # noqa: PLR2004
    said = f"cred_expire={seconds}: a requeued job is held {seconds + 1} s"
    remedy = "slurm.conf: AuthInfo=...,cred_expire=10"
    if seconds < _SHORT_CREDENTIAL_S:
        return warning(f"cred_expire={seconds}: a launch on a loaded node may find its credential expired", remedy)
    if seconds <= _LONG_HOLD_S:
        return ok(said)
    if site.config.watch:
        return note(f"{said}, where the watchdog does not act (`deeplink watch --act` clears it)", remedy)
    return warning(f"{said}, and no watchdog clears it", f"{remedy}; or run `deeplink watch --act`")


def preempt_mode(site: SettingsView) -> Finding:
    """Tell what preemption does to a job (PreemptMode).

    CANCEL ends it for good: `--requeue` does nothing then. SUSPEND stops the ranks where they are: their
    connections time out, and to a watchdog they look hung. REQUEUE is what recovery is made for.
    """
    mode, kind = site.text("PreemptMode"), site.text("PreemptType")
    if kind in {"", "preempt/none"}:
        return ok("nothing is preempted (PreemptType=preempt/none)")
    return of_preempt_mode(mode, "slurm.conf: PreemptMode=REQUEUE")


def of_preempt_mode(mode: str, remedy: str) -> Finding:
    """Judge a mode of preemption, the cluster's or a partition's."""
    if "CANCEL" in mode.upper():
        return error(f"PreemptMode={mode}: a preempted job is cancelled, --requeue or not", remedy)
    if "SUSPEND" in mode.upper():
        return warning(f"PreemptMode={mode}: ranks are stopped in mid-step and look hung", remedy)
    return ok(f"PreemptMode={mode or 'OFF'}")


def min_job_age(site: SettingsView) -> Finding:
    """Tell how long Slurm remembers a job that has ended (MinJobAge).

    squeue forgets it then, and without accounting nobody knows how it ended. The watchdog and `deeplink status`
    look at least every few seconds, but both may be away for a minute. 300 s is Slurm's default; 0 forgets
    nothing.
    """
    value = site.number("MinJobAge")
    if 0 < value < _LEAST_JOB_AGE_S:
        return warning(
            f"MinJobAge={value}: the end of a job is forgotten after {value} s", "slurm.conf: MinJobAge=300"
        )
    return ok(f"MinJobAge={value}")


def return_to_service(site: SettingsView) -> Finding:
    """Tell when a node that was down is used again (ReturnToService).

    With 2 a node set down whose slurmd lives is idle again within 3 s, and a restarted job landed on it
    (measured); and a reboot that is quicker than SlurmdTimeout goes unnoticed: the job shows RUNNING for ever with
    a rank missing. With 1 such a reboot requeues the job within 0.2 s of the node's registration. The watchdog
    drains before it downs, so its own nodes stay out with any value. Not to be used with slurmd's -b, which is for
    tests: with it each restart of slurmd counts as a reboot, and costs the node and its jobs (measured).
    """
    value = site.number("ReturnToService")
    if value >= 2:  # noqa: PLR2004 - Slurm's own number
        said = f"ReturnToService={value}: a bad node comes back by itself, a fast reboot goes unnoticed"
        return warning(said, "slurm.conf: ReturnToService=1")
    return ok(f"ReturnToService={value}")


def slurmd_timeout(site: SettingsView) -> Finding:
    """Tell after how long a silent node is given up by Slurm itself (SlurmdTimeout).

    0 is never: a job on a dead node then waits until somebody notices. With 300, the default, a job without spares
    and without a watchdog is back some seven minutes after its node died; the watchdog needs less than 4 s for it.
    Much shorter values cost jobs at every hiccup of the network.
    """
    value = site.number("SlurmdTimeout")
    remedy = "slurm.conf: SlurmdTimeout=300"
    if value == 0:
        return error("SlurmdTimeout=0: a dead node is never given up", remedy)
    if value > _LONG_SILENCE_S:
        return warning(f"SlurmdTimeout={value}: a dead node is given up only after {value} s", remedy)
    if value < _SHORT_SILENCE_S:
        return note(
            f"SlurmdTimeout={value}: quick, but a hiccup of {value} s costs every job of the nodes it hits"
        )
    if not site.config.watch:
        return note(f"SlurmdTimeout={value}, and no watchdog that is quicker", "run `deeplink watch --act`")
    return ok(f"SlurmdTimeout={value}")


def job_requeue(site: SettingsView) -> Finding:
    """Tell whether jobs may be restarted unless they say otherwise (JobRequeue).

    `deeplink sbatch` adds --requeue by itself; a job submitted with a plain sbatch ends with its node where this
    is 0.
    """
    value = site.number("JobRequeue")
    if not value:
        said = "JobRequeue=0: jobs of a plain sbatch end with their node"
        return warning(said, "slurm.conf: JobRequeue=1; or submit with `deeplink sbatch`, or --requeue")
    return ok("JobRequeue=1")


def requeue_exit(site: SettingsView) -> Finding:
    """Tell which exit codes have a job requeued, or held (RequeueExit, RequeueExitHold).

    `deeplink run` ends with 75 when nodes were lost and nobody could help, and with 77 when a newer run has taken
    its place. A job that is held for 75 waits for its user to release it; one that is requeued for 77 fights its
    successor; one that is requeued for 1 starts a script with a mistake in it for ever.
    """
    again, held = site.text("RequeueExit"), site.text("RequeueExitHold")
    if _holds(held, _STRANDED):
        said = f"RequeueExitHold={held}: a stranded job (exit code {_STRANDED}) is held"
        return error(said, f"slurm.conf: leave {_STRANDED} out of RequeueExitHold")
    for code, means in (
        (_FENCED, "is started beside its successor"),
        (1, "with a mistake in it is started for ever"),
    ):
        if _holds(again, code):
            said = f"RequeueExit={again}: a job that ends with {code} {means}"
            return warning(said, f"slurm.conf: leave {code} out of RequeueExit")
    return ok(f"RequeueExit={again or 'none'}, RequeueExitHold={held or 'none'}")


def _holds(listed: str, code: int) -> bool:
    for part in listed.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (last or first).isdigit() and int(first[:4]) <= code <= int((last or first)[:4]):
            return True
    return False


def kill_wait(site: SettingsView) -> Finding:
    """Tell how long a step has between SIGTERM and SIGKILL (KillWait).

    It is what ranks have to end their writing, and what a requeue waits for a rank that does not end.
    """
    value = site.number("KillWait")
    least, most = _KILL_WAITS_S
    if value > most:
        return warning(
            f"KillWait={value}: a rank that does not end holds a restart up so long", "slurm.conf: KillWait=30"
        )
    if value < least:
        return warning(f"KillWait={value}: no time to end a write", "slurm.conf: KillWait=30")
    return ok(f"KillWait={value}")


def unkillable_step_timeout(site: SettingsView) -> Finding:
    """Tell when a process that cannot be killed costs its node (UnkillableStepTimeout).

    After it the node is drained. A rank in the middle of a GPU's reset, a core dump or a read from dead storage
    takes a while to end, and a step that ends while slurmctld is away tells it so but once a minute (measured,
    22.05.8); a value that is too long keeps the job COMPLETING, and it is not restarted meanwhile.
    """
    value = site.number("UnkillableStepTimeout")
    least, most = _UNKILLABLE_S
    remedy = "slurm.conf: UnkillableStepTimeout=120"
    if value < least:
        return warning(f"UnkillableStepTimeout={value}: a rank that is slow to end drains its node", remedy)
    if value > most:
        return warning(f"UnkillableStepTimeout={value}: a stuck rank keeps its job COMPLETING so long", remedy)
    return ok(f"UnkillableStepTimeout={value}")


def inactive_limit(site: SettingsView) -> Finding:
    """Tell whether Slurm ends a job whose srun or salloc does not answer (InactiveLimit).

    A terminal that is stopped, or a login node that hangs, then costs the job that was started from it. Jobs of
    sbatch are not touched.
    """
    value = site.number("InactiveLimit")
    if value:
        said = f"InactiveLimit={value}: a job of salloc or srun that does not answer for {value} s is ended"
        return note(said, "slurm.conf: InactiveLimit=0")
    return ok("InactiveLimit=0")


def wait_time(site: SettingsView) -> Finding:
    """Tell whether the first rank that ends well ends the others (WaitTime).

    Ranks need not end together: the one that writes the last checkpoint ends last.
    """
    value = site.number("WaitTime")
    if value:
        said = f"WaitTime={value}: ranks are killed {value} s after the first one ended"
        return warning(said, "slurm.conf: WaitTime=0; or `deeplink run --srun-option=--wait=0`")
    return ok("WaitTime=0")


def prolog_failure(site: SettingsView) -> Finding:
    """Tell what a failed prolog does to the job (Prolog, SchedulerParameters=nohold_on_prolog_fail).

    It is requeued and held: nobody restarts it until somebody releases it, though another node would have done.
    """
    prologs = site.told.listed("Prolog")
    held = site.item("SchedulerParameters", "nohold_on_prolog_fail") is None
    if not prologs:
        return ok("no prolog")
    if held:
        said = f"Prolog={','.join(prologs)}: where it fails, the job is held"
        return warning(said, "slurm.conf: SchedulerParameters=...,nohold_on_prolog_fail")
    return ok("a failed prolog holds no job (nohold_on_prolog_fail)")


RULES = (
    kill_on_bad_exit,
    credential_expiry,
    preempt_mode,
    min_job_age,
    return_to_service,
    slurmd_timeout,
    job_requeue,
    requeue_exit,
    kill_wait,
    unkillable_step_timeout,
    inactive_limit,
    wait_time,
    prolog_failure,
)
