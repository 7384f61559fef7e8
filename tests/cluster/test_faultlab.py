"""Faults for real: each is seen by who should see it, and gone when it is undone; and the short scenarios."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.watchdog.playing import play
from benchmarks.watchdog.scenarios import BY_NAME, After
from deeplink.scheduler.testbed.cluster import Options, Sandbox
from deeplink.scheduler.testbed.errors import SandboxError
from deeplink.scheduler.testbed.lab import laboratory
from deeplink.scheduler.testbed.lab.laboratory import How, Laboratory, Wound
from deeplink.scheduler.testbed.lab.scene import FaultStep, Verb, processes_on
from deeplink.scheduler.testbed.processes import ProcessId, arguments
from deeplink.scheduler.testbed.shape import CTL, Shape
from tests.cluster.conftest import PATIENT, Factory
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
BOOT_ID = "/proc/sys/kernel/random/boot_id"
PORT = 7433
SETTLE_S = 3.0
SCENARIOS = {
    "node-killed-spare": None,
    "rank-exit-once": None,
    "checkpoint-torn": None,
    "watchdog-killed": BY_NAME["watchdog-killed"].hold_s,
    "agents-silent": 12.0,
    "storage-frozen": 20.0,  # a launcher's writes are to hang for 10 s
}
"""For how long each is held: less than where it is measured."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Laboratory]:
    """Four nodes on two leaves, with shared storage that can stall."""
    name = f"l-{os.getpid()}-{secrets.token_hex(3)}"
    try:
        yield Laboratory(Sandbox.up(name, Shape.of(4), dataclasses.replace(PATIENT, freezable=True)))
    finally:
        Sandbox.clear(name)


@pytest.fixture(autouse=True)
def healed(lab: Laboratory) -> Iterator[None]:
    yield
    lab.heal()
    assert lab.wounds() == ()
    assert all(lab.sandbox.links().values())
    assert all(machine.daemon for machine in lab.sandbox.status())


def said(lab: Laboratory, machine: str, script: str, *, root: bool = False) -> str:
    return lab.sandbox.run(machine, ["bash", "-c", script], root=root).stdout.strip()


