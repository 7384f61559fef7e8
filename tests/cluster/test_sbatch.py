"""`deeplink sbatch` beside sbatch itself."""

from __future__ import annotations

import pytest

from deeplink.scheduler.slurm.command import Finished
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL
from tests.cluster.jobs import folder_of, submit

pytestmark = [pytest.mark.cluster]


def field(cluster: Sandbox, job: int, name: str) -> str:
    shown = cluster.run(CTL, ["scontrol", "show", "job", str(job), "--oneliner"]).stdout
    return next(word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}="))


def both(cluster: Sandbox, words: list[str], stdin: str = "") -> tuple[Finished, Finished]:
    ours = cluster.run(CTL, ["deeplink", "sbatch", *words], stdin=stdin)
    return cluster.run(CTL, ["sbatch", *words], stdin=stdin), ours


@pytest.mark.parametrize(
    "words",
    [
        ["--no-such-option=1", "x.sh"],
        ["no-such-script.sh"],
        ["-N", "2", "-p", "nowhere", "--wrap", "true"],
        ["--version"],
        ["--test-only", "-N1", "--wrap", "true", "--begin=now+1hour", "-p", "nowhere"],
    ],
)
def test_what_sbatch_says_and_how_it_ends_is_sbatchs_own(sandbox: Sandbox, words: list[str]) -> None:
    stock, ours = both(sandbox, words)
    assert (ours.code, ours.stdout, ours.stderr) == (stock.code, stock.stdout, stock.stderr)


def test_an_option_that_nobody_knows_is_named_where_it_may_take_the_script_for_its_value(sandbox: Sandbox) -> None:
    _, ours = both(sandbox, ["--no-such-option", "x.sh"])
    assert ours.code == 2
    assert "--no-such-option" in ours.stderr


def test_a_submitted_job_is_restartable_and_outlives_a_node(sandbox: Sandbox) -> None:
    stock, ours = both(sandbox, ["-N1", "-o", "/dev/null", "--wrap", "true"])
    assert ours.code == 0
    assert ours.stdout.rstrip("0123456789\n") == stock.stdout.rstrip("0123456789\n") == "Submitted batch job "
    job = int(ours.stdout.split()[-1])
    assert field(sandbox, job, "Requeue") == "1"
    parsable = sandbox.run(CTL, ["deeplink", "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "true"])
    assert parsable.stdout.strip().isdigit()


def test_the_scripts_own_words_win_and_its_arguments_arrive(sandbox: Sandbox) -> None:
    folder = folder_of(sandbox)
    script = folder / "own.sh"
    script.write_text(f'#!/bin/bash\n#SBATCH --no-requeue -J "my job"\nprintf "%s|" "$@" > {folder}/said\n')
    done = sandbox.run(
        CTL, ["deeplink", "sbatch", "-W", "-o", "/dev/null", str(script), "a b", "$x", "--deeplink-shim"]
    )
    assert done.code == 0, done.stderr
    job = int(done.stdout.split()[-1])
    assert field(sandbox, job, "Requeue") == "0"
    assert (folder / "said").read_text() == "a b|$x|--deeplink-shim|"


def test_a_script_on_standard_input(sandbox: Sandbox) -> None:
    folder = folder_of(sandbox)
    script = f"#!/bin/bash\n#SBATCH --no-requeue\necho here > {folder}/said\n"
    done = sandbox.run(CTL, ["deeplink", "sbatch", "-W", "-o", "/dev/null"], stdin=script)
    assert done.code == 0, done.stderr
    assert field(sandbox, int(done.stdout.split()[-1]), "Requeue") == "0"
    assert (folder / "said").read_text() == "here\n"


def test_the_exit_code_of_a_waited_for_job_is_passed_on(sandbox: Sandbox) -> None:
    done = sandbox.run(CTL, ["deeplink", "sbatch", "-W", "-o", "/dev/null", "--wrap", "exit 7"])
    assert done.code == 7


def test_spares_become_the_default_of_run(sandbox: Sandbox) -> None:
    job = submit(
        sandbox, "-N3 --deeplink-spares 1", "deeplink run --dry-run --json -- true", program="deeplink sbatch"
    )
    job.await_end()
    assert '"spares": ["' in job.output(), job.told()
