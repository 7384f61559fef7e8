"""`deeplink sbatch` around programs that stand for Slurm's: what they are given, and what comes back."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health, health_pb2
from prometheus_client import CollectorRegistry

from deeplink.core.clock import ManualClock
from deeplink.core.metrics import WatchMetrics
from deeplink.scheduler.jobs.job_view import me
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.liveness.heartbeats import HeartbeatTable
from deeplink.scheduler.liveness.watchdog_client import BINDINGS, bindings_of
from deeplink.scheduler.placement.model import Constants, LinkSpeed, constants_text
from deeplink.scheduler.testbed.processes import ProcessId
from deeplink.scheduler.watch.server import WatchServicer, watch_server
from tests.processes import PATIENT_SBATCH
from tests.scheduler.watch.callers import authorizer
from tests.waiting import LIMIT_S

# With --test-only it says when and where: on the nodes of `plain`, or with nodes named when `hinted` says so.
FAKE = f"""#!{sys.executable}
import json, os, sys
argv = sys.argv[1:]
here = os.environ["TOLD"]
def said(name):
    return open(f"{{here}}.{{name}}").read().strip() if os.path.exists(f"{{here}}.{{name}}") else ""
if "--test-only" in argv and said("plain"):
    named = any(word.startswith("--nodelist") for word in argv)
    start, nodes = said("wished" if named else "plain").split()
    sys.exit(f"sbatch: Job 5 to start at {{start}} using 8 processors on nodes {{nodes}} in partition main")
