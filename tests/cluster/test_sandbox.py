"""The sandbox itself, for real: up, broken in every way it offers, down, and nothing left of it."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deeplink.core.clock import SystemClock, wait_until
from deeplink.core.types import JobId
from deeplink.scheduler.slurm.client import Slurm
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Options, Sandbox
from deeplink.scheduler.testbed.errors import NotRunningError, NotUpError, SandboxError
from deeplink.scheduler.testbed.shape import CTL, Shape
from tests.cluster.conftest import PATIENT, Factory
from tests.cluster.jobs import submit
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.cluster]
TWO = Shape.of(2)


def eventually(holds: Callable[[], bool], timeout_s: float = LIMIT_S) -> None:
    assert wait_until(holds, SystemClock(), timeout_s)


def said(sandbox: Sandbox, machine: str, *argv: str, root: bool = False) -> str:
    done = sandbox.run(machine, argv, root=root)
    assert done.code == 0, done
    return done.stdout.strip()


def left_behind(name: str) -> list[str]:
    """Return all traces of a sandbox on the host: its folder, mounts, processes, named networks."""
    found = [str(path) for path in [Path("/var/lib/deeplink-sandbox", name)] if path.exists()]
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if name in line]
    found += [path.name for path in Path("/run/netns").glob("*") if name in path.name]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if name.encode() in words and state != "Z" and process.name != str(os.getpid()):
            found.append(words.decode(errors="replace")[:300])
    return found


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def test_jobs_run_on_all_nodes_as_an_ordinary_user_in_a_shared_home(sandbox: Sandbox) -> None:
    lines = said(sandbox, CTL, "srun", "-N8", "sh", "-c", "echo $(hostname) $(id -u) $PWD").splitlines()
    assert sorted(lines) == [f"{node} {sandbox.user.uid} {sandbox.home}" for node in sandbox.nodes]
    assert sandbox.user.uid != 0
    said(sandbox, "n3", "touch", "seen-everywhere")
    assert (sandbox.home / "seen-everywhere").exists()
    assert said(sandbox, "n6", "ls", "seen-everywhere")
    assert said(sandbox, "n0", "id", "-u", root=True) == "0"


def test_slurm_knows_the_switches_the_gpus_and_the_nodes(sandbox: Sandbox) -> None:
    slurm = Slurm(run=sandbox.runner())
    leaves = {switch.name: set(switch.nodes) for switch in slurm.topology() if switch.level == 0}
    assert leaves == {"leaf0": {"n0", "n2", "n4", "n6"}, "leaf1": {"n1", "n3", "n5", "n7"}}
    done = said(sandbox, CTL, "srun", "-N2", "--gres=gpu:2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert done.split() == ["0,1", "0,1"]


def test_each_nodes_ssd_is_its_own(sandbox: Sandbox) -> None:
    said(sandbox, CTL, "srun", "-N8", "sh", "-c", "echo $SLURMD_NODENAME > /local/ssd/who")
    for node in sandbox.nodes:
        assert said(sandbox, node, "cat", "/local/ssd/who") == node
        assert (sandbox.ssd(node) / "who").read_text().strip() == node
    assert said(sandbox, "n0", "ls", "-A", str(sandbox.layout.machines), root=True) == ""
    assert sandbox.run(CTL, ["ls", "/local/ssd/who"]).code != 0
    root = sandbox.layout.folder.parent
    assert said(sandbox, "n0", "ls", str(root)) == sandbox.name, "other sandboxes are not to be seen"


def test_a_node_has_its_own_processes_names_and_temporary_folders(sandbox: Sandbox) -> None:
    assert said(sandbox, "n4", "hostname") == "n4"
    assert "slurmctld" not in said(sandbox, "n4", "ps", "ax")
    assert "slurmd" not in said(sandbox, CTL, "ps", "ax").replace("slurmctld", "")
    for folder in ("/tmp", "/dev/shm"):
        said(sandbox, "n4", "touch", f"{folder}/{sandbox.name}")
        assert sandbox.run("n5", ["ls", f"{folder}/{sandbox.name}"]).code != 0
        assert not Path(folder, sandbox.name).exists()
    assert said(sandbox, "n4", "ls", "/sys/class/net").split() == ["eth0", "lo"]


def test_deeplink_and_python_are_there_though_root_is_closed(sandbox: Sandbox) -> None:
    assert said(sandbox, "n0", "deeplink", "--version").startswith("deeplink")
    prefix = said(sandbox, "n1", "python", "-c", "import sys, deeplink; print(sys.prefix)")
    assert prefix == sys.prefix
    assert sandbox.run("n0", ["touch", "/root/x"], root=True).code != 0, "what is exposed is read-only"


def test_exit_code_input_and_output_are_the_commands_own(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "mine")
    done = sandbox.run("n2", ["sh", "-c", "cat; echo oops >&2; exit 7"], stdin="in\n")
    assert (done.code, done.stdout, done.stderr) == (7, "in\n", "oops\n")
    assert "SECRET" not in said(sandbox, "n2", "env")
    assert sandbox.run("n2", ["env"], env={"EXTRA": "a b"}).stdout.count("EXTRA=a b\n") == 1
    with pytest.raises(Exception, match="n9"):
        sandbox.run("n9", ["true"])


def test_a_spawned_command_ends_with_its_handle(sandbox: Sandbox) -> None:
    process = sandbox.spawn("n2", ["sleep", "1234"])
    eventually(lambda: "sleep 1234" in said(sandbox, "n2", "ps", "ax"))
    process.kill()
    process.wait(LIMIT_S)
    eventually(lambda: "sleep 1234" not in said(sandbox, "n2", "ps", "ax"))


def connects(sandbox: Sandbox, here: str, there: str) -> bool:
    probe = f"import socket; socket.create_connection(('{there}', 6818), 1)"
    return sandbox.run(here, ["python3", "-S", "-c", probe]).code == 0


def test_a_leaf_that_is_cut_off_keeps_its_nodes_together_and_apart_from_all_others(sandbox: Sandbox) -> None:
    sandbox.cut("leaf1")
    try:
        assert not sandbox.links()["leaf1"]
        assert connects(sandbox, "n1", "n3")
        assert connects(sandbox, "n0", "n2")
        assert not connects(sandbox, "n0", "n1")
    finally:
        sandbox.heal("leaf1")
    eventually(lambda: connects(sandbox, "n0", "n1"))


def test_a_node_that_is_cut_off_still_runs(sandbox: Sandbox) -> None:
    sandbox.cut("n7")
    try:
        assert not connects(sandbox, "n0", "n7")
        assert said(sandbox, "n7", "hostname") == "n7"
        [seen] = [machine for machine in sandbox.status() if machine.name == "n7"]
        assert seen.link is False
        assert seen.daemon is not None
    finally:
        sandbox.heal("n7")
    eventually(lambda: connects(sandbox, "n0", "n7"))


# Reports, once it is asked, what it sees of a connection that was open when the node died, then ends.
PEER = """
import socket, sys
listener = socket.create_server(("", 5000))
print("listening", flush=True)
peer, _ = listener.accept()
peer.recv(1)
print("connected", flush=True)
sys.stdin.readline()
peer.settimeout(3)
try:
    print("closed" if not peer.recv(1) else "data", flush=True)
