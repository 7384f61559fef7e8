"""Faults as plans: what would be done and undone, by whom it is found, and that it can be written down."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.codec import from_row
from deeplink.scheduler.testbed.errors import SandboxError
from deeplink.scheduler.testbed.lab import hands, laboratory, plans, scene
from deeplink.scheduler.testbed.lab.faults import FAULTS, fault_of
from deeplink.scheduler.testbed.lab.hands import processes_of
from deeplink.scheduler.testbed.lab.laboratory import Wound
from deeplink.scheduler.testbed.lab.scene import FaultStep, FaultTarget, Scene, Started, Verb, process_words
from deeplink.scheduler.testbed.processes import ProcessId
from deeplink.scheduler.testbed.settings import SSD
from tests.waiting import LIMIT_S

OF_THE_TABLE = {
    *("node-killed", "node-cut", "rank-stopped", "rank-killed", "rank-exit", "fast-reboot", "slurmd-killed"),
    *("controller-down", "watchdog-killed", "storage-frozen", "agents-silent", "leaf-cut", "checkpoint-torn"),
    *("disk-full", "disk-readonly", "slow-rank"),
    *("node-drained", "checkpoints-unreadable", "folder-squatted"),
}
WHO = ProcessId(4711, 99)
FULL = Scene(
    target="n3",
    ranks={5: (WHO,), 2: (ProcessId(12, 34), ProcessId(13, 35))},
    daemon=ProcessId(77, 1),
    watchdogs=((ProcessId(80, 2), Started(argv=("python", "-m", "deeplink", "watch"), env={"A": "b"})),),
    programs={"node": (ProcessId(90, 3), ProcessId(91, 3)), "run": (ProcessId(95, 4),)},
    homes="/homes",
    agents={"n1": (7001,), "n0": (7002, 7003)},
    torn=("/f/step-0000000020.a1/state", "/kept/state"),
    mode="750",
)


def test_every_fault_of_the_table_is_there() -> None:
    assert set(FAULTS) >= OF_THE_TABLE
    with pytest.raises(SandboxError, match="node-klled") as unknown:
        fault_of("node-klled")
    assert "node-killed" in unknown.value.remedy


@pytest.mark.parametrize("name", FAULTS)
def test_a_plan_does_something_and_can_be_written_down(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    plan = fault.plan(FULL)
    assert plan.do
    assert bool(plan.undo) != fault.undone.startswith("cannot be"), "what lasts can be undone"
    wound = Wound(name=name, target="n3", unix=1.5, undo=plan.undo)
    laboratory.write(tmp_path / "faults.json", [wound])
    assert laboratory.read(tmp_path / "faults.json") == (wound,)
    assert fault.like
    assert fault.undone


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.target is FaultTarget.RANK])
def test_a_rank_that_is_not_there_is_no_target(name: str) -> None:
    with pytest.raises(SandboxError, match="no rank"):
        FAULTS[name].plan(Scene(target="n3"))
    with pytest.raises(SandboxError, match="no rank 7"):
        FAULTS[name].plan(Scene(target="n3", ranks=FULL.ranks, rank=7))


@pytest.mark.parametrize(
    "name",
    [
        *("slurmd-killed", "controller-down", "controller-frozen", "watchdog-killed", "agents-silent"),
        *("checkpoint-torn", "checkpoints-unreadable"),
    ],
)
def test_what_is_not_there_is_no_target(name: str) -> None:
    with pytest.raises(SandboxError, match=r": (no|Slurm's daemon)"):
        FAULTS[name].plan(Scene(target="n3"))


def test_the_link_goes_before_the_processes() -> None:
    plan = FAULTS["node-killed"].plan(FULL)
    assert [step.verb for step in plan.do] == [Verb.OFF], "which cuts the cable first"
    assert [step.verb for step in plan.undo] == [Verb.BOOT]


def test_a_fast_reboot_is_off_for_seconds_and_over_then() -> None:
    plan = FAULTS["fast-reboot"].plan(FULL)
    assert [step.verb for step in plan.do] == [Verb.OFF, Verb.PAUSE, Verb.BOOT]
    assert 1 <= float(plan.do[1].words[0]) <= 3
    assert not FAULTS["fast-reboot"].lasting


def test_the_asked_rank_is_stopped_else_the_first_one_there() -> None:
    asked = FAULTS["rank-stopped"].plan(Scene(target="n3", ranks=FULL.ranks, rank=5))
    assert asked.do == (FaultStep(Verb.SIGNAL, words=("SIGSTOP", "4711:99")),)
    assert asked.undo == (FaultStep(Verb.SIGNAL, words=("SIGCONT", "4711:99")),)
    first = FAULTS["rank-stopped"].plan(FULL)
    assert first.do[0].words == ("SIGSTOP", "12:34", "13:35")


def test_a_slow_rank_goes_on_when_it_is_undone() -> None:
    plan = FAULTS["slow-rank"].plan(Scene(target="n3", ranks={0: (WHO,)}, share=0.7))
    assert plan.do[0].words == ("0.7", "0.2", "4711:99")
    assert [step.verb for step in plan.undo] == [Verb.REST, Verb.SIGNAL]
    assert plan.undo[0].words == plan.do[0].words


def test_agents_fall_silent_by_what_they_send_on_every_port() -> None:
    plan = FAULTS["agents-silent"].plan(FULL)
    assert [(step.on, step.words[2], step.words[6]) for step in plan.do] == [
        *(("n0", "add", "7002"), ("n0", "add", "7003"), ("n1", "add", "7001"))
    ]
    assert {step.words[2] for step in plan.undo} == {"del"}


STANDS = "NodeName=n3 Gres=gpu:2(S:0-3) State={} Partitions=main {}"
SINCE = "[root@2026-01-01T00:00:00]"


@pytest.mark.parametrize(
    ("stands", "drains", "resumes"),
    [
        (STANDS.format("IDLE", ""), True, False),
        (STANDS.format("ALLOCATED+DRAIN", f"Reason=disk DRAIN {SINCE}"), False, False),
        (STANDS.format("IDLE+DRAIN", f"Reason={plans.DRAINED} {SINCE}"), False, True),
        (STANDS.format("IDLE+DRAIN", f"Reason={plans.DRAINED}-2 {SINCE}"), False, False),
        (STANDS.format("IDLE", f"Reason=was in DRAIN {SINCE}"), True, False),
    ],
)
def test_a_node_is_drained_unless_it_is_and_resumed_only_of_that_drain(
    stands: str, drains: bool, resumes: bool, tmp_path: Path
) -> None:
    scontrol, shown, did = tmp_path / "scontrol", tmp_path / "shown", tmp_path / "did"
    shown.write_text(stands)
    did.touch()
    # As Slurm does to a node it has not heard of: it resumes it, and calls that an error.
    scontrol.write_text(f"""#!/bin/sh
