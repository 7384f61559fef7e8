"""Rules over Slurm's settings, on what a real slurmctld told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deeplink.core.finding import Severity
from deeplink.scheduler.sitecheck.doctor_checks import CHECKS, CheckGroup
from deeplink.scheduler.slurm.settings import parse_settings
from tests.scheduler.sitecheck.sites import CONFIG, DATA, settings, site, worst

OF_SETTINGS = [check for check in CHECKS if check.group in {CheckGroup.RECOVERY, CheckGroup.RUNNING}]


def severity(check: str, **changed: str | None) -> str:
    return worst(check, site(settings=settings("5-leaked-gpus", **changed))).severity.word


@pytest.mark.parametrize(
    ("check", "changed", "expected"),
    [
        ("kill-on-bad-exit", {"KillOnBadExit": "1"}, "warning"),
        ("kill-on-bad-exit", {"KillOnBadExit": "No"}, "ok"),
        ("credential-expiry", {"AuthInfo": "socket=/x,cred_expire=10"}, "ok"),
        ("credential-expiry", {"AuthInfo": "(null)"}, "note"),
        ("credential-expiry", {"AuthInfo": "cred_expire=2"}, "warning"),
        ("preempt-mode", {"PreemptType": "preempt/qos", "PreemptMode": "GANG,SUSPEND"}, "warning"),
        ("preempt-mode", {"PreemptType": "preempt/qos", "PreemptMode": "CANCEL"}, "error"),
        ("preempt-mode", {"PreemptType": "preempt/qos", "PreemptMode": "REQUEUE"}, "ok"),
        ("preempt-mode", {"PreemptType": "preempt/none", "PreemptMode": "CANCEL"}, "ok"),
        ("min-job-age", {"MinJobAge": "10 sec"}, "warning"),
        ("min-job-age", {"MinJobAge": "0 sec"}, "ok"),
        ("return-to-service", {"ReturnToService": "2"}, "warning"),
        ("return-to-service", {"ReturnToService": "1"}, "ok"),
        ("slurmd-timeout", {"SlurmdTimeout": "0 sec"}, "error"),
        ("slurmd-timeout", {"SlurmdTimeout": "900 sec"}, "warning"),
        ("slurmd-timeout", {"SlurmdTimeout": "300 sec"}, "ok"),
        ("slurmd-timeout", {"SlurmdTimeout": "10 sec"}, "note"),
        ("job-requeue", {"JobRequeue": "0"}, "warning"),
        ("requeue-exit", {"RequeueExitHold": "1,70-80"}, "error"),
        ("requeue-exit", {"RequeueExit": "77"}, "warning"),
        ("requeue-exit", {"RequeueExit": "1-3"}, "warning"),
        ("requeue-exit", {"RequeueExit": "17,75"}, "ok"),
        ("kill-wait", {"KillWait": "0 sec"}, "warning"),
        ("kill-wait", {"KillWait": "300 sec"}, "warning"),
        ("unkillable-step-timeout", {"UnkillableStepTimeout": "5 sec"}, "warning"),
        ("unkillable-step-timeout", {"UnkillableStepTimeout": "900 sec"}, "warning"),
        ("inactive-limit", {"InactiveLimit": "60 sec"}, "note"),
        ("wait-time", {"WaitTime": "30 sec"}, "warning"),
        ("prolog-failure", {"Prolog": "/etc/slurm/prolog"}, "warning"),
        (
            "prolog-failure",
            {"Prolog": None, "Prolog[0]": "/a", "SchedulerParameters": "defer,nohold_on_prolog_fail"},
            "ok",
        ),
        ("client-patience", {"MessageTimeout": "30 sec"}, "warning"),
        ("select-type", {"SelectType": "select/linear"}, "warning"),
        ("topology-plugin", {"TopologyPlugin": "topology/flat"}, "warning"),
        ("topology-plugin", {"TopologyPlugin": "topology/block"}, "ok"),
        ("switch-wait", {"SchedulerParameters": "max_switch_wait=10"}, "note"),
        ("switch-wait", {"SchedulerParameters": "max_switch_wait=86400"}, "note"),
        ("backfill", {"SchedulerType": "sched/builtin"}, "warning"),
        ("private-data", {"PrivateData": "nodes"}, "error"),
        ("private-data", {"PrivateData": "jobs,usage"}, "warning"),
        ("private-data", {"PrivateData": "usage,users"}, "ok"),
        ("process-tracking", {"ProctrackType": "proctrack/pgid"}, "warning"),
        ("process-tracking", {"ProctrackType": "proctrack/linuxproc"}, "warning"),
        ("process-tracking", {"ProctrackType": "proctrack/cgroup"}, "ok"),
        ("task-binding", {"TaskPlugin": "task/affinity,task/cgroup"}, "ok"),
        ("propagated-limits", {"PropagateResourceLimits": "NONE"}, "ok"),
        ("propagated-limits", {"PropagateResourceLimitsExcept": "MEMLOCK,NOFILE"}, "ok"),
        ("propagated-limits", {"PropagateResourceLimitsExcept": "MEMLOCK"}, "note"),
        ("srun-ports", {"SrunPortRange": "30000-40000"}, "warning"),
        ("srun-ports", {"SrunPortRange": "60001-63000"}, "ok"),
        ("step-limit", {"MaxStepCount": "10"}, "warning"),
        ("power-saving", {"SuspendTime": "600 sec", "SuspendProgram": "/off"}, "note"),
        ("power-saving", {"SuspendTime": "600 sec"}, "ok"),
        ("accounting", {"AccountingStorageType": "accounting_storage/slurmdbd"}, "ok"),
        ("changed-submissions", {"JobSubmitPlugins": "lua"}, "note"),
        ("launch-parameters", {"LaunchParameters": "test_exec,enable_nss_slurm"}, "note"),
        ("rate-limit", {"SlurmctldParameters": "rl_enable,rl_bucket_size=50"}, "note"),
    ],
)
def test_a_setting_is_judged(check: str, changed: dict[str, str | None], expected: str) -> None:
    assert severity(check, **changed) == expected


@pytest.mark.parametrize("check", OF_SETTINGS, ids=lambda check: check.name)
def test_a_setting_that_slurm_does_not_tell_is_unknown_and_no_guess(check: object) -> None:
    name = check.name  # type: ignore[attr-defined]
    bare = parse_settings("ClusterName = bare\n")
    assert worst(name, site(settings=bare)).severity is Severity.UNKNOWN
    silent = worst(name, site(settings=None, problems={"settings": "it hangs"}))
    assert silent.severity is Severity.UNKNOWN
    assert "slurm-answers" in silent.text


@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        ({}, "slurm.conf: PropagateResourceLimitsExcept=MEMLOCK,NOFILE"),
        (
            {"PropagateResourceLimitsExcept": "CORE,NOFILE"},
            "slurm.conf: PropagateResourceLimitsExcept=CORE,MEMLOCK,NOFILE",
        ),
        ({"PropagateResourceLimits": "NOFILE,CPU"}, "slurm.conf: take NOFILE out of PropagateResourceLimits"),
    ],
)
def test_of_the_two_settings_for_limits_the_one_that_is_set_is_to_be_changed(
    changed: dict[str, str | None], remedy: str
) -> None:
    assert worst("propagated-limits", site(settings=settings("5-leaked-gpus", **changed))).remedy == remedy


def test_a_slurmd_that_calls_every_restart_a_reboot_is_not_advised() -> None:
    assert worst("return-to-service", site(settings=settings(ReturnToService="2"))).remedy.endswith("Service=1")


def test_without_a_watchdog_what_it_would_do_is_missed() -> None:
    alone = site(config=replace(CONFIG, watch=""))
    assert worst("credential-expiry", alone).severity is Severity.WARNING
    assert "121 s" in worst("credential-expiry", alone).text
    default = replace(alone, settings=settings(SlurmdTimeout="300 sec"))
    assert worst("slurmd-timeout", default).severity is Severity.NOTE


@pytest.mark.parametrize(("store", "expected"), [("/tmp/dl", "error"), ("/local/ssd", "ok"), ("/tmp2/dl", "ok")])
def test_a_store_in_a_private_tmp_ends_with_its_job(store: str, expected: str) -> None:
    for changed in (
        {"JobContainerType": "job_container/tmpfs"},
        {"JobContainerType": None, "NamespaceType": "namespace/linux"},  # as 26.05 calls it
    ):
        evidence = site(settings=settings(**changed), config=replace(CONFIG, store=Path(store)))
        assert worst("private-tmp", evidence).severity.word == expected


def test_a_sandbox_in_which_much_is_wrong_is_found_out() -> None:
    evidence = site(settings=settings("6-unfit"))
    judged = {check.name: worst(check.name, evidence).severity.word for check in OF_SETTINGS}
    errors = {name for name, severity in judged.items() if severity == "error"}
    assert errors == {"preempt-mode", "slurmd-timeout", "requeue-exit"}
    warnings = {name for name, severity in judged.items() if severity == "warning"}
    assert warnings == {
        *("kill-on-bad-exit", "min-job-age", "return-to-service", "job-requeue", "kill-wait", "process-tracking"),
        *("unkillable-step-timeout", "wait-time", "client-patience", "topology-plugin", "private-data"),
        *("srun-ports", "step-limit"),
    }


def test_a_later_slurm_is_read_with_the_same_rules() -> None:
    text = (DATA / "synthetic" / "24.11-scontrol-show-config.synthetic.txt").read_text()
    evidence = site(settings=parse_settings(text.partition("\n")[2]))
    judged = {check.name: worst(check.name, evidence).severity.word for check in OF_SETTINGS}
    assert "unknown" not in judged.values()
    assert {name for name, severity in judged.items() if severity == "error"} == set()
    assert {name for name, severity in judged.items() if severity == "warning"} == {"client-patience"}
