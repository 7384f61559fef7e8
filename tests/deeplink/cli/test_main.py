"""The command's frame: its table of verbs is true, and it exits as it says."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import deeplink.cli
from deeplink.cli import VERBS, cli
from deeplink.cli.options import FiniteRange
from deeplink.core.errors import DeepLinkError
from tests.waiting import LIMIT_S


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_says_in_its_module_what_the_table_says(verb: str) -> None:
    command = cli.get_command(click.Context(cli), verb)
    assert isinstance(command, click.Command)
    assert command.help
    # The module may say more before the line ends ("..., until SIGTERM."), not something else.
    assert command.help.strip().splitlines()[0].startswith(VERBS[verb].partition(" (")[0].rstrip("."))


def test_the_verb_that_is_meant_is_named() -> None:
    done = CliRunner().invoke(cli, ["incdents"])
    assert done.exit_code == 2
    assert "Did you mean" in done.output
    assert "incidents" in done.output
    assert "mean" not in CliRunner().invoke(cli, ["xyzzy"]).output


def test_a_word_that_is_an_option_behind_two_dashes_is_a_wrong_use() -> None:
    assert CliRunner().invoke(cli, ["--", "--foo"]).exit_code == 2


def test_the_stand_in_that_is_asked_for_help_gives_it() -> None:
    done = CliRunner().invoke(cli, ["shim", "-h"])
    assert done.exit_code == 0
    assert "Stand in for srun" in done.output


def commands() -> list[tuple[str, ...]]:
    """Return every verb, and every verb of a verb."""
    found: list[tuple[str, ...]] = []
    for verb in VERBS:
        command = cli.get_command(click.Context(cli), verb)
        below = command.commands if isinstance(command, click.Group) else ()
        found += [(verb,), *((verb, name) for name in below)]
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_verb_has_help_with_examples_of_itself(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, [*words, "--help"])
    assert done.exit_code == 0, done.output
    assert "Usage:" in done.output
    _, _, examples = done.output.partition("Example")
    assert f"deeplink {words[0]}" in examples


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_no_number_of_a_verb_may_be_nan_or_infinite(words: tuple[str, ...]) -> None:
    found: click.Command = cli
    for word in words:
        assert isinstance(found, click.Group)
        found = found.get_command(click.Context(found), word) or pytest.fail(word)
    for param in found.params:
        assert param.type is not click.FLOAT, param
        assert isinstance(param.type, FiniteRange) or not isinstance(param.type, click.FloatRange), param


def test_every_module_is_a_verb_or_the_part_of_one() -> None:
    for found in pkgutil.iter_modules(deeplink.cli.__path__):
        assert found.name in {*VERBS, "options", "output", "samples"} or found.name.partition("_")[0] in VERBS


def test_no_verb_imports_more_than_click_before_it_is_called() -> None:
    program = """
import sys, click
from deeplink.cli import VERBS, cli
before = set(sys.modules)
for verb in VERBS:
    cli.get_command(click.Context(cli), verb)
tops = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(tops - {*sys.stdlib_module_names, "benchmarks", "click", "deeplink"}))
"""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.split() == []


def test_help_lists_every_verb() -> None:
    said = CliRunner().invoke(cli, ["--help"]).output
    for verb in VERBS:
        assert f"\n  {verb} " in said


def test_an_unknown_verb_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["deeplink", "train"])
    with pytest.raises(SystemExit) as ended:
        deeplink.cli.main()
    assert ended.value.code == 2
    assert "No such command 'train'" in capsys.readouterr().err


class _FullError(DeepLinkError):
    exit_code = 9


def test_our_errors_are_one_line_and_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(**_options: object) -> None:
        raise _FullError("the SSD is full", remedy="Make room.")

    monkeypatch.setattr(cli, "main", fails)
    with pytest.raises(SystemExit) as ended:
        deeplink.cli.main()
    assert ended.value.code == 9
    assert capsys.readouterr().err == "deeplink: the SSD is full\n  Make room.\n"


def test_a_misspelt_setting_is_pointed_out_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPLINK_STOER", "/ssd")
    monkeypatch.setenv("DEEPLINK_STATE", str(tmp_path))
    done = CliRunner().invoke(cli, ["run", "--dry-run", "--local", "1", "--", "true"])
    assert done.exit_code == 0
    assert done.stderr == "deeplink: DEEPLINK_STOER is set and means nothing; is DEEPLINK_STORE meant?\n"


def test_help_lists_the_exit_codes() -> None:
    said = CliRunner().invoke(cli, ["--help"]).output.split("Exit codes:")[1]
    assert set(re.findall(r"\b\d+\b", said)) == {"0", "1", "2", "75", "77", "127", "130"}


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(**_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupted)
    with pytest.raises(SystemExit) as ended:
        deeplink.cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_what_is_logged_and_what_went_wrong_reach_the_terminal_without_escapes(tmp_path: Path) -> None:
    program = r"""
import logging, sys
from deeplink.cli import cli, main
cli.main(["ls"], standalone_mode=False)
logging.getLogger("ranks").warning("job %s", "\x1b[2J\nroot# rm")
sys.argv = ["deeplink", "info", "\x1b[2Jgone"]
main()
"""
    raw = subprocess.run(
        [sys.executable, "-c", program],
        env={"HOME": str(tmp_path)},
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    ).stderr
    assert b"\x1b" not in raw
    assert b"job \\x1b[2J\\nroot# rm\n" in raw
    assert b"\\x1b[2Jgone" in raw
