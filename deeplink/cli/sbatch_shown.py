"""`deeplink sbatch --dry-run`: the command, what the script says itself, and the placement with its reasons."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.options import directives
from deeplink.scheduler.slurm.submission import DIRECTIVE
from deeplink.scheduler.wish.decision import Kind
from deeplink.wording import counted

if TYPE_CHECKING:
    from deeplink.cli.sbatch_placing import Placed
    from deeplink.scheduler.wish.decision import Decision

_MOST_NODES = 8


def shown(found: Placed, script: str, *, as_json: bool) -> str:
    """Return what would be done, for people or for machines."""
    lines = {mark: list(directives(script, mark)) for mark in ("#SBATCH", DIRECTIVE)}
    if as_json:
        return json.dumps(
            {
                "command": list(found.submission.argv),
                "environment": dict(found.submission.changes),
                "directives": lines,
                "ask": asdict(found.ask),
                "decision": asdict(found.decision),
            }
        )
    changes = [f"{name}={shlex.quote(value)}" for name, value in found.submission.changes.items()]
    said = [" ".join([*changes, shlex.join(found.submission.argv)])]
    said += [f"script: {mark} {shlex.join(words)}" for mark, words in lines.items() if words]
    return "\n".join([*said, *_placement(found.decision)])


def _placement(decision: Decision) -> list[str]:
    wished = {
        Kind.NODES: f"{counted(len(decision.nodes), 'node')} wished by name",
        Kind.SWITCHES: f"{counted(decision.switches, 'switch').replace('switchs', 'switches')} at most wished, "
        f"for {decision.patience_s} s",
        Kind.NOTHING: "nothing wished",
    }[decision.kind]
    said = [f"placement: {wished}", f"  because: {decision.words}"]
    said += [f"  note: {note}" for note in decision.notes]
    if decision.candidates:
        said.append(f"  {'cost':>7} {'leaves':>6} {'crossings':>9} {'local':>6}  nodes")
    for option in decision.candidates:
        nodes = ",".join(option.nodes[:_MOST_NODES]) + (",..." if len(option.nodes) > _MOST_NODES else "")
        given_up = f"  ({'; '.join(option.given_up)})" if option.given_up else ""
        said.append(
            f"  {option.cost:>7.2f} {option.leaves:>6} {option.crossings:>9} {option.percent_local:>5.0f}%  "
            f"{nodes}{given_up}"
        )
    return said
