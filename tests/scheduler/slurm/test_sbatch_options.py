"""The grammar of sbatch's and srun's command lines."""

from __future__ import annotations

import pytest

from deeplink.scheduler.slurm.sbatch_options import SBATCH, SRUN, directives


@pytest.mark.parametrize(
    ("words", "options", "rest"),
    [
        ("-N4 job.sh", [("nodes", "4")], ["job.sh"]),
        ("-N 4 job.sh -x", [("nodes", "4")], ["job.sh", "-x"]),
        ("--nodes=4 job.sh", [("nodes", "4")], ["job.sh"]),
        ("--nodes 4 job.sh", [("nodes", "4")], ["job.sh"]),
        ("--no-k job.sh", [("no-kill", None)], ["job.sh"]),
        ("--no-kill=off job.sh", [("no-kill", "off")], ["job.sh"]),
        ("-HkN 2 job.sh", [("hold", None), ("no-kill", None), ("nodes", "2")], ["job.sh"]),
        ("-vvN2 job.sh", [("verbose", None), ("verbose", None), ("nodes", "2")], ["job.sh"]),
        ("-- -odd.sh", [], ["-odd.sh"]),
        ("-W --wrap hello", [("wait", None), ("wrap", "hello")], []),
        ("--nice job.sh", [("nice", None)], ["job.sh"]),
        ("-N", [("nodes", None)], []),
        ("", [], []),
        ("- x", [], ["-", "x"]),
    ],
)
def test_sbatch_lines(words: str, options: list[tuple[str, str | None]], rest: list[str]) -> None:
    line = SBATCH.parse(words.split())
    assert [(option.name, option.value) for option in line.options] == options
    assert list(line.rest) == rest


def test_the_letter_w_waits_with_a_value_in_srun_alone() -> None:
    assert SRUN.parse(["-W", "60", "python"]).rest == ("python",)
    assert SBATCH.parse(["-W", "job.sh"]).rest == ("job.sh",)


def test_what_is_not_known_is_said_to_be_unknown() -> None:
    line = SRUN.parse(["--from-the-future=3", "-j", "python"])
    assert [(option.name, option.known) for option in line.options] == [("from-the-future", False), ("j", False)]


def test_an_ambiguous_abbreviation_is_unknown() -> None:
    assert not SBATCH.parse(["--ntasks-per", "3"]).options[0].known


@pytest.mark.parametrize(
    ("words", "unclear"),
    [
        ("--from-the-future 2 job.sh", "--from-the-future"),
        ("--from-the-future job.sh", "--from-the-future"),
        ("-N2 -j job.sh", "-j"),
        ("--from-the-future=2 job.sh", None),
        ("--from-the-future -- job.sh", None),
        ("--from-the-future -N2 job.sh", None),
        ("--from-the-future", None),
        ("--spread job.sh", None),  # of two, and neither takes a value
        ("--ntasks-per 2 job.sh", None),  # of many, and each takes one
        ("--segment 2 job.sh", None),
    ],
)
def test_behind_an_unknown_option_nobody_can_tell_the_script(words: str, unclear: str | None) -> None:
    found = SBATCH.parse(words.split()).unclear
    assert (found.words[0] if found else None) == unclear


def test_in_a_script_what_follows_an_unknown_option_is_its_value() -> None:
    script = "#!/bin/sh\n#SBATCH --from-the-future 2\n#SBATCH -j 3 --no-requeue\n#SBATCH -N4\n"
    line = SBATCH.of_script(script)
    assert line.last("no-requeue")
    assert (found := line.last("nodes")) is not None
    assert found.value == "4"
    assert line.rest == ()


def test_options_know_where_they_stood() -> None:
    line = SBATCH.parse(["-N", "2", "--export", "A", "job.sh"])
    assert [(option.at, option.words) for option in line.options] == [(0, ("-N", "2")), (2, ("--export", "A"))]


def test_the_last_one_counts() -> None:
    found = SBATCH.parse(["--open-mode=append", "--open-mode=truncate"]).last("open-mode")
    assert found is not None
    assert found.value == "truncate"


def test_directives_end_at_the_first_command_and_survive_an_open_quote() -> None:
    script = "#!/bin/bash\n# words\n#SBATCH -N2 --comment='a b' # why\n\n#SBATCH --requeue\nset -e\n#SBATCH -N9\n"
    assert list(directives(script)) == ["-N2", "--comment=a b", "--requeue"]
    assert list(directives("#SBATCH --comment='open\n")) == ["--comment='open"]
