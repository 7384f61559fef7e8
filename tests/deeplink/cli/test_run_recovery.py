"""What the options of `deeplink run` say of failing ranks, and the environment in their place."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from deeplink.cli.run import RecoveryOptions, recovery_options


@pytest.mark.parametrize(
    ("arguments", "variable", "hold"),
    [
        ((), None, None),
        (("--hold",), None, True),
        (("--no-hold",), None, False),
        ((), "1", True),
        ((), "0", False),
        (("--hold",), "0", True),
    ],
)
def test_whether_a_job_is_held_may_be_said_and_left_open(
    arguments: tuple[str, ...], variable: str | None, hold: bool | None
) -> None:
    found: list[bool | None] = []

    @click.command()
    @recovery_options
    def command(*, recovery: RecoveryOptions) -> int:
        found.append(recovery.hold)
        return 0

    done = CliRunner().invoke(command, arguments, env={"DEEPLINK_HOLD": variable})
    assert done.exit_code == 0, done.output
    assert found == [hold]
