"""The starter of one rank, run for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.publish import read_members
from deeplink.core.types import Attempt
from deeplink.scheduler.launch import rank
from deeplink.scheduler.launch.environment import LAUNCH_VARIABLE, Launch, NodeFacts, RankTask, leave_launch
from tests.waiting import LIMIT_S

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


def starter(*arguments: str) -> list[str]:
    task = () if "--task" in arguments[:1] else ("--task", "1", "1", "n0")
    return [sys.executable, "-P", "-m", "deeplink.scheduler.launch.rank", *task, *arguments]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    node = NodeFacts(node="n0", address="127.0.0.1:4000", token_file=str(tmp_path / "token"), store="/s")
    launch = Launch(attempt=Attempt(1, 0, 0), nodes=(node,), spares=(), ranks=(2,), master_port=1234, passed_on={})
    slurm = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURMD_NODENAME": "n0"}
    return {**os.environ, **slurm, LAUNCH_VARIABLE: leave_launch(launch, tmp_path)}


def run(argv: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_it_becomes_the_command_with_the_ranks_environment(env: dict[str, str]) -> None:
    done = run(starter("--", sys.executable, "-c", SHOW), env)
    found = json.loads(done.stdout)
    assert (found["RANK"], found["LOCAL_RANK"], found["MASTER_PORT"]) == ("1", "1", "1234")
    assert LAUNCH_VARIABLE not in found
    assert [member.name for member in read_members(found["DEEPLINK_MEMBERS"])] == ["n0"]


def test_the_task_can_be_named_where_there_is_no_slurm(env: dict[str, str]) -> None:
    done = run(starter("--task", "0", "0", "n0", "--", sys.executable, "-c", SHOW), env)
    assert json.loads(done.stdout)["RANK"] == "0"


@given(st.lists(st.text(st.characters(exclude_characters="\0"), min_size=1)), st.booleans())
def test_every_word_behind_the_dashes_is_the_commands(words: list[str], is_mpis: bool) -> None:
    node = NodeFacts(node="n0", address="127.0.0.1:4000")
    launch = Launch(attempt=Attempt(1, 0, 0), nodes=(node,), spares=(), ranks=(1,), master_port=1, passed_on={})
    before = ["--mpi"] if is_mpis else ["--task", "0", "0", "n0"]
    assert rank.arguments([*before, "--", "python", *words], launch, {"PMI_RANK": "0"}) == (
        RankTask(0, 0, "n0"),
        ["python", *words],
    )


def test_words_reach_the_command_unchanged(env: dict[str, str]) -> None:
    words = ["a b", "", "$HOME", "--", "'\"", "\n", "--task"]
    done = run(
        starter("--", sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))", *words), env
    )
    assert json.loads(done.stdout) == words


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--", "no-such-command"], 127, "no such command on n0"),
        (["--", "/etc/passwd"], 126, "ermission denied on n0"),
        (["--"], 2, "no command"),
        (["python"], 2, "no command"),
    ],
)
def test_what_cannot_be_started_is_said(arguments: list[str], code: int, said: str, env: dict[str, str]) -> None:
    done = run(starter(*arguments), env)
    assert done.returncode == code
    assert said in done.stderr


def test_outside_of_a_run_it_says_so(env: dict[str, str]) -> None:
    del env[LAUNCH_VARIABLE]
    done = run(starter("--", "true"), env)
    assert done.returncode == 2
    assert "deeplink run" in done.stderr


def test_a_rank_waits_until_its_predecessor_is_gone(env: dict[str, str]) -> None:
    first = subprocess.Popen(
        starter("--", sys.executable, "-c", "print('up', flush=True); input()"),
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdin is not None
    assert first.stdout is not None
    with first:
        assert first.stdout.readline() == "up\n"
        with subprocess.Popen(
            starter("--", "echo", "second"), env=env, stdout=subprocess.PIPE, text=True
        ) as second:
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(1.0)
            first.kill()
            assert second.communicate(timeout=LIMIT_S)[0] == "second\n"
            assert second.returncode == 0