except TimeoutError:
    print("silence", flush=True)
except ConnectionError:
    print("closed", flush=True)
"""
DIALER = """
import socket, time
peer = socket.create_connection(("n0", 5000), 5)
peer.send(b"x")
time.sleep(600)
"""


@pytest.mark.parametrize(("keep_link", "seen"), [(False, "silence"), (True, "closed")])
def test_a_power_loss_is_silence_to_peers_and_a_mere_crash_is_not(
    fresh_sandbox: Factory, keep_link: bool, seen: str
) -> None:
    cluster = fresh_sandbox(TWO)
    listener = cluster.spawn("n0", ["python3", "-u", "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert listener.stdin is not None
    assert listener.stdout is not None
    assert listener.stdout.readline() == b"listening\n"
    dialer = cluster.spawn("n1", ["python3", "-c", DIALER])
    assert listener.stdout.readline() == b"connected\n"
    cluster.crash("n1", keep_link=keep_link)
    listener.stdin.write(b"what of it?\n")
    listener.stdin.close()
    assert listener.stdout.readline().decode().strip() == seen
    listener.wait(LIMIT_S)
    listener.stdout.close()
    dialer.wait(LIMIT_S)


def test_a_crashed_node_is_off_until_it_boots_and_keeps_its_disk(fresh_sandbox: Factory) -> None:
    cluster = fresh_sandbox(TWO)
    said(cluster, "n1", "sh", "-c", "echo kept > /local/ssd/f; echo lost > /dev/shm/f")
    job = said(cluster, CTL, "sbatch", "--parsable", "-w", "n1", "--wrap", "sleep 1000")
    eventually(lambda: "sleep 1000" in said(cluster, "n1", "ps", "ax"))
    cluster.crash("n1")
    with pytest.raises(NotRunningError):
        cluster.run("n1", ["true"])
    with pytest.raises(NotRunningError):
        cluster.crash("n1")
    [off] = [machine for machine in cluster.status() if machine.name == "n1"]
    assert (off.process_1, off.daemon, off.link) == (None, None, False)
    cluster.boot("n1")
    assert said(cluster, "n1", "sh", "-c", "cat /local/ssd/f; ls /dev/shm") == "kept"
    assert "sleep 1000" not in said(cluster, "n1", "ps", "ax")
    said(cluster, CTL, "scancel", job)
    eventually(lambda: cluster.states().get("n1") == "idle")
    assert said(cluster, CTL, "srun", "-w", "n1", "hostname") == "n1"


def test_a_node_off_for_long_is_down_for_slurm_and_returns_after_its_boot(fresh_sandbox: Factory) -> None:
    cluster = fresh_sandbox(TWO, Options(slurmd_timeout=3))
    cluster.crash("n0")
    eventually(lambda: cluster.states().get("n0", "").startswith("down"))
    cluster.boot("n0")
    eventually(lambda: cluster.states().get("n0") == "idle")


def test_boot_starts_a_dead_daemon_and_leaves_the_machine(fresh_sandbox: Factory) -> None:
    cluster = fresh_sandbox(TWO)
    said(cluster, "n0", "pkill", "-9", "slurmd", root=True)
    running = cluster.spawn("n0", ["sleep", "600"])
    eventually(lambda: {machine.name: machine.daemon for machine in cluster.status()}["n0"] is None)
    cluster.boot("n0")
    assert {machine.name: machine.daemon for machine in cluster.status()}["n0"] is not None
    assert running.poll() is None
    running.kill()
    running.wait(LIMIT_S)


def test_the_control_host_can_crash_and_boot_too(fresh_sandbox: Factory) -> None:
    cluster = fresh_sandbox(TWO)
    cluster.crash(CTL)
    assert cluster.states() == {}
    cluster.boot(CTL)
    eventually(lambda: set(cluster.states().values()) == {"idle"})


def test_sandboxes_stand_side_by_side_and_leave_nothing(fresh_sandbox: Factory) -> None:
    before = interfaces(), Path("/local").exists(), Path("/var/lib/deeplink-sandbox").exists()
    first, second = fresh_sandbox(TWO), fresh_sandbox(TWO)
    assert sorted(said(first, CTL, "srun", "-N2", "hostname").split()) == ["n0", "n1"]
    assert sorted(said(second, CTL, "srun", "-N2", "hostname").split()) == ["n0", "n1"]
    assert interfaces() == before[0]
    with pytest.raises(SandboxError, match=r"is up already"):
        Sandbox.up(first.name, TWO)
    first.down()
    first.down()
    assert said(second, CTL, "srun", "-N1", "hostname")
    second.down()
    for name in (first.name, second.name):
        assert left_behind(name) == []
        with pytest.raises(NotUpError):
            Sandbox.open(name)
    assert (interfaces(), Path("/local").exists(), Path("/var/lib/deeplink-sandbox").exists()) == before


@pytest.mark.parametrize("pieces", ["keeper", "everything", "half a folder"])
def test_after_an_unclean_end_it_comes_up_again(fresh_sandbox: Factory, pieces: str) -> None:
    cluster = fresh_sandbox(TWO)
    keeper = cluster.record.keeper
    assert keeper is not None
    if pieces == "everything":
        subprocess.run(["pkill", "-9", "-f", cluster.layout.folder], check=False)
    else:
        keeper.send(signal.SIGKILL)
    # A process that is ending has no command line any more, and is still there for a moment.
    eventually(lambda: not keeper.alive)
    eventually(lambda: not [line for line in left_behind(cluster.name) if not line.startswith("/var")])
    if pieces == "half a folder":
        cluster.layout.record.unlink()
        cluster.layout.slurm_conf.unlink()
    with pytest.raises(NotUpError):
        Sandbox.open(cluster.name)
    again = Sandbox.up(cluster.name, TWO, PATIENT)
    assert said(again, CTL, "srun", "-N2", "hostname")


def deeplink(*argv: str) -> list[str]:
    return [sys.executable, "-m", "deeplink", "sandbox", *argv]


@pytest.mark.parametrize("options", [Options(), Options(loopback=True)], ids=["namespaces", "loopback"])
def test_what_another_version_left_is_refused_but_taken_down(fresh_sandbox: Factory, options: Options) -> None:
    cluster = fresh_sandbox(TWO, options)
    cluster.layout.record.write_text('{"version": 0}')
    for argv in (("status",), ("up", "--nodes", "2")):
        done = subprocess.run(
            deeplink(*argv, "--name", cluster.name), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 1
        assert f"deeplink sandbox down --name {cluster.name}" in done.stderr
        assert "Traceback" not in done.stderr
    assert any(line.startswith("remove ") for line in Sandbox.remains(cluster.name))
    assert Sandbox.clear(cluster.name)
    assert left_behind(cluster.name) == []


@pytest.fixture
def name() -> Iterator[str]:
    chosen = f"k-{os.getpid()}-{secrets.token_hex(3)}"
    yield chosen
    Sandbox.clear(chosen)


def test_a_host_that_has_no_names_of_its_own_is_host_enough(name: str, tmp_path: Path) -> None:
    steps = [
        f"cp -a /etc {tmp_path}/etc",
        *(f"rm -f {tmp_path}/etc/{file}" for file in ("hosts", "nsswitch.conf", "protocols", "services")),
        f"mount --bind {tmp_path}/etc /etc",
        shlex.join(deeplink("up", "--name", name, "--nodes", "2")),
        shlex.join(deeplink("exec", "--name", name, "n0", "--", "getent", "ahostsv4", "n1")),
        "test ! -e /etc/hosts",
        shlex.join(deeplink("down", "--name", name)),
    ]
    argv = ["unshare", "--mount", "sh", "-c", " && ".join(steps)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=3 * LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^10[.]\S+ +STREAM n1$", done.stdout, re.MULTILINE), done.stdout
    assert left_behind(name) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_up_that_is_broken_off_leaves_no_process(name: str, number: signal.Signals) -> None:
    folder = Path("/var/lib/deeplink-sandbox", name)
    # A node of which there is no machine never becomes idle: `up` waits.
    argv = deeplink("up", "--name", name, "--nodes", "2", "--extra", "NodeName=x CPUs=1", "--wait", "60")
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as process:
        eventually(lambda: (folder / "machines" / "n1" / "booted").exists() or process.poll() is not None)
        assert process.poll() is None
        process.send_signal(number)
        process.wait(LIMIT_S)
    eventually(lambda: not [line for line in left_behind(name) if not line.startswith("/var")])
    if number == signal.SIGINT:
        assert not folder.exists()
    assert Sandbox.clear(name) == (number != signal.SIGINT)
    assert left_behind(name) == []


def test_two_that_bring_up_the_same_one_at_once_do_not_collide(name: str) -> None:
    argv = deeplink("up", "--name", name, "--nodes", "1")
    ups = [subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    complaints = [process.communicate(timeout=LIMIT_S)[1] for process in ups]
    assert sorted(process.returncode for process in ups) == [0, 1]
    assert any("is up already" in text for text in complaints)
    assert said(Sandbox.open(name), CTL, "srun", "-N1", "hostname") == "n0"


def test_a_closed_folder_can_be_exposed_wherever_it_lies(fresh_sandbox: Factory, tmp_path: Path) -> None:
    data = tmp_path / "closed" / "data"
    data.mkdir(parents=True)
    (data / "sample").write_text("bytes")
    (tmp_path / "closed").chmod(0o700)
    top = Path("/srv", f"t-{secrets.token_hex(4)}")
    top.mkdir(mode=0o700)
    try:
        (top / "sample").write_text("more")
        cluster = fresh_sandbox(TWO, Options(expose=(data, top)))
        for node in ("n0", "n1", CTL):
            assert said(cluster, node, "cat", str(data / "sample"), str(top / "sample")) == "bytesmore"
        assert cluster.run("n0", ["touch", str(data / "x")], root=True).code != 0
        cluster.crash("n0")
        cluster.boot("n0")
        assert said(cluster, "n0", "cat", str(data / "sample")) == "bytes"
    finally:
        (top / "sample").unlink()
        top.rmdir()
    with pytest.raises(SandboxError, match=r"cannot expose"):
        fresh_sandbox(TWO, Options(expose=(top,)))


def test_a_dry_run_shows_the_steps_of_every_machine_and_does_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPLINK_SANDBOX_ROOT", "/var/lib/boxes")
    done = subprocess.run(deeplink("up", "--nodes", "2", "--dry-run"), capture_output=True, text=True, check=True)
    for machine in ("fabric", CTL, "n0", "n1"):
        assert f"# ---- /var/lib/boxes/default/boot/{machine}\n" in done.stdout
    assert "mount --bind /var/lib/boxes/default/self/ssd /local/ssd" in done.stdout
    assert not Path("/var/lib/boxes").exists()


def test_a_sandbox_with_machines_cannot_lie_where_each_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPLINK_SANDBOX_ROOT", "/tmp/boxes")
    with pytest.raises(SandboxError, match="every machine has its own"):
        Sandbox.up("box", TWO)
    assert not Path("/tmp/boxes").exists()


def test_a_careful_users_file_mode_mask_does_not_lock_the_sandboxs_user_out(name: str) -> None:
    before = os.umask(0o077)
    try:
        cluster = Sandbox.up(name, TWO, PATIENT)
    finally:
        os.umask(before)
    assert sorted(said(cluster, CTL, "srun", "-N2", "hostname").split()) == ["n0", "n1"]


def test_jobs_can_run_as_a_user_of_the_host(fresh_sandbox: Factory) -> None:
    cluster = fresh_sandbox(TWO, Options(user="nobody"))
    assert set(said(cluster, CTL, "srun", "-N2", "id", "-un").split()) == {"nobody"}


def test_status_tells_all_this_as_json(sandbox: Sandbox) -> None:
    done = subprocess.run(deeplink("status", "--name", sandbox.name, "--json"), capture_output=True, check=True)
    facts = json.loads(done.stdout)
    assert [machine["name"] for machine in facts["machines"]] == [CTL, *sandbox.nodes]
    assert all(machine["process_1"] and machine["daemon"] and machine["link"] for machine in facts["machines"])


# ---- without root: run by the sandbox's ordinary user on its login host


@pytest.fixture
def without_root(fresh_sandbox: Factory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a way to run `deeplink sandbox` as an ordinary user, who has no rights at all."""
    login = fresh_sandbox(Shape.of(1))

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        env = {"DEEPLINK_SANDBOX_ROOT": "/tmp/boxes"}
        done = login.run(CTL, ["deeplink", "sandbox", *argv], env=env)
        return subprocess.CompletedProcess(argv, done.code, done.stdout, done.stderr)

    return run