if [ "$1" = show ]; then exec cat {shown}; fi
echo "$@" >> {did}
case "$*" in *resume) echo NodeName=n3 State=UNKNOWN > {shown}; exit 1;; esac
""")
    scontrol.chmod(0o755)
    plan = FAULTS["node-drained"].plan(FULL)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for step in (*plan.do, *plan.undo):
        subprocess.run(step.words, env=env, timeout=LIMIT_S, check=True)
    assert did.read_text().splitlines() == [
        *([f"update nodename=n3 state=drain reason={plans.DRAINED}"] if drains else []),
        *(["update nodename=n3 state=resume"] if resumes else []),
    ]
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    for step in (*plan.do, *plan.undo):
        assert subprocess.run(step.words, env=env, timeout=LIMIT_S, check=False).returncode, "nobody knows"


def test_a_folder_gets_its_own_mode_back_unless_somebody_gave_it_another(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir(mode=0o750)
    plan = FAULTS["checkpoints-unreadable"].plan(Scene(target=str(folder), mode="750"))
    (do,), (undo,) = plan.do, plan.undo
    nowhere: Any = None
    for _ in range(2):
        hands.do(nowhere, do)
        assert folder.stat().st_mode & 0o7777 == 0
    for _ in range(2):
        hands.do(nowhere, undo)
        assert folder.stat().st_mode & 0o7777 == 0o750
    hands.do(nowhere, do)
    folder.chmod(0o700)
    hands.do(nowhere, undo)
    assert folder.stat().st_mode & 0o7777 == 0o700, "somebody's own hint"
    folder.rmdir()
    hands.do(nowhere, undo)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o750)
    folder.symlink_to(elsewhere)
    hands.do(nowhere, do)
    assert elsewhere.stat().st_mode & 0o7777 == 0o750, "a link leads nowhere"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting file systems needs root")
@pytest.mark.parametrize("there", [True, False])
def test_a_squatted_folder_is_another_users_and_what_was_there_is_back(there: bool, tmp_path: Path) -> None:
    ssd = tmp_path / "ssd"
    (ssd / "deeplink" if there else ssd).mkdir(parents=True)
    if there:
        (ssd / "deeplink" / "mine").write_text("mine")
    script = "\n".join(
        [
            *(f"({plans.SQUAT})",) * 2,
            f"stat -c %u:%a {plans.STORE}; ls {plans.STORE}",
            *(f"({plans.LEAVE})",) * 2,
            f"ls -d {plans.STORE}",
        ]
    )
    script = script.replace(str(SSD), str(ssd)).replace(plans._SQUATTED, str(tmp_path / "mark"))
    argv = ["unshare", "--mount", "sh", "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout.split() == ["65534:755", "theirs", *([str(ssd / "deeplink")] if there else [])], done.stderr
    assert sorted(path.name for path in ssd.rglob("*")) == (["deeplink", "mine"] if there else [])
    assert not (tmp_path / "mark").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own needs root")
def test_agents_fall_silent_on_a_host_without_a_list_of_protocols() -> None:
    plan = FAULTS["agents-silent"].plan(FULL)
    hidden = "test ! -e /etc/protocols || mount --bind /dev/null /etc/protocols"
    script = " && ".join([hidden, *(shlex.join(step.words) for step in (*plan.do, *plan.undo))])
    argv = ["unshare", "--net", "--mount", "sh", "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_watchdog_is_started_again_as_it_was() -> None:
    plan = FAULTS["watchdog-killed"].plan(FULL)
    assert plan.do[0].words == ("SIGKILL", "80:2")
    assert Started.unpacked(plan.undo[0].words[0]) == FULL.watchdogs[0][1]


def test_a_rank_exits_where_it_is_told_to() -> None:
    plan = FAULTS["rank-exit"].plan(Scene(target="/home/run", rank=2, step=40, always=True))
    assert plan.do == (FaultStep(Verb.WRITE, words=("/home/run/fail", "2 40 1 always\n")),)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    assert laboratory.read(path) == ()
    for text in ("{", "[1]", '[{"name": "x"}]', '[{"name":"x","target":"","unix":1,"undo":[{"verb":"fly"}]}]'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(SandboxError, match=r"faults\.json"):
            laboratory.read(path)


@given(st.lists(st.tuples(st.integers(1, 1 << 22), st.integers(0, 1 << 40))))
def test_processes_are_found_again_by_their_words(pairs: list[tuple[int, int]]) -> None:
    those = [ProcessId(*pair) for pair in pairs]
    assert processes_of(process_words(those)) == those


@given(st.text(max_size=300))
def test_whatever_proc_says_is_read(text: str) -> None:
    assert isinstance(scene.listening("  sl  local_address\n" + text.replace("0A", "06")), dict)


@pytest.mark.parametrize(
    ("argv", "verb", "found"),
    [
        ("/v/bin/python3.11 -m deeplink node --job", "node", True),
        ("/v/bin/python /v/bin/deeplink -v watch --act", "watch", True),
        ("/v/bin/python -m deeplink run -- python watch", "watch", False),
        ("srun deeplink node", "node", False),
        ("vi deeplink", "deeplink", False),
        ("", "node", False),
    ],
)
def test_our_own_programs_are_told_from_others(argv: str, verb: str, found: bool) -> None:
    assert scene.is_verb(argv.split(), verb) is found


def test_the_newest_checkpoint_is_of_the_latest_claim(tmp_path: Path) -> None:
    assert scene.newest_checkpoint(tmp_path / "missing") is None
    assert scene.newest_checkpoint(tmp_path) is None
    for name in (
        "step-0000000090.a1",
        "step-0000000020.a2",
        "step-0000000020.a2-1",
        ".draft-step-0000000099.a3-ab",
    ):
        (tmp_path / name).mkdir()
    found = scene.newest_checkpoint(tmp_path)
    assert found == tmp_path / "step-0000000020.a2-1"
    assert scene.largest_file(found) is None
    for name, size in (("manifest.json", 500), ("state", 200), ("other", 100)):
        (found / name).write_bytes(b"x" * size)
    assert scene.largest_file(found) == found / "state"


def test_a_torn_file_is_mended_unless_somebody_wrote_another(tmp_path: Path) -> None:
    file, kept = tmp_path / "state", tmp_path / "kept" / "state"
    file.write_bytes(bytes(range(100)))
    hands._tear(file, kept)
    hands._tear(file, kept)
    assert file.read_bytes() == bytes(range(50))
    hands._mend(file, kept)
    assert file.read_bytes() == bytes(range(100))
    hands._tear(file, kept)
    file.write_bytes(b"new")
    hands._mend(file, kept)
    assert file.read_bytes() == b"new"
    hands._mend(file, kept)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting file systems needs root")
@pytest.mark.parametrize(("fill", "left"), [(plans.FILL, "overlay"), ("mount -t tmpfs full {full}", "tmpfs")])
def test_the_disk_is_whole_again_also_where_filling_it_was_broken_off(
    fill: str, left: str, tmp_path: Path
) -> None:
    ssd, full = tmp_path / "ssd", tmp_path / "full"
    for folder in (ssd, full):
        folder.mkdir()
    script = "\n".join(
        [
            f"mount --bind {ssd} {ssd}; echo before > {ssd}/file",
            f"({fill.format(full=full)})",
            "cut -d' ' -f3 /proc/mounts",
            *(f"({plans.DRAIN})",) * 2,
            f"cat {ssd}/file; echo more > {ssd}/more; mountpoint -q {ssd} && ! mountpoint -q {full} && echo whole",
        ]
    )
    script = script.replace(plans._FULL, str(full)).replace(str(SSD), str(ssd))
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert left in done.stdout, done.stderr
    assert done.stdout.split()[-2:] == ["before", "whole"], done.stderr
    assert (ssd / "more").exists()


@pytest.mark.slow
def test_a_process_on_duty_stands_and_goes_by_turns_and_goes_on_afterwards() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        try:
            who = ProcessId.of(sleeper.pid)
            assert who is not None
            argv = [sys.executable, "-m", hands.DUTY, "0.5", "0.1", *process_words([who])]
            with subprocess.Popen(argv) as duty:
                seen: set[str] = set()
                deadline = time.monotonic() + LIMIT_S
                while not {"T", "S"} <= seen and time.monotonic() < deadline:
                    seen.add(_state(sleeper.pid))
                    time.sleep(0.01)
                duty.terminate()
                assert duty.wait(LIMIT_S) == 0
            assert {"T", "S"} <= seen
            assert _state(sleeper.pid) == "S"
        finally:
            sleeper.kill()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def test_a_port_is_found_by_who_listens() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.getsockname()[1] in scene.ports_of(os.getpid())
    assert scene.ports_of(2**22 + 1) == ()


def test_what_a_rank_is_told_is_its_users_when_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, owned = tmp_path / "fail", list[tuple[bool, int, int]]()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda _draft, uid, gid: owned.append((file.exists(), uid, gid)))
    sandbox: Any = SimpleNamespace(user=SimpleNamespace(uid=7, gid=8))
    hands._write(sandbox, file, "0 0 1 once")
    assert (file.read_text(), owned) == ("0 0 1 once", [(False, 7, 8)])


def test_signals_have_names_that_the_hands_know() -> None:
    for fault in FAULTS.values():
        for step in (*fault.plan(FULL).do, *fault.plan(FULL).undo):
            if step.verb is Verb.SIGNAL:
                assert signal.Signals[step.words[0]]
            assert from_row(FaultStep, json.loads(json.dumps(asdict(step)))) == step


def test_a_fault_that_was_not_done_to_its_end_is_known_as_such(tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    half = Wound(name="storage-frozen", target="", unix=1.0, undo=(FaultStep(Verb.THAW),), done=False)
    laboratory.write(file, [half])
    assert laboratory.read(file) == (half,)
    assert half.frozen
    raw = json.loads(file.read_text())
    del raw[0]["done"]  # as it was written before
    file.write_text(json.dumps(raw))
    assert laboratory.read(file)[0].done
    assert not Wound(name="node-cut", target="n1", unix=1.0, undo=(FaultStep(Verb.HEAL, "n1"),)).frozen


def test_what_a_checkpoint_only_points_to_is_not_torn(tmp_path: Path) -> None:
    folder = tmp_path / "step-0000000020.a1"
    folder.mkdir()
    (tmp_path / "elsewhere").write_bytes(b"x" * 100)
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    assert scene.largest_file(folder) is None
    (folder / "state").write_bytes(b"y")
    assert scene.largest_file(folder) == folder / "state"
