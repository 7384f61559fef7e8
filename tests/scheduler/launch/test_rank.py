"""What a slot turns a process into, run for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.publish import read_members
from deeplink.core.types import Attempt
from deeplink.scheduler.launch import slot
from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.launch.environment import LAUNCH_VARIABLE, Launch, NodeFacts, leave_launch
from tests.waiting import LIMIT_S

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


STARTER = """
import os, sys
from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.launch.environment import RankTask, left_launch
from deeplink.scheduler.launch.slot import program_of
try:
    program_of(sys.argv[1:], left_launch(os.environ), RankTask(1, 1, "n0"), os.environ).start()
except DeepLinkError as problem:
    sys.stderr.write(str(problem))
    sys.exit(problem.exit_code)
"""


def starter(*command: str) -> list[str]:
    return [sys.executable, "-P", "-c", STARTER, *command]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    node = NodeFacts(node="n0", address="127.0.0.1:4000", token_file=str(tmp_path / "token"), store="/s")
    launch = Launch(attempt=Attempt(1, 0, 0), nodes=(node,), spares=(), ranks=(2,), master_port=1234, passed_on={})
    slurm = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURMD_NODENAME": "n0"}
    return {**os.environ, **slurm, LAUNCH_VARIABLE: leave_launch(launch, tmp_path)}


def run(argv: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_it_becomes_the_command_with_the_ranks_environment(env: dict[str, str]) -> None:
    done = run(starter(sys.executable, "-c", SHOW), env)
    found = json.loads(done.stdout)
    assert (found["RANK"], found["LOCAL_RANK"], found["MASTER_PORT"]) == ("1", "1", "1234")
    assert LAUNCH_VARIABLE not in found
    assert [member.name for member in read_members(found["DEEPLINK_MEMBERS"])] == ["n0"]


@given(st.lists(st.text(st.characters(exclude_characters="\0"), min_size=1)), st.booleans())
def test_every_word_behind_the_dashes_is_the_commands(words: list[str], is_mpis: bool) -> None:
    before = ["--mpi"] if is_mpis else ["n0", "0"]
    node = NodeFacts(node="n0", address="127.0.0.1:4000")
    launch = Launch(attempt=Attempt(1, 0, 0), nodes=(node,), spares=(), ranks=(1,), master_port=1, passed_on={})
    with tempfile.TemporaryDirectory() as folder:
        env = {LAUNCH_VARIABLE: leave_launch(launch, Path(folder)), "PMI_RANK": "0"}
        assert slot._arguments([*before, "--", "python", *words], env) == ("n0", 0, ["python", *words])


def test_without_words_slurm_says_where_a_slot_is() -> None:
    env = {"SLURMD_NODENAME": "n3", "SLURM_LOCALID": "2"}
    assert slot._arguments(["--", "train"], env) == ("n3", 2, ["train"])


@pytest.mark.parametrize("words", [["--"], ["n0", "0"], []])
def test_a_slot_without_a_command_is_refused(words: list[str]) -> None:
    with pytest.raises(LaunchError, match="no command"):
        slot._arguments(words, {})


def test_words_reach_the_command_unchanged(env: dict[str, str]) -> None:
    words = ["a b", "", "$HOME", "--", "'\"", "\n", "--task"]
    done = run(starter(sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))", *words), env)
    assert json.loads(done.stdout) == words


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["no-such-command"], 127, "no such command on n0"),
        (["/etc/passwd"], 126, "ermission denied on n0"),
    ],
)
def test_what_cannot_be_started_is_said(arguments: list[str], code: int, said: str, env: dict[str, str]) -> None:
    done = run(starter(*arguments), env)
    assert done.returncode == code
    assert said in done.stderr


def test_outside_of_a_run_it_says_so(env: dict[str, str]) -> None:
    del env[LAUNCH_VARIABLE]
    done = run(starter("true"), env)
    assert done.returncode == 2
    assert "deeplink run" in done.stderr


def test_a_rank_waits_until_its_predecessor_is_gone(env: dict[str, str]) -> None:
    first = subprocess.Popen(
        starter(sys.executable, "-c", "print('up', flush=True); input()"),
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdin is not None
    assert first.stdout is not None
    with first:
        assert first.stdout.readline() == "up\n"
        with subprocess.Popen(starter("echo", "second"), env=env, stdout=subprocess.PIPE, text=True) as second:
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(1.0)
            first.kill()
            assert second.communicate(timeout=LIMIT_S)[0] == "second\n"
            assert second.returncode == 0
