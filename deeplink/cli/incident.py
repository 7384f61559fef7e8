"""`deeplink incident`: one incident, whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from deeplink.cli.incidents_reading import IncidentName, JournalSet, journal_option

if TYPE_CHECKING:
    from pathlib import Path

_EPILOG = """
N is the number that `deeplink incidents` lists, JOB.N for the journal of a job of yours, or the incident's id.

\b
Examples:
  deeplink incident 12
  deeplink incident 12 --stacks           with where each rank hung
  deeplink incident 4711.2 --json         number 2 of job 4711's own journal, for programs
"""


@click.command("incident", epilog=_EPILOG)
@click.argument("name", metavar="N", type=IncidentName())
@journal_option
@click.option("--stacks", is_flag=True, help="Print the stacks of the ranks in full.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the stacks.")
def command(*, name: str, journal_file: Path | None, stacks: bool, as_json: bool) -> None:
    """Show one incident: evidence, course, actions, cost, and where the ranks hung."""
    from deeplink.cli import incidents_shown

    incidents_shown.shown(JournalSet.found(journal_file).one(name), stacks=stacks, as_json=as_json)