Deeplink = Callable[..., subprocess.CompletedProcess[str]]


def test_an_ordinary_user_gets_a_cluster_on_loopback_and_is_told_what_it_lacks(without_root: Deeplink) -> None:
    up = without_root("up", "--nodes", "4")
    assert up.returncode == 0, up.stderr
    assert "no link can" in up.stdout
    srun = without_root("exec", CTL, "srun", "-N4", "--gres=gpu:1", "sh", "-c", "echo $SLURMD_NODENAME $(id -u)")
    assert sorted(srun.stdout.split()) == sorted(["n0", "n1", "n2", "n3"] + ["64100"] * 4)
    for verb in ("cut", "heal"):
        refused = without_root(verb, "n1")
        assert refused.returncode == 2
        assert "as root" in refused.stderr
    assert without_root("exec", "--root", "n1", "id").returncode == 2
    assert without_root("up", "--user", "root", "--name", "other").returncode == 2
    freezable = without_root("up", "--freezable", "--name", "other")
    assert (freezable.returncode, "only root" in freezable.stderr) == (2, True)
    for fault in ("node-cut", "storage-frozen", "disk-full"):
        refused = without_root("fault", fault)
        assert (refused.returncode, "as root" in refused.stderr) == (2, True), fault
    assert without_root("exec", "n2", "printenv", "SLURMD_NODENAME").stdout == "n2\n"
    assert without_root("exec", "n2", "--", "printenv", "SLURMD_NODENAME").stdout == "n2\n"