def state_of(who: ProcessId) -> str:
    try:
        return Path(f"/proc/{who.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def cli(lab: Laboratory, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "deeplink", "sandbox", "fault", "--name", lab.sandbox.name, *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.fixture
def ranks(lab: Laboratory) -> Iterator[dict[int, ProcessId]]:
    """Two ranks that sleep, on n0 and n1, by rank."""
    from deeplink.scheduler.testbed.lab.scene import ranks_on

    script = "srun -N2 -w n0,n1 bash -c 'export RANK=$SLURM_PROCID; exec sleep 300'"
    done = lab.sandbox.run(
        CTL, ["sbatch", "--parsable", "-N2", "-w", "n0,n1", "-o", "/dev/null", "--wrap", script]
    )
    assert done.code == 0, done.stderr

    def there() -> dict[int, ProcessId]:
        found = {**ranks_on(lab.sandbox, "n0"), **ranks_on(lab.sandbox, "n1")}
        return {rank: those[0] for rank, those in found.items()}

    until(lambda: [state_of(who) for who in there().values()] == ["S", "S"], LIMIT_S)
    yield there()
    lab.sandbox.run(CTL, ["scancel", done.stdout.strip()])


def test_a_rank_is_stopped_slowed_and_killed(lab: Laboratory, ranks: dict[int, ProcessId]) -> None:
    wound = lab.inject("rank-stopped", "n1")
    assert (state_of(ranks[1]), state_of(ranks[0])) == ("T", "S")
    assert lab.inject("rank-stopped", "n1") == wound, "it is in effect already"
    assert lab.undo("rank-stopped") == (wound,)
    until(lambda: state_of(ranks[1]) == "S", LIMIT_S)
    lab.inject("slow-rank", "n0", How(share=0.5))
    for wanted in "TSTS":
        until(lambda: state_of(ranks[0]) == wanted, LIMIT_S)  # noqa: B023 - asked at once
    lab.undo()
    time.sleep(0.5)
    assert {state_of(ranks[0]) for _ in range(20)} == {"S"}
    with pytest.raises(SandboxError, match="no rank 7"):
        lab.inject("rank-killed", "n0", How(rank=7))
    drawn = lab.inject("rank-killed", seed=3)
    assert drawn.target in {"n0", "n1"}, "a node on which ranks run"
    until(lambda: not ranks[int(drawn.target[1])].alive, LIMIT_S)
    assert lab.wounds() == (), "there is nothing to undo"


HEARS = (
    "import socket; s = socket.socket(2, 2); s.bind(('', 7444)); s.settimeout({wait}); print(s.recv(9).decode())"
)
SAYS = """import socket, time
s = socket.socket(2, 2)
for _ in range(60): s.sendto(b'hear', ('{to}', 7444)); time.sleep(.1)
"""


def hears(lab: Laboratory, there: str, sender: str, wait_s: float) -> bool:
    """Whether what one node sends arrives at another."""
    to = lab.sandbox.shape.address(there)
    saying = lab.sandbox.spawn(sender, [sys.executable, "-c", SAYS.format(to=to)], stderr=subprocess.DEVNULL)
    try:
        return said(lab, there, f'{sys.executable} -c "{HEARS.format(wait=wait_s)}" 2>/dev/null') == "hear"
    finally:
        saying.kill()
        saying.wait()


@pytest.mark.parametrize(("fault", "heard"), [("sends-dropped", False), ("receives-dropped", True)])
def test_one_direction_of_a_link_is_lost_and_the_other_is_not(lab: Laboratory, fault: str, heard: bool) -> None:
    assert hears(lab, "n1", "n2", LIMIT_S)
    assert hears(lab, "n2", "n1", LIMIT_S)
    for _ in range(2):
        lab.inject(fault, "n1")
    assert hears(lab, "n2", "n1", 5.0 if heard else 2.0) == heard
    assert hears(lab, "n1", "n2", 2.0 if heard else 5.0) != heard
    for _ in range(2):
        lab.undo(fault, "n1")
    assert hears(lab, "n2", "n1", LIMIT_S)
    assert hears(lab, "n1", "n2", LIMIT_S)


def test_ports_of_ranks_are_dropped_and_others_are_not(lab: Laboratory) -> None:
    serve = "import http.server as h; h.HTTPServer(('', {port}), h.SimpleHTTPRequestHandler).serve_forever()"
    ask = "import socket; socket.create_connection(('{to}', {port}), timeout=2)"

    def answers(port: int) -> bool:
        text = ask.format(to=lab.sandbox.shape.address("n1"), port=port)
        return not lab.sandbox.run("n0", [sys.executable, "-c", text]).code

    serving = [lab.sandbox.spawn("n1", [sys.executable, "-c", serve.format(port=port)]) for port in (20500, 7445)]
    try:
        until(lambda: answers(20500) and answers(7445))
        lab.inject("data-dropped", "n1")
        assert (answers(20500), answers(7445)) == (False, True)
        lab.undo()
        assert answers(20500)
    finally:
        for process in serving:
            process.kill()
            process.wait()


def test_a_disk_fails_and_storage_fills_or_takes_no_writes(lab: Laboratory) -> None:
    probe = "cat /local/ssd/kept; echo new > /local/ssd/new"
    assert said(lab, "n1", f"echo old > /local/ssd/kept; {probe}") == "old"
    lab.inject("disk-failing", "n1")
    assert "Input/output error" in said(lab, "n1", f"({probe}) 2>&1")
    lab.undo()
    assert said(lab, "n1", probe) == "old"
    home = lab.sandbox.home
    write = f"(head -c 65536 /dev/zero > {home}/more) 2>&1; rm -f {home}/more"
    for fault, target, words in (
        ("storage-full", "", "No space left"),
        ("storage-readonly", "n1", "Read-only file system"),
    ):
        lab.inject(fault, target)
        assert words in said(lab, "n1", write)
        lab.undo()
        assert said(lab, "n1", write) == ""


def test_a_sandbox_goes_down_though_a_program_on_it_is_stopped(fresh_sandbox: Factory) -> None:
    cluster = fresh_sandbox(Shape.of(1))
    process = cluster.spawn("n0", ["sleep", "300"])
    until(lambda: any(arguments(who.pid) == ["sleep", "300"] for who in processes_on(cluster, "n0")))
    for who in processes_on(cluster, "n0"):
        if arguments(who.pid) == ["sleep", "300"]:
            who.send(signal.SIGSTOP)
    brought_in = ProcessId.of(process.pid)
    assert brought_in is not None
    until(lambda: state_of(brought_in) == "T")
    cluster.down()
    process.wait(LIMIT_S)


def test_disks_fill_and_turn_read_only(lab: Laboratory) -> None:
    said(lab, "n0", "echo before > /local/ssd/file")
    lab.inject("disk-full", "n0")
    full = said(
        lab, "n0", "cat /local/ssd/file; echo more > /local/ssd/more || echo refused; df --output=avail /local/ssd"
    )
    assert full.split()[:2] == ["before", "refused"]
    assert full.split()[-1] == "0"
    lab.undo()
    assert said(lab, "n0", "echo more > /local/ssd/more && cat /local/ssd/more") == "more"
    lab.inject("disk-readonly", "n1")
    assert said(lab, "n1", "touch /local/ssd/x || echo refused") == "refused"
    assert said(lab, "n0", "touch /local/ssd/x && echo well") == "well", "the other one's disk is its own"
    lab.undo("disk-readonly", "n1")
    assert said(lab, "n1", "touch /local/ssd/x && echo well") == "well"


def test_a_squatted_store_is_another_users_and_one_thing_at_a_time_lies_over_a_disk(lab: Laboratory) -> None:
    look = "stat -c %U /local/ssd/deeplink; ls /local/ssd/deeplink; touch /local/ssd/deeplink/x || echo refused"
    for node in ("n0", "n2"):  # a job of another test may have been here
        said(lab, node, "rm -rf /local/ssd/*")
    said(lab, "n0", "mkdir -m 700 /local/ssd/deeplink && echo shard > /local/ssd/deeplink/shard")
    lab.inject("folder-squatted", "n0")
    assert said(lab, "n0", look).split() == ["nobody", "theirs", "refused"]
    with pytest.raises(SandboxError, match="folder-squatted"):
        lab.inject("disk-full", "n0")
    lab.inject("disk-full", "n1")
    lab.undo("folder-squatted", "n0")
    assert said(lab, "n0", look).split() == [lab.sandbox.user.name, "shard"]
    lab.inject("folder-squatted", "n2")
    assert said(lab, "n2", look).split() == ["nobody", "theirs", "refused"], "who was first"
    lab.undo()
    assert said(lab, "n2", "ls -A /local/ssd") == ""


def test_a_job_goes_on_without_a_node_on_whose_store_another_user_squats(lab: Laboratory) -> None:
    lab.inject("folder-squatted", "n1")
    script = "DEEPLINK_STORE=/local/ssd/deeplink exec salloc -N3 -w n0,n1,n2 deeplink run --nproc-per-node 1"
    done = lab.sandbox.run(
        CTL, ["bash", "-c", f"{script} --spares 1 -- printenv SLURMD_NODENAME"], timeout_s=LIMIT_S
    )
    assert (done.code, sorted(done.stdout.split())) == (0, ["n0", "n2"]), done.stderr
    assert "belongs to user nobody" in done.stderr, "why, where people look"
    assert said(lab, "n1", "ls -A /local/ssd/deeplink") == "theirs"


def test_checkpoints_refuse_their_own_user_and_have_their_mode_back(lab: Laboratory) -> None:
    folder = lab.sandbox.home / "unreadable"
    state = folder / "step-0000000020.a1" / "state"
    said(lab, "n0", f"umask 027; mkdir -p {state.parent}; echo whole > {state}")
    lab.inject("checkpoints-unreadable", "unreadable")
    assert said(lab, "n1", f"ls {folder} || echo refused") == "refused"
    assert said(lab, "n1", f"cat {state} || echo refused") == "refused"
    assert cli(lab, "--undo", "checkpoints-unreadable", "unreadable").returncode == 0, "another one, by the record"
    assert said(lab, "n1", f"cat {state}; stat -c %a {folder}").split() == [
        "whole",
        "750",
    ]
    with pytest.raises(SandboxError, match="no checkpoint"):
        lab.inject("checkpoints-unreadable", "unreadable/step-0000000020.a1")


def test_a_drained_node_is_resumed_unless_it_was_drained_for_another_reason(lab: Laboratory) -> None:
    def is_in_service() -> bool:
        return lab.sandbox.states()["n3"].startswith("idle")

    lab.inject("node-drained", "n3")
    assert lab.sandbox.states()["n3"].startswith("drained")
    lab.undo("node-drained", "n3")
    until(is_in_service, LIMIT_S)
    lab.inject("node-drained", "n3")
    said(lab, CTL, "scontrol update nodename=n3 state=drain reason='bad memory'", root=True)
    lab.undo("node-drained", "n3")
    assert lab.sandbox.states()["n3"].startswith("drained"), "somebody else's since"
    lab.inject("node-drained", "n3")
    lab.undo("node-drained", "n3")
    assert "bad memory" in said(lab, CTL, "sinfo -h -n n3 -o %E"), "somebody else's before"
    said(lab, CTL, "scontrol update nodename=n3 state=resume", root=True)
    lab.inject("node-drained", "n3")
    lab.inject("controller-frozen")
    assert [wound.name for wound in lab.undo()] == ["controller-frozen", "node-drained"]
    until(is_in_service, LIMIT_S)


def test_shared_storage_stalls_whoever_writes_and_a_frozen_sandbox_can_be_taken_down(
    lab: Laboratory, fresh_sandbox: Callable[..., Sandbox]
) -> None:
    lab.inject("storage-frozen")
    writer = lab.sandbox.spawn("n2", ["sh", "-c", "echo late > late"])
    with pytest.raises(subprocess.TimeoutExpired):
        writer.wait(1.0)
    assert said(lab, "n3", "ls -d .") == "."
    lab.undo()
    assert writer.wait(LIMIT_S) == 0
    assert said(lab, "n3", "cat late") == "late"
    other = fresh_sandbox(Shape.of(1), Options(freezable=True))
    Laboratory(other).inject("storage-frozen")
    hung = other.spawn("n0", ["touch", "x"])
    other.down()
    hung.wait(LIMIT_S)
    assert not other.layout.folder.exists()
    with pytest.raises(SandboxError, match=r"nobody may freeze"):
        Laboratory(fresh_sandbox(Shape.of(1))).inject("storage-frozen")


def test_agents_fall_silent_and_machines_do_not(lab: Laboratory) -> None:
    address = f"{lab.sandbox.shape.address('n0')}:{PORT}"
    token = lab.sandbox.home / "agent.token"
    argv = ["deeplink", "node", "--bind", address, "--store", "/local/ssd/store", "--token-file", str(token)]
    agent = lab.sandbox.spawn("n0", argv, stdin=subprocess.PIPE)
    there = f"/dev/tcp/{lab.sandbox.shape.address('n0')}"
    ask = f"timeout 2 bash -c 'exec 3<>{there}/{PORT}' && echo hears || echo nothing"
    try:
        until(lambda: said(lab, "n1", ask) == "hears", LIMIT_S)
        lab.inject("agents-silent")
        assert said(lab, "n1", ask) == "nothing"
        until(lambda: lab.sandbox.states()["n0"] == "idle", LIMIT_S)  # slurmd on the same machine is heard
        lab.undo()
        assert said(lab, "n1", ask) == "hears"
    finally:
        agent.kill()
        agent.communicate(timeout=LIMIT_S)
    until(lambda: not _agents(lab), LIMIT_S)
    with pytest.raises(SandboxError, match="no node agent"):
        lab.inject("agents-silent")


def _agents(lab: Laboratory) -> tuple[int, ...]:
    from deeplink.scheduler.testbed.lab.scene import agents_on

    return agents_on(lab.sandbox, "n0")


def test_daemons_die_and_are_started_again(lab: Laboratory) -> None:
    lab.inject("slurmd-killed", "n2")
    lab.inject("controller-frozen")
    assert not lab.sandbox.states()
    lab.undo("controller-frozen")
    lab.inject("controller-down")
    daemons = {machine.name: machine.daemon for machine in lab.sandbox.status()}
    assert {name for name, daemon in daemons.items() if not daemon} == {CTL, "n2"}
    assert [wound.name for wound in lab.heal()] == ["controller-down", "slurmd-killed"]
    until(lambda: bool(lab.sandbox.states()), LIMIT_S)


def test_a_fast_reboot_is_another_boot_that_slurm_does_not_notice(lab: Laboratory) -> None:
    before = {node: said(lab, node, f"cat {BOOT_ID}") for node in ("n0", "n1")}
    assert len({*before.values(), Path(BOOT_ID).read_text().strip()}) == 3
    lab.inject("fast-reboot", "n1")
    assert said(lab, "n0", f"cat {BOOT_ID}") == before["n0"]
    assert said(lab, "n1", f"cat {BOOT_ID}") != before["n1"]
    assert lab.wounds() == ()
    until(lambda: "n1" in lab.sandbox.states(), LIMIT_S)
    assert "down" not in lab.sandbox.states()["n1"]


def test_a_killed_watchdog_comes_back_as_it_was(lab: Laboratory) -> None:
    from deeplink.scheduler.testbed.lab.scene import watchdogs_on

    log = lab.sandbox.home / "said"
    argv = ["deeplink", "watch", "--observe", "--journal", "watch.sqlite", "--token-file", "watch.token"]
    with log.open("ab") as out:
        process = lab.sandbox.spawn(CTL, argv, stdout=out, stderr=out)
    until(lambda: "watching: " in log.read_text(), LIMIT_S, log.read_text)
    # The oldest: between fork and exec a child of its own looks the same.
    (first, _), *_ = watchdogs_on(lab.sandbox, CTL)
    lab.inject("watchdog-killed")
    assert process.wait(LIMIT_S)
    assert not watchdogs_on(lab.sandbox, CTL)
    lab.undo()
    until(lambda: log.read_text().count("watching: ") == 2, LIMIT_S, log.read_text)
    (again, started), *_ = watchdogs_on(lab.sandbox, CTL)
    assert again != first
    assert started.uid == lab.sandbox.user.uid
    os.kill(again.pid, 15)
    until(lambda: not again.alive, LIMIT_S)


def test_the_command_does_lists_and_undoes(lab: Laboratory) -> None:
    done = cli(lab, "node-cut", "n3", "--for", "0.2", "--json")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)[0]["is"] for line in done.stdout.splitlines()] == ["done", "undone"]
    assert cli(lab, "leaf-cut", "leaf1").stdout == "leaf-cut leaf1: done\n"
    listed = {fault["name"]: fault["in_effect"] for fault in json.loads(cli(lab, "--list", "--json").stdout)}
    assert listed["leaf-cut"] == ["leaf1"]
    assert not lab.sandbox.links()["leaf1"]
    assert cli(lab, "--undo", "leaf-cut", "leaf1").stdout == "leaf-cut leaf1: undone\n"
    assert lab.sandbox.links()["leaf1"]
    assert cli(lab, "node-cut", "n9").returncode == 2
    assert cli(lab, "flood", "n1").returncode == 2
    assert cli(lab).returncode == 2