facts = {{"argv": argv, "stdin": sys.stdin.read(), "env": dict(os.environ)}}
open(f"{{here}}.calls", "a").write("called\\n")
open(here, "w").write(json.dumps(facts))
print(os.environ.get("SAYS", "Submitted batch job 12"))
sys.exit(3)
"""
HINTED = ["--nodelist=n0,n1,n2,n3", "--comment=deeplink-wish=n[0-3]"]
ADDED = ["--requeue", "--open-mode=append"]
SOON, LATER = "2030-01-01T00:00:00", "2030-01-01T02:00:00"


def program(env: dict[str, str], name: str, text: str) -> None:
    path = Path(env["TOLD"]).parent / "bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Programs of a Slurm that does not answer: its controller is down."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(FAKE)
    (folder / "sbatch").chmod(0o755)
    own = {
        "DEEPLINK_PLAN": "off",
        "TOLD": str(tmp_path / "told"),
        "HOME": str(tmp_path),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    found = {**os.environ, **own}
    for name in ("sinfo", "scontrol"):
        program(found, name, f"echo $* >>{tmp_path}/{name}; echo 'Unable to contact slurm controller' >&2; exit 1")
    return found


@pytest.fixture
def cluster(env: dict[str, str], tmp_path: Path, watchdog: Watchdog) -> dict[str, str]:
    """Eight idle nodes on two leaves, of which Slurm would take those of the second."""
    lines = "".join(
        f"n{number}|main*|up|infinite|NO|idle|fast|gpu:2|gpu:0|0/4/0/4|4000|0|\n" for number in range(8)
    )
    (tmp_path / "nodes").write_text(lines)
    program(env, "sinfo", f"cat {tmp_path}/nodes")
    switches = "SwitchName=l0 Level=0 Nodes=n[0-3]\nSwitchName=l1 Level=0 Nodes=n[4-7]\n"
    (tmp_path / "switches").write_text(f"{switches}SwitchName=s Level=1 Nodes=n[0-7] Switches=l[0-1]\n")
    program(env, "scontrol", f"cat {tmp_path}/switches")
    foresees(env, plain=(SOON, "n[4-7]"), wished=(SOON, "n[0-3]"))
    waiting(env)
    return {**env, "DEEPLINK_WATCH": watchdog.address}


def waiting(env: dict[str, str], *rows: str) -> None:
    """Have these jobs wait: `9|Priority|n[0-3]` with its reason and the nodes that it requires."""
    lines = []
    for row in rows:
        job, reason, required = row.split("|")
        lines.append(f"{job}|{job}|PENDING|{reason}|me|main|4|5|{required}||(null)|(null)|(null)|")
    listed = Path(env["TOLD"]).parent / "waiting"
    listed.write_text("\n".join([*lines, ""]))
    separator = "for word; do last=$word; done; separator=${last#%A}; separator=${separator%%\\%*}"
    program(env, "squeue", f'{separator}; sed "s/|/$separator/g" {listed}')


@dataclass
class Watchdog:
    address: str
    health: health.HealthServicer

    def agrees(self, *, well: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if well else health_pb2.HealthCheckResponse.NOT_SERVING
        self.health.set(BINDINGS, status)


@pytest.fixture
def watchdog(tmp_path: Path) -> Iterator[Watchdog]:
    """A watchdog that agreed to look after nodes hinted by name."""
    with serving(tmp_path / "watch.sqlite") as found:
        found.agrees(well=True)
        yield found


@contextmanager
def serving(path: Path) -> Iterator[Watchdog]:
    clock = ManualClock()
    with Journal(path) as journal:
        metrics = WatchMetrics(CollectorRegistry())
        servicer = WatchServicer(journal, HeartbeatTable(), clock, metrics, authorizer(journal, clock))
        bound = watch_server("127.0.0.1:0", servicer)
        bound.server.start()
        yield Watchdog(f"127.0.0.1:{bound.port}", bound.health)
        bound.server.stop(0).wait(LIMIT_S)


def foresees(env: dict[str, str], **said: tuple[str, str]) -> None:
    for name, words in said.items():
        Path(f"{env['TOLD']}.{name}").write_text(" ".join(words))


def sbatch(env: dict[str, str], *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    argv = [*PATIENT_SBATCH, *words]
    return subprocess.run(argv, env=env, input=stdin, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def received(env: dict[str, str]) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(Path(env["TOLD"]).read_text())
    return facts


def record(env: dict[str, str], job: int = 12) -> list[dict[str, Any]]:
    path = Path(env["HOME"], ".local/state/deeplink/jobs", str(job), "decisions.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def held(env: dict[str, str], sizes: dict[str, int], total: int) -> None:
    folder = Path(env["HOME"], ".local/share/deeplink/catalog/images")
    folder.mkdir(parents=True)
    (folder / "latest").write_text("ab\n")
    nodes = {node: {"bytes": size, "unix": 4e9} for node, size in sizes.items()}
    said = {"format": 1, "total": total, "nodes": nodes}
    (folder / "ab.held").write_text(json.dumps(said))


def test_what_sbatch_says_and_its_exit_code_come_back(env: dict[str, str]) -> None:
    done = sbatch(env, "-N2", "job.sh", "a b", "--help")
    assert (done.returncode, done.stdout, done.stderr) == (3, "Submitted batch job 12\n", "")
    assert received(env)["argv"] == [*ADDED, "-N2", "job.sh", "a b", "--help"]
    assert record(env)[0]["decision"]["why"] == "unknown"


def test_the_scripts_directives_are_read(env: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --no-requeue\n#DEEPLINK --spares 1\n")
    sbatch(env, "-N2", str(script))
    assert received(env)["argv"] == ["--no-kill", "--open-mode=append", "-N2", str(script)]
    assert received(env)["env"]["DEEPLINK_SPARES"] == "1"


def test_a_script_without_a_shebang_is_for_sbatch_to_judge(env: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_bytes(b"\xff\xfe no script at all\n")
    sbatch(env, str(script))
    assert received(env)["argv"] == [*ADDED, str(script)]


def test_a_script_on_standard_input_arrives_whole(cluster: dict[str, str]) -> None:
    script = "#!/bin/bash\n#SBATCH --open-mode=truncate\necho ünï $HOME\n" + "# much\n" * 20_000
    sbatch(cluster, "-N4", stdin=script)
    assert received(cluster)["stdin"] == script
    assert received(cluster)["argv"] == ["--requeue", "-N4"]


def test_the_stand_ins_are_made_and_put_in_front(env: dict[str, str], tmp_path: Path) -> None:
    sbatch(env, "--deeplink-shim", "--deeplink-spares", "1", "-N2", "job.sh")
    folder = tmp_path / ".local/state/deeplink/shim"
    found = received(env)["env"]
    assert found["PATH"].split(":")[0] == str(folder)
    assert (found["DEEPLINK_SHIM"], found["DEEPLINK_SPARES"]) == (str(folder), "1")
    assert os.access(folder / "srun", os.X_OK)


@pytest.mark.parametrize("option", ["--dry-run", "--deeplink-dry-run"])
def test_a_dry_run_prints_the_command_and_does_nothing(env: dict[str, str], tmp_path: Path, option: str) -> None:
    done = sbatch(env, option, "--deeplink-shim", "-N2", "job.sh", "a b")
    assert done.returncode == 0
    first = done.stdout.splitlines()[0]
    assert first.endswith("sbatch --requeue --no-kill --open-mode=append -N2 job.sh 'a b'")
    assert first.startswith("DEEPLINK_SHIM=")
    assert "the cluster's state is not known: sinfo exited 1: Unable to contact" in done.stdout
    assert not Path(env["TOLD"]).exists()
    assert not (tmp_path / ".local").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--deeplink-spares=many"],
        ["-N2", "--deeplink-spares=2"],
        ["--deeplink-place=off", "--deeplink-data=x"],
        ["--deeplink-place=off", "--deeplink-profile=x"],
        ["--deeplink-profile="],
        ["--deeplink-patience=soon"],
        ["--deeplink-json"],
    ],
)
def test_wrong_options_of_ours_submit_nothing(env: dict[str, str], words: list[str]) -> None:
    done = sbatch(env, *words, "job.sh")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 2
    assert not Path(env["TOLD"]).exists()


def test_no_sbatch_at_all(env: dict[str, str], tmp_path: Path) -> None:
    done = sbatch({**env, "PATH": str(tmp_path)}, "job.sh")
    assert done.returncode == 127
    assert "sandbox" in done.stderr


def test_slurms_choice_is_left_alone_where_it_is_as_good(cluster: dict[str, str]) -> None:
    done = sbatch(cluster, "-N4", "--exclusive", "job.sh")
    assert (done.returncode, done.stdout, done.stderr) == (3, "Submitted batch job 12\n", "")
    assert received(cluster)["argv"] == [*ADDED, "-N4", "--exclusive", "job.sh"]
    (line,) = record(cluster)
    assert (line["decision"]["why"], line["decision"]["expected"]) == ("as good", ["n4", "n5", "n6", "n7"])
    assert line["done"] == ["sbatch", *received(cluster)["argv"]]


def test_nodes_that_hold_the_data_are_hinted_by_name(cluster: dict[str, str]) -> None:
    held(cluster, {"n0": 40, "n1": 30, "n2": 30, "n3": 5}, 100)
    done = sbatch(cluster, "-N4", "--exclusive", "--deeplink-data=images", "job.sh")
    assert done.stderr == ""
    assert received(cluster)["argv"] == [*HINTED, *ADDED, "-N4", "--exclusive", "job.sh"]
    decision = record(cluster)[0]["decision"]
    assert (decision["kind"], decision["candidates"][0]["percent_local"]) == ("nodes", 100.0)
    assert "n4, n5, n6, n7" in decision["words"]


def test_a_hint_with_which_the_job_would_start_later_is_dropped(cluster: dict[str, str]) -> None:
    held(cluster, {"n0": 100}, 100)
    foresees(cluster, wished=(LATER, "n[0-3]"))
    sbatch(cluster, "-N4", "--exclusive", "--deeplink-data=images", "job.sh")
    assert received(cluster)["argv"] == [*ADDED, "-N4", "--exclusive", "job.sh"]
    assert record(cluster)[0]["decision"]["why"] == "later with it"


def near_its_data(cluster: dict[str, str], *words: str) -> tuple[dict[str, Any], str]:
    """Submit a job whose data lies where Slurm would not put it; return the decision and the nodes named."""
    if not Path(cluster["HOME"], ".local/share").exists():
        held(cluster, {"n0": 40, "n1": 30, "n2": 30, "n3": 5}, 100)
    sbatch(cluster, "-N4", "--exclusive", "--deeplink-data=images", *words, "job.sh")
    named = [word for word in received(cluster)["argv"] if word.startswith("--nodelist=")]
    return record(cluster)[-1]["decision"], "".join(named)


def test_nodes_named_for_a_job_that_waits_are_left_to_it_and_free_once_it_is_gone(cluster: dict[str, str]) -> None:
    waiting(cluster, "9||n[0-3]")
    decision, named = near_its_data(cluster)
    assert (decision["kind"], named) == ("nothing", "")
    waiting(cluster)
    assert near_its_data(cluster)[1] == "--nodelist=n0,n1,n2,n3"


def test_behind_a_job_that_may_be_given_any_of_the_free_nodes_none_are_named(cluster: dict[str, str]) -> None:
    waiting(cluster, "9||")
    assert near_its_data(cluster)[0]["why"] == "starts later"
    waiting(cluster, "9|Dependency|")
    assert near_its_data(cluster)[1]


def test_no_nodes_are_named_where_no_watchdog_looks_after_them(
    cluster: dict[str, str], watchdog: Watchdog
) -> None:
    watchdog.agrees(well=False)
    assert near_its_data(cluster)[0]["why"] == "not looked after"
    Path(cluster["HOME"], ".local/state/deeplink/wishes/agreed.json").unlink()
    watchdog.agrees(well=True)
    assert near_its_data(cluster)[1]
    alone = {**cluster, "DEEPLINK_WATCH": ""}
    assert near_its_data(alone) == (record(alone)[-1]["decision"], "")


def test_a_watchdog_of_the_user_alone_does_not_count_on_the_loopback(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    with serving(tmp_path / "own.sqlite") as own:
        own.health.set(bindings_of(me()), health_pb2.HealthCheckResponse.SERVING)
        port = own.address.rpartition(":")[2]
        for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]"):
            decision, named = near_its_data({**cluster, "DEEPLINK_WATCH": f"{host}:{port}"})
            assert (decision["why"], named) == ("not looked after", ""), host


def test_what_a_watchdog_said_on_another_host_is_asked_for_again(
    cluster: dict[str, str], watchdog: Watchdog
) -> None:
    assert near_its_data(cluster)[1]
    kept = Path(cluster["HOME"], ".local/state/deeplink/wishes/agreed.json")
    watchdog.agrees(well=False)
    assert near_its_data(cluster)[1], "kept for a minute"
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "host": "login2"}))
    assert near_its_data(cluster)[0]["why"] == "not looked after"


def test_what_its_user_wrote_about_the_job_stays(cluster: dict[str, str]) -> None:
    near_its_data(cluster, "--comment", "mine", "--time=5")
    argv = received(cluster)["argv"]
    assert argv[:2] == ["--nodelist=n0,n1,n2,n3", "--comment=deeplink-wish=n[0-3] | mine"]
    assert argv[-2:] == ["--time=5", "job.sh"]
    assert "mine" not in argv


def test_the_sites_own_topology_counts(cluster: dict[str, str], tmp_path: Path) -> None:
    fabric = tmp_path / "fabric.yaml"
    fabric.write_text(
        "switches:\n  a: {nodes: 'n[0,2,4,6]'}\n  b: {nodes: 'n[1,3,5,7]'}\n  c: {switches: [a, b]}\n"
    )
    env = {**cluster, "DEEPLINK_TOPOLOGY": str(fabric)}
    foresees(env, wished=(SOON, "n[0,2,4,6]"))
    for _ in range(2):  # the second time from the compiled file
        sbatch(env, "-N4", "--exclusive", "job.sh")
        assert "--nodelist=n0,n2,n4,n6" in received(env)["argv"]
    fabric.write_text("switches:\n  a: {nodes: 'n[0-1,6-7]'}\n  b: {nodes: 'n[2-5]'}\n  c: {switches: [a, b]}\n")
    sbatch(env, "-N4", "--exclusive", "job.sh")
    assert "--nodelist=n0,n1,n6,n7" in received(env)["argv"]


@pytest.mark.parametrize("text", ["", "\x00 nothing\n- [", None])
def test_a_topology_that_cannot_be_read_is_noted_and_costs_nothing_else(
    cluster: dict[str, str], tmp_path: Path, text: str | None
) -> None:
    fabric = tmp_path / "fabric.yaml"
    if text is not None:
        fabric.write_text(text)
    done = sbatch({**cluster, "DEEPLINK_TOPOLOGY": str(fabric)}, "-N4", "--exclusive", "job.sh")
    assert (done.returncode, done.stderr) == (3, "")
    decision = record(cluster)[0]["decision"]
    assert str(fabric) in decision["notes"][0]
    assert decision["why"] == "as good"


def test_what_no_placement_can_meet_is_said_and_left_to_slurm(cluster: dict[str, str]) -> None:
    done = sbatch(cluster, "-N9", "job.sh")
    assert (done.returncode, done.stdout) == (3, "Submitted batch job 12\n")
    assert done.stderr == "deeplink: 9 nodes wanted; partition main has 8\n"


def test_data_that_is_not_known_is_reported(cluster: dict[str, str]) -> None:
    done = sbatch(cluster, "-N4", "--exclusive", "--deeplink-data=faces", "job.sh")
    assert done.returncode == 3
    assert done.stderr.startswith("deeplink: where faces lies is not known")


def test_who_has_patience_waits_for_few_leaves(cluster: dict[str, str], tmp_path: Path) -> None:
    nodes = (tmp_path / "nodes").read_text()
    for name in ("n0", "n1", "n4", "n5", "n6"):
        nodes = nodes.replace(f"{name}|main*|up|infinite|NO|idle", f"{name}|main*|up|infinite|NO|allocated")
    (tmp_path / "nodes").write_text(nodes)
    sbatch(cluster, "-N3", "--exclusive", "--deeplink-patience=1", "job.sh")
    assert "--switches=1@00:01:00" in received(cluster)["argv"]
    foresees(cluster, plain=(SOON, "n[2-3,7]"))
    sbatch(cluster, "-N3", "--exclusive", "job.sh")
    assert received(cluster)["argv"] == [*ADDED, "-N3", "--exclusive", "job.sh"]


def test_placement_can_be_turned_off(cluster: dict[str, str], tmp_path: Path) -> None:
    program(cluster, "sinfo", f"touch {tmp_path}/asked")
    sbatch(cluster, "-N4", "--deeplink-place=off", "job.sh")
    assert not (tmp_path / "asked").exists()
    assert record(cluster)[0]["decision"]["why"] == "not asked"


def test_a_dry_run_tells_the_placement(cluster: dict[str, str], tmp_path: Path) -> None:
    held(cluster, {"n0": 40, "n1": 30, "n2": 30}, 100)
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n#SBATCH -N4 --exclusive\n#DEEPLINK --data images\n")
    done = sbatch(cluster, "--dry-run", str(script))
    lines = done.stdout.splitlines()
    assert lines[0] == f"sbatch {shlex.join([*HINTED, *ADDED, str(script)])}"
    assert lines[1:3] == ["script: #SBATCH -N4 --exclusive", "script: #DEEPLINK --data images"]
    assert lines[3] == "placement: 4 nodes hinted by name"
    assert "n0,n1,n2,n3" in done.stdout.split("local  nodes", 1)[1]
    said = json.loads(sbatch(cluster, "--dry-run", "--deeplink-json", str(script)).stdout)
    assert said["command"] == shlex.split(lines[0])
    assert said["decision"]["nodes"] == ["n0", "n1", "n2", "n3"]
    assert said["ask"]["nodes"] == 4
    assert not Path(cluster["TOLD"]).exists()


def test_where_nothing_can_be_noted_no_nodes_are_named(cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    held(cluster, dict.fromkeys(["n0", "n1", "n2", "n3"], 100), 400)
    words = ["-N4", "--exclusive", "--deeplink-data", "images", "job.sh"]
    done = sbatch({**cluster, "DEEPLINK_STATE": str(tmp_path / "state")}, *words)
    assert (done.returncode, done.stdout) == (3, "Submitted batch job 12\n")
    assert "job 12 is submitted" in done.stderr
    assert Path(f"{cluster['TOLD']}.calls").read_text() == "called\n"
    assert received(cluster)["argv"][0] == ADDED[0]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_our_caller_closed_cost_no_submission(cluster: dict[str, str], closed: str) -> None:
    argv = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-m", "deeplink", "sbatch", "-N4", "job.sh"]
    done = subprocess.run(argv, env=cluster, capture_output=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (3, b"")
    assert record(cluster)


@pytest.mark.parametrize("given", ["<(cat script)", "/dev/stdin < <(cat script)", "/dev/stdin <script", "fifo"])
def test_a_script_that_can_be_read_once_is_submitted_whole(
    cluster: dict[str, str], tmp_path: Path, given: str
) -> None:
    (tmp_path / "script").write_text("#!/bin/sh\n#SBATCH --no-requeue\n#DEEPLINK --spares 1\n")
    os.mkfifo(tmp_path / "fifo")
    foreseen = f"sbatch: Job 5 to start at {SOON} using 8 processors on nodes n[4-7] in partition main"
    trial = f'case "$*" in *--test-only*) echo "{foreseen}" >&2; exit 1; esac'
    program(
        cluster, "sbatch", f'echo "$*" >>"$TOLD"; for last; do :; done; cat "$last" >>"$TOLD"; {trial}; echo 12'
    )
    line = f'(cat script >fifo &) ; exec "$0" -m deeplink sbatch -N4 --exclusive {given}'
    if given != "fifo":
        line = line.partition("; ")[2]
    argv = ["bash", "-c", line, sys.executable]
    done = subprocess.run(argv, env=cluster, cwd=tmp_path, capture_output=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"12\n", b"")
    last = Path(cluster["TOLD"]).read_text().split("--open-mode=append")[-1]  # before it, the trials with Slurm
    assert last.endswith((tmp_path / "script").read_text())
    assert "--requeue" not in Path(cluster["TOLD"]).read_text()
    assert len(Path(cluster["TOLD"]).read_text().split("#DEEPLINK")) > 2  # a trial had it, too


def test_parsable_output_of_a_cluster_has_its_id_found(cluster: dict[str, str]) -> None:
    done = sbatch({**cluster, "SAYS": "77;east"}, "--parsable", "-N4", "job.sh")
    assert done.stdout == "77;east\n"
    assert record(cluster, 77)


def test_a_closed_output_does_not_stop_it(cluster: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "deeplink", "sbatch", "-N4", "job.sh"],
        env=cluster,
        stdout=subprocess.PIPE,
        stderr=-1,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
    assert (process.returncode, said) == (3, b"")
    assert record(cluster)


def test_what_interrupts_us_reaches_sbatch_and_ends_us_alike(cluster: dict[str, str], tmp_path: Path) -> None:
    program(cluster, "sbatch", 'case "$*" in *--test-only*) exit 1; esac; echo 12; exec sleep 60')
    argv = [sys.executable, "-m", "deeplink", "sbatch", "--wait", "-N4", "job.sh"]
    with subprocess.Popen(argv, env=cluster, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"12\n"  # while it goes on waiting
        process.send_signal(signal.SIGINT)
    assert process.returncode == -signal.SIGINT
    assert record(cluster)


IMPATIENT = """
import sys
from deeplink.cli import main, sbatch
from deeplink.scheduler.placement.hint import making
sbatch.PING_S, making.ANSWER_S = float(sys.argv.pop()), 0.5
sys.argv = ["deeplink", "sbatch", *sys.argv[1:]]
main()
"""


def impatient(env: dict[str, str], ping_s: float, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", IMPATIENT, *words, str(ping_s)]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_a_controller_that_hangs_is_said_in_bounded_time(env: dict[str, str], tmp_path: Path) -> None:
    for name in ("sinfo", "scontrol"):
        program(env, name, f"echo $$ >{tmp_path}/pid; exec sleep 60")
    done = impatient(env, 1.0, "-N2", "job.sh")
    assert (done.returncode, done.stdout) == (1, "")
    assert "scontrol did not answer within 1 s" in done.stderr
    assert not Path(env["TOLD"]).exists()
    assert ProcessId.of(int((tmp_path / "pid").read_text())) is None


def test_a_controller_that_is_slow_leads_to_a_submission_without_a_hint(env: dict[str, str]) -> None:
    program(env, "sinfo", "exec sleep 60")
    program(env, "scontrol", "case $1 in ping) exit 0;; esac; exec sleep 60")
    done = impatient(env, 10.0, "-N2", "job.sh")
    assert (done.returncode, done.stdout) == (3, "Submitted batch job 12\n")
    assert "deeplink: no nodes are hinted" in done.stderr
    assert "did not answer within 0.5 s" in done.stderr
    assert received(env)["argv"] == [*ADDED, "-N2", "job.sh"]


@pytest.mark.parametrize("words", [["--version"], ["--usage"], ["-V"], ["-Mother"]])
def test_what_needs_no_controller_of_ours_asks_none(env: dict[str, str], words: list[str], tmp_path: Path) -> None:
    assert sbatch(env, *words).stdout == "Submitted batch job 12\n"
    assert not (tmp_path / "scontrol").exists()
    assert not (tmp_path / "sinfo").exists()


@pytest.mark.parametrize("words", [["--test-only", "-N2"], ["-Q", "-N2"], ["-n8"], ["-N2", "-w", "n1"]])
def test_a_controller_that_is_down_is_for_sbatch_to_say(
    env: dict[str, str], tmp_path: Path, words: list[str]
) -> None:
    done = sbatch(env, *words, stdin="#!/bin/sh\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, "Submitted batch job 12\n", "")
    assert received(env)["stdin"] == "#!/bin/sh\n"
    assert received(env)["argv"] == [*ADDED, *words]
    assert (tmp_path / "scontrol").read_text() == "ping\n"


def test_help_is_ours_when_it_is_all_that_is_asked(env: dict[str, str]) -> None:
    done = sbatch(env, "--help")
    assert done.returncode == 0
    assert "--deeplink-shim" in done.stdout


HEAVY = "grpc pyarrow numpy torch rich ClusterShell sqlite3 lmdb yaml fsspec asyncio".split()  # noqa: SIM905
LOADED = f"""
import sys
from deeplink.cli import cli
cli.main(["sbatch", "-N4", "--dry-run", *sys.argv[1:], "job.sh"], standalone_mode=False)
print(sorted(set({HEAVY!r}) & set(sys.modules)))
"""


def test_nothing_heavy_is_imported(cluster: dict[str, str]) -> None:
    """ClusterShell (11 ms) reads folded names. The watchdog is asked once a minute, which takes gRPC (0.1 s)."""
    near_its_data(cluster)
    argv = [sys.executable, "-c", LOADED, "--deeplink-data=images", "--deeplink-shim"]
    for _ in range(2):
        done = subprocess.run(argv, env=cluster, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        assert done.stdout.splitlines()[-1] == "['ClusterShell']"


@pytest.fixture
def profiled(cluster: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The machines are known, with uplinks as slow as a tenth of a port; `bert.json` waits for its gradients."""
    constants = Constants(leaf=LinkSpeed(1.2e9, 14e-6))
    (tmp_path / "constants.json").write_text(constants_text(constants))
    profile = {"format": 1, "batch": 4, "sample_s": 0.001, "gradient_bytes": 1e9, "ranks_per_node": 2}
    (tmp_path / "bert.json").write_text(json.dumps(profile))
    foresees(cluster, plain=(SOON, "n[2-5]"))
    return {**cluster, "DEEPLINK_MODEL": str(tmp_path / "constants.json")}


