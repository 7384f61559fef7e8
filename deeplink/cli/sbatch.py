"""`deeplink sbatch`: sbatch, with what recovery needs and a hint for nodes; imports nothing heavy."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deeplink.cli.options import Verbatim, script_text
from deeplink.cli.output import warn
from deeplink.core.text import counted
from deeplink.scheduler.placement.hint.decision import HintKind
from deeplink.scheduler.slurm.nodeset import unfold
from deeplink.scheduler.slurm.sbatch_options import directives
from deeplink.scheduler.slurm.submission import (
    DIRECTIVE,
    SubmissionError,
    checked,
    in_script,
    submission,
    understood,
)

if TYPE_CHECKING:
    from deeplink.ops.submit import Placed
    from deeplink.scheduler.placement.hint.decision import Ask, Decision, NodeChoice
    from deeplink.scheduler.slurm.submission import Ours, SbatchLine, Submission

PING_S = 10.0
"""How long slurmctld may take to answer: longer than Slurm's own clients take to turn to a backup controller."""
_STDIN = frozenset({"/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"})
_MOST_NODES = 8  # that a dry run names
MOST_SCRIPT = 16 << 20  # bytes; Slurm's own bound (max_script_size) is 4 MiB by default

_EPILOG = """
Everything is sbatch's own: options, #SBATCH lines, the line it prints, its exit code. Added, unless you say
otherwise (on the command line, in the environment or in the script): --requeue --open-mode=append, --no-kill for a
job with spares, the stand-ins or `deeplink run` in its script, and a hint for good nodes (docs/placing.md), unless
you choose nodes or switches yourself.

\b
Options of ours, before the script, or in it as `#DEEPLINK --spares 1`, without the prefix:
  --deeplink-spares N       nodes of the job that rest until another is lost; default of `deeplink run --spares`
  --deeplink-shim           srun and torchrun of the script become `deeplink run`; the script stays as it is
  --deeplink-paths[=NAME,...]
                            its files below packed folders come from the cache, as of `deeplink run --paths`
  --deeplink-data NAME,...  packed datasets it reads: nodes that hold them are better
  --deeplink-patience TIME  how long it may be made to wait for fewer leaves, as of --time [default: 0, not at all]
  --deeplink-profile FILE   what its steps compute, send and read (docs/cost-model.md): nodes are compared by the
                            predicted step
  --deeplink-place on|off   whether nodes are hinted at all
  --deeplink-resubmit on|off
                            without effect: a job restarts under its own id alone (docs/watchdog.md)

\b
Before the script alone:
  --deeplink-dry-run        print the command, the placement and the reasons; submit nothing (also --dry-run)
  --deeplink-json           print that as JSON

\b
Examples:
  deeplink sbatch -N 9 --gres=gpu:8 --deeplink-spares 1 train.sh --epochs 90
  deeplink sbatch -N 4 --exclusive --deeplink-data imagenet --dry-run train.sh
  deeplink sbatch --deeplink-shim -N 8 old-script-with-srun.sh
  deeplink sbatch --deeplink-shim --deeplink-paths -N 1 script-that-reads-a-folder.sh
  deeplink sbatch -N 2 --wrap 'deeplink run -- python train.py'
"""


@click.command("sbatch", cls=Verbatim, epilog=_EPILOG, options_metavar="[SBATCH OPTIONS]")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGS]...]")
def command(words: tuple[str, ...]) -> None:
    """Submit a batch script: sbatch, watched and restartable."""
    _open_closed_streams()
    request, script, piped = _with_script(understood(words))
    ours = request.ours.over(in_script(script))
    folder = _shim_folder(dry_run=request.dry_run) if ours.shim else ""
    made = submission(request, ours, script, os.environ, folder)
    # Else there will be no job that we can learn the id of.
    submits = request.reaches_controller and not request.says("test-only", "quiet")
    if not request.dry_run and not submits:
        _leave_to_sbatch(request, made)
        return
    ask = _ask(request, ours, script)
    from deeplink.scheduler.placement.hint.ask import ARGUMENTS
    from deeplink.scheduler.slurm.command import StartedEarly, end_unfinished, run

    # Where the cluster's state will be wanted, Slurm is asked already.
    asking = run if ask.no_wish else StartedEarly(ARGUMENTS)
    from deeplink.ops.submit import placed, submitted

    try:
        found = placed(request, ours, ask, made, script=script, piped=piped, run=asking)
    except BaseException:
        end_unfinished()  # the question, where its answer is not wanted any more
        raise
    if request.dry_run:
        click.echo(shown(found, script, as_json=request.as_json))
        return
    if found.unasked_controller:
        _ask_controller()
        if found.made.unreachable:
            warn(f"no nodes are hinted: {found.decision.words}")
    sys.exit(submitted(found))


