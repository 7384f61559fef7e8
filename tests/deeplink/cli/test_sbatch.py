"""`deeplink sbatch` around a program that stands for sbatch: what it is given, and what comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deeplink.scheduler.sandbox.processes import ProcessId

FAKE = f"""#!{sys.executable}
import json, os, sys
facts = {{"argv": sys.argv[1:], "stdin": sys.stdin.read(), "env": dict(os.environ)}}
open(os.environ["TOLD"], "w").write(json.dumps(facts))
print("Submitted batch job 12")
sys.exit(3)
"""
ADDED = ["--requeue", "--no-kill", "--open-mode=append"]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(FAKE)
    program.chmod(0o755)
    own = {"TOLD": str(tmp_path / "told"), "HOME": str(tmp_path), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    return {**os.environ, **own}


def sbatch(env: dict[str, str], *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "deeplink", "sbatch", *words]
    return subprocess.run(argv, env=env, input=stdin, capture_output=True, text=True, timeout=30, check=False)


def told(env: dict[str, str]) -> dict[str, object]:
    facts: dict[str, object] = json.loads(Path(env["TOLD"]).read_text())
    return facts


def test_what_sbatch_says_and_its_exit_code_come_back(env: dict[str, str]) -> None:
    done = sbatch(env, "-N2", "job.sh", "a b", "--help")
    assert (done.returncode, done.stdout, done.stderr) == (3, "Submitted batch job 12\n", "")
    assert told(env)["argv"] == [*ADDED, "-N2", "job.sh", "a b", "--help"]


def test_the_scripts_directives_are_read(env: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --no-requeue\n")
    sbatch(env, str(script))
    assert told(env)["argv"] == ["--no-kill", "--open-mode=append", str(script)]


def test_a_script_on_standard_input_arrives_whole(env: dict[str, str]) -> None:
    script = "#!/bin/bash\n#SBATCH --open-mode=truncate\necho ünï $HOME\n" + "# much\n" * 20_000
    sbatch(env, "-N2", stdin=script)
    assert told(env)["stdin"] == script
    assert told(env)["argv"] == ["--requeue", "--no-kill", "-N2"]


def test_the_stand_ins_are_made_and_put_in_front(env: dict[str, str], tmp_path: Path) -> None:
    sbatch(env, "--deeplink-shim", "--deeplink-spares", "1", "job.sh")
    folder = tmp_path / ".local/state/deeplink/shim"
    found = told(env)["env"]
    assert isinstance(found, dict)
    assert found["PATH"].split(":")[0] == str(folder)
    assert (found["DEEPLINK_SHIM"], found["DEEPLINK_SPARES"]) == (str(folder), "1")
    assert os.access(folder / "srun", os.X_OK)


@pytest.mark.parametrize("option", ["--dry-run", "--deeplink-dry-run"])
def test_a_dry_run_prints_the_command_and_does_nothing(env: dict[str, str], tmp_path: Path, option: str) -> None:
    done = sbatch(env, option, "--deeplink-shim", "-N2", "job.sh", "a b")
    assert done.returncode == 0
    assert done.stdout.rstrip().endswith("sbatch --requeue --no-kill --open-mode=append -N2 job.sh 'a b'")
    assert done.stdout.startswith("DEEPLINK_SHIM=")
    assert not Path(env["TOLD"]).exists()
    assert not (tmp_path / ".local").exists()


def test_a_wrong_option_of_ours_submits_nothing(env: dict[str, str]) -> None:
    done = sbatch(env, "--deeplink-spares=many", "job.sh")
    assert done.returncode == 2
    assert "--deeplink-spares" in done.stderr
    assert not Path(env["TOLD"]).exists()


def test_no_sbatch_at_all(env: dict[str, str], tmp_path: Path) -> None:
    done = sbatch({**env, "PATH": str(tmp_path)}, "job.sh")
    assert done.returncode == 127
    assert "sandbox" in done.stderr


def program(env: dict[str, str], name: str, text: str) -> None:
    path = Path(env["TOLD"]).parent / "bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


IMPATIENT = """
import sys
from deeplink.cli import main, sbatch
sbatch.PING_S = 2.0
sys.argv = ["deeplink", "sbatch", "job.sh"]
main()
"""


def test_a_controller_that_hangs_is_said_in_bounded_time(env: dict[str, str], tmp_path: Path) -> None:
    program(env, "scontrol", f"echo $$ >{tmp_path}/pid; exec sleep 60")
    argv = [sys.executable, "-c", IMPATIENT]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("deeplink: scontrol did not answer within 2 s")
    assert "slurmctld" in done.stderr
    assert not Path(env["TOLD"]).exists()
    assert ProcessId.of(int((tmp_path / "pid").read_text())) is None


@pytest.mark.parametrize("word", ["--version", "--usage", "-V", "-Mother"])
def test_what_needs_no_controller_of_ours_asks_none(env: dict[str, str], word: str, tmp_path: Path) -> None:
    program(env, "scontrol", f"touch {tmp_path}/asked")
    assert sbatch(env, word).stdout == "Submitted batch job 12\n"
    assert not (tmp_path / "asked").exists()


def test_a_controller_that_is_down_is_for_sbatch_to_say(env: dict[str, str], tmp_path: Path) -> None:
    program(env, "scontrol", f"cat; echo $* >{tmp_path}/asked; echo 'Slurmctld(primary) at c is DOWN'; exit 1")
    done = sbatch(env, "-N2", stdin="#!/bin/sh\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, "Submitted batch job 12\n", "")
    assert told(env)["stdin"] == "#!/bin/sh\n"
    assert (tmp_path / "asked").read_text() == "ping\n"


def test_help_is_ours_when_it_is_all_that_is_asked(env: dict[str, str]) -> None:
    done = sbatch(env, "--help")
    assert done.returncode == 0
    assert "--deeplink-shim" in done.stdout


def test_nothing_heavy_is_imported(env: dict[str, str]) -> None:
    code = """
import sys
from deeplink.cli import cli
cli.main(["sbatch", "--dry-run", "--deeplink-shim", "-N2", "job.sh"], standalone_mode=False)
print(sorted({"grpc", "pyarrow", "numpy", "torch", "rich", "ClusterShell", "sqlite3", "lmdb"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
