"""What becomes of a command line of `deeplink sbatch`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.scheduler.slurm.client import Allocation
from deeplink.scheduler.slurm.parse import JobAddress
from deeplink.scheduler.slurm.submission import (
    LEFT_BEHIND,
    Ours,
    SubmissionError,
    checked,
    in_script,
    not_contradicted,
    submission,
    understood,
    without_outer,
)

ADDED = ["sbatch", "--requeue", "--no-kill", "--open-mode=append"]
PLAIN = ["sbatch", "--requeue", "--open-mode=append"]
RUNS = "#!/bin/sh\nexec deeplink run -- python train.py\n"


def argv(*words: str, script: str = "", env: dict[str, str] | None = None) -> list[str]:
    request = understood(words)
    return list(submission(request, request.ours, script, env or {}).argv)


def test_three_options_are_added_in_front() -> None:
    assert argv("-N4", "job.sh", "--x", script=RUNS) == [*ADDED, "-N4", "job.sh", "--x"]


@pytest.mark.parametrize(
    ("words", "script", "outlives"),
    [
        (["job.sh"], "#!/bin/sh\nsrun python train.py\n", False),
        (["job.sh"], "#!/bin/sh\npython -m deeplink \\\n  run\n", False),
        (["job.sh"], "#!/bin/sh\npython -m deeplink  run -- x\n", True),
        (["job.sh"], "#!/bin/sh\ndeeplink runs\n", False),
        (["--wrap", "deeplink run -- x"], "", True),
        (["--wrap=srun x"], RUNS, False),
        (["--deeplink-spares=1", "job.sh"], "", True),
        (["--deeplink-shim", "job.sh"], "", True),
    ],
)
def test_only_a_job_whose_ranks_are_supervised_outlives_a_node(
    words: list[str], script: str, outlives: bool
) -> None:
    assert ("--no-kill" in argv(*words, script=script)) is outlives


@pytest.mark.parametrize("word", ["--no-requeue", "--requeue", "--no-r"])
def test_the_command_line_wins(word: str) -> None:
    assert argv(word, "job.sh") == ["sbatch", "--open-mode=append", word, "job.sh"]


def test_the_script_wins() -> None:
    script = "#!/bin/sh\n#SBATCH --open-mode=truncate\n#SBATCH -k\n"
    assert argv("job.sh", script=script) == ["sbatch", "--requeue", "job.sh"]


def test_the_script_wins_behind_an_option_that_is_not_known_here() -> None:
    script = "#!/bin/sh\n#SBATCH --from-the-future 2\n#SBATCH --no-requeue\n"
    assert argv("job.sh", script=script) == ["sbatch", "--open-mode=append", "job.sh"]


def test_the_value_of_a_newer_option_is_not_taken_for_the_script() -> None:
    assert understood(["--segment", "2", "--requeue=expedite", "job.sh"]).script == "job.sh"
    assert understood(["--from-the-future=2", "job.sh"]).script == "job.sh"
    assert understood(["--from-the-future", "--", "job.sh"]).script == "job.sh"


@pytest.mark.parametrize(
    "words",
    [["--from-the-future", "2", "job.sh"], ["-N2", "-j", "job.sh"], ["-N1", ":", "--from-the-future", "2"]],
)
def test_an_unknown_option_before_the_script_is_named(words: list[str]) -> None:
    with pytest.raises(SubmissionError, match=r"(--from-the-future|-j) is an option that is not known here"):
        understood(words)


def test_the_environment_wins() -> None:
    env = {"SBATCH_NO_REQUEUE": "1", "SBATCH_OPEN_MODE": "t"}
    assert argv("job.sh", env=env) == ["sbatch", "job.sh"]


def test_options_of_ours_are_taken_out_before_the_script_only() -> None:
    request = understood(["--deeplink-spares", "2", "-N4", "--dry-run", "job.sh", "--deeplink-spares", "9"])
    assert (request.ours, request.dry_run, request.script) == (Ours(spares=2), True, "job.sh")
    made = submission(request, request.ours, "", {})
    assert list(made.argv) == [*ADDED, "-N4", "job.sh", "--deeplink-spares", "9"]
    assert made.changes == {"DEEPLINK_SPARES": "2"}


def test_the_stand_ins_come_first_on_path() -> None:
    made = submission(understood(["job.sh"]), Ours(shim=True), "", {"PATH": "/usr/bin"}, "/s/shim")
    assert made.changes == {"DEEPLINK_SHIM": "/s/shim", "PATH": "/s/shim:/usr/bin"}


@pytest.mark.parametrize(
    ("words", "script", "paths"),
    [
        (["--deeplink-paths"], "", "all"),
        (["--deeplink-paths=a,b@01"], "#DEEPLINK --paths\n", "a,b@01"),
        ([], "#DEEPLINK --paths=a\n", "a"),
        ([], "#DEEPLINK --deeplink-paths --shim\n", "all"),
    ],
)
def test_whose_paths_are_served_travels_in_the_environment(words: list[str], script: str, paths: str) -> None:
    request = understood([*words, "job.sh"])
    ours = request.ours.over(in_script(script))
    made = submission(request, ours, script, {"PATH": "/bin"}, "/shim")
    assert made.changes["DEEPLINK_PATHS"] == paths
    assert list(made.argv)[-1] == "job.sh"
    assert not any("paths" in word for word in made.argv)


@pytest.mark.parametrize(
    ("words", "script", "env", "export"),
    [
        (["--export=ALL,A=1"], "", {}, None),
        (["--export=A,B=1"], "", {}, "--export=A,B=1,DEEPLINK_SPARES"),
        (["--export", "A"], "", {}, "--export=A,DEEPLINK_SPARES"),
        ([], "#SBATCH --export=A\n", {}, "--export=A,DEEPLINK_SPARES"),
        ([], "", {"SBATCH_EXPORT": "A"}, "--export=A,DEEPLINK_SPARES"),
        (["--export=DEEPLINK_SPARES"], "", {}, "--export=DEEPLINK_SPARES"),
    ],
)
def test_an_export_list_of_the_users_lets_ours_through(
    words: list[str], script: str, env: dict[str, str], export: str | None
) -> None:
    made = argv("--deeplink-spares=1", *words, "job.sh", script=script, env=env)
    if export is None:
        assert made == [*ADDED, *words, "job.sh"]
    else:
        assert made == [*ADDED, export, "job.sh"]


@pytest.mark.parametrize("words", [["--export=NONE"], ["--export-file=f"], ["--export=ALL,PATH=/bin"]])
def test_a_closed_environment_is_refused_clearly(words: list[str]) -> None:
    with pytest.raises(SubmissionError, match="--export"):
        submission(understood([*words, "job.sh"]), Ours(shim=True), "", {"PATH": "/bin"}, "/s")


def test_a_closed_environment_is_no_matter_without_options_of_ours() -> None:
    assert argv("--export=NONE", "job.sh") == [*PLAIN, "--export=NONE", "job.sh"]


@pytest.mark.parametrize(
    "words", [["--deeplink-spare-parts=1"], ["--deeplink-spares=x"], ["--deeplink-spares"], ["--deeplink-shim=on"]]
)
def test_wrong_options_of_ours_are_refused(words: list[str]) -> None:
    with pytest.raises(SubmissionError) as caught:
        understood([*words])
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("words", "stdin"),
    [([], True), (["-N2"], True), (["--wrap", "x"], False), (["job.sh"], False), (["-V"], False)],
)
def test_where_the_script_comes_from(words: list[str], stdin: bool) -> None:
    assert understood(words).from_stdin is stdin


@given(st.lists(st.text(min_size=1), max_size=6))
def test_whatever_follows_the_script_arrives_unchanged(arguments: list[str]) -> None:
    assert argv("job.sh", *arguments)[-len(arguments) - 1 :] == ["job.sh", *arguments]


@pytest.mark.parametrize(
    ("script", "ours"),
    [
        (
            "#!/bin/sh\n#DEEPLINK --spares 1 --data=a,b\n#SBATCH -N3\n#DEEPLINK --patience 2:00 # why\n",
            Ours(spares=1, data=("a", "b"), patience="2:00"),
        ),
        ("#DEEPLINK --deeplink-place=off --shim\n", Ours(place=False, shim=True)),
        ("#!/bin/sh\necho\n#DEEPLINK --spares 1\n", Ours()),
        ("", Ours()),
    ],
)
def test_lines_of_ours_in_a_script(script: str, ours: Ours) -> None:
    assert in_script(script) == ours


@pytest.mark.parametrize(
    "line", ["--spare 1 x", "spares=1", "--dry-run", "--colour=red", "--spares", "--place=maybe"]
)
def test_what_is_no_option_of_ours_in_a_script_is_said(line: str) -> None:
    with pytest.raises(SubmissionError) as caught:
        in_script(f"#!/bin/sh\n#DEEPLINK {line}\n")
    assert caught.value.remedy


def test_the_command_line_counts_more_than_the_script() -> None:
    script = Ours(spares=1, data=("a",), patience="5", place=False)
    assert Ours(spares=0, patience="0").over(script) == Ours(spares=0, data=("a",), patience="0", place=False)


@pytest.mark.parametrize(
    ("ours", "nodes"),
    [(Ours(place=False, data=("a",)), 0), (Ours(place=False, patience="1"), 4), (Ours(spares=4), 4)],
)
def test_contradictions_are_refused(ours: Ours, nodes: int) -> None:
    with pytest.raises(SubmissionError):
        checked(ours, nodes)


def test_what_agrees_is_not() -> None:
    checked(Ours(spares=3, data=("a",), patience="0"), 4)
    checked(Ours(spares=9, place=False), 0)


def test_json_without_a_dry_run_is_refused() -> None:
    with pytest.raises(SubmissionError, match="dry-run"):
        understood(["--deeplink-json", "job.sh"])
    assert understood(["--deeplink-json", "--dry-run", "job.sh"]).as_json


def test_a_job_of_several_components_has_its_script_behind_the_last() -> None:
    request = understood(["-N1", ":", "-N2", "--no-requeue", ":", "-N3", "job.sh", ":", "x"])
    assert (request.script, len(request.lines)) == ("job.sh", 3)
    assert "--requeue" not in submission(request, request.ours, "", {}).argv
    assert request.with_script("/other").words[-3:] == ("/other", ":", "x")
    assert understood(["-N1", ":", "-N2"]).from_stdin
    assert not understood(["-N1", ":", "-N2", "--version"]).from_stdin


def test_other_names_of_an_option_do_not_hide_the_script() -> None:
    assert understood(["--tasks-per-node", "2", "--ntasks-per-tres", "1", "job.sh"]).script == "job.sh"


@pytest.mark.parametrize(("said", "expected"), [("", None), ("=on", True), ("=off", False)])
def test_whether_a_job_may_be_submitted_anew_is_said_on_the_line_or_in_the_script(
    said: str, expected: bool | None
) -> None:
    words = [f"--deeplink-resubmit{said}"] if said else []
    assert understood([*words, "job.sh"]).ours.resubmit is expected
    if said:
        assert in_script(f"#!/bin/sh\n#DEEPLINK --resubmit{said}\n").resubmit is expected


def test_the_line_counts_more_than_the_script() -> None:
    line = understood(["--deeplink-resubmit=off", "job.sh"]).ours
    assert line.over(in_script("#!/bin/sh\n#DEEPLINK --resubmit=on\n")).resubmit is False
    with pytest.raises(SubmissionError):
        understood(["--deeplink-resubmit=maybe", "job.sh"])


ADDRESS = JobAddress.of_label("7")


def left(told: Allocation, **said: str) -> dict[str, str]:
    env = {f"SLURM_{name}": value for name, value in said.items()}
    return {name.removeprefix("SLURM_"): value for name, value in not_contradicted(env, told, 2).items()}


# As 22.05.8 told of jobs of two nodes: nodes, tasks, tasks per node, CPUs per task; then what the job's own
# environment said.
@pytest.mark.parametrize(
    ("told", "own"),
    [
        ((2, 2, 0, 1), {"NTASKS": "2", "NPROCS": "2"}),
        ((2, 5, 0, 2), {"NTASKS": "5", "NPROCS": "5", "CPUS_PER_TASK": "2"}),
        ((2, 4, 2, 1), {"NTASKS": "4", "NPROCS": "4", "NTASKS_PER_NODE": "2"}),
        ((2, 4, 2, 1), {"NTASKS": "3", "NPROCS": "3", "NTASKS_PER_NODE": "2"}),
        ((2, 2, 1, 1), {"NTASKS": "2", "NTASKS_PER_NODE": "1"}),
        ((2, 2, 0, 2), {"CPUS_PER_TASK": "2"}),
        ((1, 1, 0, 1), {"NTASKS": "5"}),  # one node of two was lost
        ((2, 0, 0, 0), {"NTASKS": "5", "CPUS_PER_TASK": "3"}),  # as where Slurm says N/A
    ],
)
def test_what_the_job_itself_was_given_stays(told: tuple[int, int, int, int], own: dict[str, str]) -> None:
    nodes, tasks, per_node, cpus = told
    allocation = Allocation(address=ADDRESS, nodes=nodes, tasks=tasks, tasks_per_node=per_node, cpus_per_task=cpus)
    assert left(allocation, JOB_ID="7", **own) == {"JOB_ID": "7", **own}


def test_what_the_record_contradicts_is_an_outer_jobs() -> None:
    plain = Allocation(address=ADDRESS, nodes=2, tasks=2, cpus_per_task=1, gpus_asked={"Node": 4})
    outer = {"NTASKS": "1", "NPROCS": "1", "NTASKS_PER_NODE": "1", "CPUS_PER_TASK": "8", "GPUS_PER_TASK": "1"}
    assert left(plain, **outer, RESTART_COUNT="1") == {}
    assert left(plain, GPUS_PER_NODE="4", TASKS_PER_NODE="1(x2)") == {
        "GPUS_PER_NODE": "4",
        "TASKS_PER_NODE": "1(x2)",
    }
    spread = Allocation(address=ADDRESS, nodes=2, tasks=4, tasks_per_node=2)
    assert left(spread, NTASKS="9", NTASKS_PER_NODE="2") == {"NTASKS_PER_NODE": "2"}


def test_the_environment_of_a_step_is_its_own() -> None:
    plain = Allocation(address=ADDRESS, nodes=2, tasks=2, cpus_per_task=1)
    step = {"STEP_ID": "0", "NTASKS": "1", "CPUS_PER_TASK": "8"}
    assert left(plain, **step) == step


def test_a_job_is_submitted_without_what_the_job_around_it_was_given() -> None:
    given = dict.fromkeys(LEFT_BEHIND, "3") | {"SBATCH_GPUS": "2", "SLURM_CONF": "/etc/slurm.conf", "HOME": "/h"}
    assert without_outer(given) == given, "the user's own words"
    inside = {**given, "SLURM_JOB_ID": "7"}
    assert set(without_outer(inside)) == {"SBATCH_GPUS", "SLURM_CONF", "HOME", "SLURM_JOB_ID"}