def test_no_fault_reaches_out_of_its_sandbox(lab: Laboratory, tmp_path: Path) -> None:
    torn = tmp_path / "step-0000000020.a1"
    torn.mkdir()
    (torn / "state").write_bytes(b"whole")
    (lab.sandbox.home / "out").symlink_to(tmp_path)
    for name, target in (
        *(("rank-exit", str(tmp_path)), ("rank-exit", "out"), ("checkpoint-torn", str(tmp_path))),
        *(("checkpoint-torn", "out"), ("rank-exit", "nowhere"), ("rank-exit", "../../..")),
    ):
        with pytest.raises(SandboxError, match="folder"):
            lab.inject(name, target)
    assert (torn / "state").read_bytes() == b"whole"
    assert sorted(tmp_path.iterdir()) == [torn]
    assert cli(lab, "--undo", "nod-cut").returncode == 2
    assert cli(lab, "--undo", "node-cut").stdout == "nothing of that is in effect\n"


def test_checkpoints_of_one_name_are_torn_and_mended_each(lab: Laboratory) -> None:
    files = [lab.sandbox.home / job / "step-0000000020.a1" / "state" for job in ("one", "two")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text(f"{file.parent.parent.name} is whole")
        lab.inject("checkpoint-torn", file.parent.parent.name)
    assert [file.read_text() for file in files] == ["one is", "two is"]
    lab.undo("checkpoint-torn")
    assert [file.read_text() for file in files] == ["one is whole", "two is whole"]


def test_two_commands_do_a_fault_once_and_one_that_was_killed_is_made_good(lab: Laboratory) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: lab.inject("node-cut", "n3"), range(4)))) == 1
    assert len(lab.wounds()) == 1
    lab.undo()
    # As whoever was killed between writing it down and doing it leaves it.
    laboratory.write(
        lab.sandbox.layout.faults,
        [Wound(name="node-cut", target="n3", unix=1.0, undo=(FaultStep(Verb.HEAL, "n3"),), done=False)],
    )
    assert lab.sandbox.links()["n3"]
    assert lab.inject("node-cut", "n3").done
    assert not lab.sandbox.links()["n3"]
    assert len(lab.wounds()) == 1