def test_a_crash_on_loopback_ends_the_nodes_daemon_and_its_jobs_alone(without_root: Deeplink) -> None:
    without_root("up", "--nodes", "2")
    without_root("exec", CTL, "sbatch", "-N2", "-o", "j.log", "--wrap", "srun sleep 777")
    count = ["exec", CTL, "pgrep", "-fc", "^/usr/bin/sleep 777|^sleep 777"]
    eventually(lambda: without_root(*count).stdout == "2\n")
    assert without_root("crash", "n1").returncode == 0
    assert without_root(*count).stdout == "1\n"
    assert without_root("exec", "n1", "true").returncode == 1
    assert without_root("boot", "n1").returncode == 0
    assert without_root("down").returncode == 0
    left = without_root("exec", CTL, "true")
    assert "no sandbox" in left.stderr


def test_a_crash_on_loopback_ends_what_was_brought_there_and_no_job_elsewhere(fresh_sandbox: Factory) -> None:
    cluster = fresh_sandbox(TWO, Options(loopback=True))
    with cluster.spawn("n1", ["sleep", "77"]) as there, cluster.spawn(CTL, ["sleep", "77"]) as elsewhere:
        # Submitted from the node that dies: the job has the variables of what was brought there.
        done = cluster.run("n1", ["sbatch", "--parsable", "-wn0", "--output=/dev/null", "--wrap", "sleep 77"])
        job = int(done.stdout)
        eventually(lambda: Slurm(cluster.runner()).job(JobId(job)).state is JobState.RUNNING)
        cluster.crash("n1")
        assert there.wait(LIMIT_S) == -signal.SIGKILL
        assert elsewhere.poll() is None
        assert Slurm(cluster.runner()).job(JobId(job)).state is JobState.RUNNING
        elsewhere.kill()