def test_with_a_profile_nodes_are_compared_by_the_step(profiled: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n#SBATCH -N4 --exclusive\n#DEEPLINK --profile {tmp_path}/bert.json\n")
    done = sbatch(profiled, "--dry-run", str(script))
    lines = done.stdout.splitlines()
    assert "  cost: predicted step" in lines
    rows = [line for line in lines if " ms " in line and "%" in line]
    assert rows[0].split()[:2] == ["170.4", "ms"]
    assert rows[0].endswith("n0,n1,n2,n3")
    assert rows[-1].split()[:2] == ["1460.5", "ms"]
    assert rows[-1].endswith("<- Slurm's own choice")
    parts = lines[lines.index("  the first one's step:") + 1 :]
    assert parts[0].split()[::2] == ["step", "ms"]
    assert sbatch(profiled, str(script)).returncode == 3
    (found,) = record(profiled)
    decision = found["decision"]
    assert (decision["cost"], decision["nodes"]) == ("predicted step", ["n0", "n1", "n2", "n3"])
    assert decision["candidates"][0]["step_s"] == pytest.approx(0.1704, rel=1e-3)
    assert decision["own"]["step_s"] == pytest.approx(1.4605, rel=1e-3)
    assert decision["predicted"][0].startswith("step ")
    assert json.loads(found["ask"]["profile"])["gradient_bytes"] == 1e9


def test_without_constants_weights_count_and_that_is_said(profiled: dict[str, str], tmp_path: Path) -> None:
    words = ("-N4", "--exclusive", f"--deeplink-profile={tmp_path}/bert.json", "--dry-run", "job.sh")
    lost = {**profiled, "DEEPLINK_MODEL": str(tmp_path / "lost.json")}
    for env, why in ((lost, "lost.json: No such file"), ({**lost, "DEEPLINK_MODEL": ""}, "deeplink calibrate")):
        said = sbatch(env, *words).stdout
        assert "  cost: weights\n" in said
        assert f"its step is not predicted: {why}" in said or why in said
        assert "ms" not in said.split("cost: weights")[1]


@pytest.mark.parametrize("text", [None, "{}", '{"format": 1, "batch": 0, "sample_s": 1, "gradient_bytes": 1}'])
def test_a_profile_that_is_none_submits_nothing(
    profiled: dict[str, str], tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "odd.json").write_text(text)
    done = sbatch(profiled, "-N4", f"--deeplink-profile={tmp_path}/odd.json", "job.sh")
    assert (done.returncode, done.stdout) == (2, "")
    assert not Path(profiled["TOLD"]).exists()


def test_numpy_is_loaded_where_there_is_a_profile(profiled: dict[str, str], tmp_path: Path) -> None:
    sbatch(profiled, "-N4", "--exclusive", f"--deeplink-profile={tmp_path}/bert.json", "job.sh")
    argv = [sys.executable, "-c", LOADED, f"--deeplink-profile={tmp_path}/bert.json", "--exclusive"]
    done = subprocess.run(argv, env=profiled, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.splitlines()[-1] == "['ClusterShell', 'numpy']"


def test_an_option_that_has_no_effect_any_more_is_accepted_and_that_is_said(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#DEEPLINK --resubmit on\n")
    done = sbatch(cluster, "-N4", str(script))
    assert "resubmit has no effect any more" in done.stderr
    done = sbatch({**cluster, "DEEPLINK_RESUBMIT": "true"}, "-N4", "--deeplink-resubmit=off", "--wrap", "true")
    assert "resubmit" not in done.stderr