def test_nothing_is_written_to_frozen_storage_and_it_thaws_first(lab: Laboratory) -> None:
    (lab.sandbox.home / "run").mkdir()
    lab.inject("storage-frozen")
    with pytest.raises(SandboxError, match="frozen"):
        lab.inject("rank-exit", "run")
    lab.undo()
    lab.inject("rank-exit", "run")
    lab.inject("storage-frozen")
    with pytest.raises(SandboxError, match="frozen"):
        lab.undo("rank-exit")
    assert [wound.name for wound in lab.heal()] == ["storage-frozen", "rank-exit"]
    assert not (lab.sandbox.home / "run" / "fail").exists()


def test_without_machines_of_their_own_the_fault_says_so(fresh_sandbox: Callable[..., Sandbox]) -> None:
    cluster = fresh_sandbox(Shape.of(2), Options(loopback=True))
    with pytest.raises(SandboxError, match="share the host"):
        Laboratory(cluster).inject("node-cut", "n1")
    Laboratory(cluster).inject("slurmd-killed", "n1")
    Laboratory(cluster).heal()
    assert all(machine.daemon for machine in cluster.status())


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_is_played_and_judged(name: str) -> None:
    scenario = dataclasses.replace(BY_NAME[name], hold_s=SCENARIOS[name], settle_s=SETTLE_S)
    played = play(scenario, seed=1)
    trains_anew = played.facts.first_step is not None
    assert trains_anew == (scenario.after is After.AGAIN), played.facts.output
    assert played.figures.noticed
    assert not played.figures.broken
    assert not played.figures.missing