def test_a_node_that_dies_on_loopback_is_lost_as_one_whose_link_is_cut(fresh_sandbox: Factory) -> None:
    cluster = fresh_sandbox(Shape.of(3), Options(loopback=True))
    job = submit(cluster, "-N3 --no-kill", "exec deeplink run --nproc-per-node 1 --spares 1 -- {train} 9999")
    job.await_event("first-step")
    victim = job.events("attempt-started")[0]["nodes"][-1]
    cluster.crash(victim)
    assert job.await_event("node-silent")["nodes"] == [victim]
    # Its ports refuse, where those of a dead machine do not answer: no reason to try again and again for an agent.
    assert len(job.events("agents-again")) <= 2
    assert victim not in job.await_event("attempt-started", count=2)["nodes"]


def test_a_cluster_on_loopback_leaves_nothing(fresh_sandbox: Factory) -> None:
    login = fresh_sandbox(Shape.of(1))
    before = len(said(login, CTL, "ps", "ax").splitlines())
    files = said(login, CTL, "ls", "-A", "/tmp")  # what is exposed there, where this checkout lies in /tmp
    for verb in ("up", "down"):
        elsewhere = {"DEEPLINK_SANDBOX_ROOT": "/etc"}
        refused = login.run(CTL, ["deeplink", "sandbox", verb], env=elsewhere)
        assert (refused.code, "cannot be written to" in refused.stderr) == (2, True)
    env = {"DEEPLINK_SANDBOX_ROOT": "/tmp/boxes"}
    for _ in range(2):
        up = login.run(CTL, ["deeplink", "sandbox", "up", "--nodes", "2"], env=env)
        assert up.code == 0, up.stderr
        assert login.run(CTL, ["deeplink", "sandbox", "down"], env=env).code == 0
        eventually(lambda: len(said(login, CTL, "ps", "ax").splitlines()) == before)
        assert said(login, CTL, "ls", "-A", "/tmp") == files
    up = login.run(CTL, ["deeplink", "sandbox", "up", "--nodes", "2"], env=env)
    said(login, CTL, "pkill", "-9", "-f", "testbed.loopback")
    again = login.run(CTL, ["deeplink", "sandbox", "up", "--nodes", "2"], env=env)
    assert again.code == 0, again.stderr
    assert login.run(CTL, ["deeplink", "sandbox", "down"], env=env).code == 0
    eventually(lambda: len(said(login, CTL, "ps", "ax").splitlines()) == before)


def test_root_can_have_a_cluster_on_loopback_too(fresh_sandbox: Factory) -> None:
    cluster = fresh_sandbox(TWO, Options(loopback=True))
    assert set(said(cluster, CTL, "srun", "-N2", "id", "-u").split()) == {"0"}
    cluster.down()
    assert left_behind(cluster.name) == []
