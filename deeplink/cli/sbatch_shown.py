"""`deeplink sbatch --dry-run`: the command, what the script says itself, and the placement with its reasons."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING

from deeplink.scheduler.slurm.options import directives
from deeplink.scheduler.slurm.submission import DIRECTIVE
from deeplink.scheduler.wish.decision import HintKind
from deeplink.text import counted

if TYPE_CHECKING:
    from deeplink.cli.sbatch_placing import Placed
    from deeplink.scheduler.wish.decision import Decision, NodeChoice

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
        HintKind.NODES: f"{counted(len(decision.nodes), 'node')} wished by name",
        HintKind.SWITCHES: f"{counted(decision.switches, 'switch')} at most wished, for {decision.patience_s} s",
        HintKind.NOTHING: "nothing wished",
    }[decision.kind]
    said = [f"placement: {wished}", f"  because: {decision.words}"]
    said += [f"  note: {note}" for note in decision.notes]
    if decision.candidates:
        said.append(f"  cost: {decision.cost}")
        unit = "step" if decision.predicted else "cost"
        said.append(f"  {unit:>12} {'leaves':>6} {'crossings':>9} {'local':>6}  nodes")
    said += [_row(option) for option in decision.candidates]
    if decision.own:
        said.append(f"{_row(decision.own)}  <- Slurm's own choice")
    if decision.predicted:
        said += ["  the first one's step:", *(f"    {line}" for line in decision.predicted)]
    return said


def _row(option: NodeChoice) -> str:
    price = f"{option.cost:>12.2f}" if option.step_s is None else f"{1e3 * option.step_s:>9.1f} ms"
    nodes = ",".join(option.nodes[:_MOST_NODES]) + (",..." if len(option.nodes) > _MOST_NODES else "")
    given_up = f"  ({'; '.join(option.given_up)})" if option.given_up else ""
    return f"  {price} {option.leaves:>6} {option.crossings:>9} {option.percent_local:>5.0f}%  {nodes}{given_up}"