def _ask(request: SbatchLine, ours: Ours, script: str) -> Ask:
    from deeplink.scheduler.placement.hint.ask import ask_of, seconds_of
    from deeplink.scheduler.slurm.sbatch_options import SBATCH

    scripted = SBATCH.of_script(script)
    ask = ask_of(
        request.line,
        scripted,
        os.environ,
        unfold,
        data=ours.data,
        patience_s=None if ours.patience is None else seconds_of(ours.patience),
        profile="" if ours.profile is None else _profile(Path(ours.profile)),
        het=len(request.lines) > 1 or bool(scripted.rest),
        place=ours.place,
    )
    checked(ours, ask.nodes)
    return ask


def _profile(path: Path) -> str:
    """Return what the file says, as the job's record keeps it."""
    from deeplink.scheduler.placement.model import profile_from, profile_text

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        why = getattr(problem, "strerror", None) or problem
        raise SubmissionError(f"--deeplink-profile {path}: {why}", "Name a file that can be read.") from problem
    return profile_text(profile_from(text, str(path)))


def _leave_to_sbatch(request: SbatchLine, made: Submission) -> None:
    from deeplink.scheduler.slurm.command import become
    from deeplink.scheduler.slurm.submission import without_outer

    if request.reaches_controller:
        _ask_controller()
    sys.stdout.flush()
    become(made.argv, env={**without_outer(os.environ), **made.changes})


def _ask_controller() -> None:
    """Find out in bounded time that slurmctld hangs; whatever else is wrong, sbatch itself has words for."""
    from deeplink.scheduler.slurm.command import CommandError, CommandMissingError, run

    # One that is down is known at once, also to sbatch. Before one that hangs sbatch would stand silent for ever.
    with contextlib.suppress(CommandError, CommandMissingError):
        run(("scontrol", "ping"), timeout_s=PING_S)


def _open_closed_streams() -> None:
    """Open an empty stream for each standard stream that the caller closed."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: that of the stream
            os.set_inheritable(opened, True)  # noqa: FBT003 - it has no name
            setattr(sys, name, os.fdopen(opened, "r" if name == "stdin" else "w"))


def _with_script(request: SbatchLine) -> tuple[SbatchLine, str, bool]:
    """Return the request with a script that can be read again, its text, and whether standard input holds it."""
    name = request.script
    if request.from_stdin or name in _STDIN:
        if sys.stdin.isatty():
            return request, "", False
        return request, _kept(0, 0), True
    if name is None or not Path(name).is_fifo():  # as of `<(...)`
        return request, script_text(name, MOST_SCRIPT) if name else "", False
    numbered = re.fullmatch(r"/(?:dev|proc/self)/fd/([0-9]{1,9})", name)
    try:
        reading = os.open(name, os.O_RDONLY)
    except OSError:
        return request, "", False
    number = int(numbered[1]) if numbered else reading  # Slurm names the job after it
    return request.with_script(f"/proc/{os.getpid()}/fd/{number}"), _kept(reading, number), False


def _kept(reading: int, number: int) -> str:
    """Read the script from what can be read once, and leave sbatch an open file that holds it again."""
    with os.fdopen(os.dup(reading), "rb") as file:
        script = file.read(MOST_SCRIPT + 1)
    if len(script) > MOST_SCRIPT:
        raise SubmissionError(f"the script has over {MOST_SCRIPT} bytes", "Is it a script at all?")
    kept = os.memfd_create("deeplink-script")
    with os.fdopen(os.dup(kept), "wb") as file:
        file.write(script)
    os.lseek(kept, 0, os.SEEK_SET)
    os.dup2(kept, number)
    return script.decode(errors="surrogateescape")


def _shim_folder(*, dry_run: bool) -> str:
    from deeplink.core.config import load_config
    from deeplink.scheduler.slurm.command import make_stand_ins

    folder = load_config().state / "shim"
    if not dry_run:
        make_stand_ins(folder)
    return str(folder)


def shown(found: Placed, script: str, *, as_json: bool) -> str:
    """Return what would be done, for people or for machines."""
    lines = {mark: list(directives(script, mark)) for mark in ("#SBATCH", DIRECTIVE)}
    if as_json:
        made = {"command": list(found.submission.argv), "environment": dict(found.submission.changes)}
        facts = {"directives": lines, "ask": asdict(found.ask), "decision": asdict(found.decision)}
        return json.dumps({**made, **facts})
    changes = [f"{name}={shlex.quote(value)}" for name, value in found.submission.changes.items()]
    said = [" ".join([*changes, shlex.join(found.submission.argv)])]
    said += [f"script: {mark} {shlex.join(words)}" for mark, words in lines.items() if words]
    return "\n".join([*said, *_placement(found.decision)])


def _placement(decision: Decision) -> list[str]:
    hint = {
        HintKind.NODES: f"{counted(len(decision.nodes), 'node')} hinted by name",
        HintKind.SWITCHES: f"{counted(decision.switches, 'switch')} at most hinted, for {decision.patience_s} s",
        HintKind.NOTHING: "nothing hinted",
    }[decision.kind]
    said = [f"placement: {hint}", f"  because: {decision.words}"]
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
