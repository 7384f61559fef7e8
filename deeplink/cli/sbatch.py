"""`deeplink sbatch`: sbatch, with what recovery needs and a wish for nodes. Nothing heavy is imported."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deeplink.scheduler.slurm.submission import SubmissionError, checked, in_script, submission, understood
from deeplink.verbatim import Verbatim

if TYPE_CHECKING:
    from deeplink.cli.sbatch_placing import Placed
    from deeplink.scheduler.slurm.command import Runner
    from deeplink.scheduler.slurm.submission import Ours, SbatchLine, Submission
    from deeplink.scheduler.wish.decision import Ask
    from deeplink.types import NodeName

PING_S = 10.0
"""How long slurmctld may take to answer: longer than Slurm's own clients take to turn to a backup controller."""
_STDIN = frozenset({"/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"})
MOST_SCRIPT = 16 << 20  # bytes; Slurm's own bound (max_script_size) is 4 MiB by default

_EPILOG = """
Everything is sbatch's own: options, #SBATCH lines, the line it prints, its exit code. Added, unless you say
otherwise (on the command line, in the environment or in the script): --requeue --open-mode=append, --no-kill for a
job with spares, the stand-ins or `deeplink run` in its script, and a wish for good nodes (docs/placing.md), unless
you choose nodes or switches yourself.

\b
Options of ours, before the script, or in it as `#DEEPLINK --spares 1`, without the prefix:
  --deeplink-spares N       nodes of the job that rest until another is lost; default of `deeplink run --spares`
  --deeplink-shim           srun and torchrun of the script become `deeplink run`; the script stays as it is
  --deeplink-data NAME,...  packed datasets it reads: nodes that hold them are better
  --deeplink-patience TIME  how long it may be made to wait for fewer leaves, as of --time [default: 0, not at all]
  --deeplink-profile FILE   what its steps compute, send and read (docs/cost-model.md): nodes are compared by the
                            predicted step
  --deeplink-place on|off   whether nodes are wished for at all
  --deeplink-resubmit on|off
                            whether it may be submitted anew, under another id, where nothing else helps it after
                            a node was lost (docs/watchdog.md) [default: off, or the setting `resubmit`]

\b
Before the script alone:
  --deeplink-dry-run        print the command, the placement and the reasons; submit nothing (also --dry-run)
  --deeplink-json           print that as JSON

\b
Examples:
  deeplink sbatch -N 9 --gres=gpu:8 --deeplink-spares 1 train.sh --epochs 90
  deeplink sbatch -N 4 --exclusive --deeplink-data imagenet --dry-run train.sh
  deeplink sbatch --deeplink-shim -N 8 old-script-with-srun.sh
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
    if not request.dry_run and not _submits(request):
        _leave_to_sbatch(request, made)
        return
    ask = _ask(request, ours, script)
    run = _asked_early(ask)
    from deeplink.cli.sbatch_placing import placed, submitted
    from deeplink.scheduler.slurm.command import end_unfinished

    try:
        found = placed(request, ours, ask, made, stdin=script if piped else "", run=run)
        found = found.kept(request, script)
    except BaseException:
        end_unfinished()  # the question, where its answer is not wanted any more
        raise
    if request.dry_run:
        from deeplink.cli.sbatch_shown import shown

        click.echo(shown(found, script, as_json=request.as_json))
        return
    if found.unasked_controller:
        _ask_controller()
        _say_why(found)
    sys.exit(submitted(found))


def _ask(request: SbatchLine, ours: Ours, script: str) -> Ask:
    """Return what the job asks.

    Raises:
        SubmissionError: options contradict each other.
        AmountError: the patience is no time.
        ProfileError, ModelInputError: the profile is none.
    """
    from deeplink.scheduler.slurm.options import SBATCH
    from deeplink.scheduler.wish.amounts import seconds_of
    from deeplink.scheduler.wish.ask import ask_of

    scripted = SBATCH.of_script(script)
    ask = ask_of(
        request.line,
        scripted,
        os.environ,
        _unfold,
        data=ours.data,
        patience_s=None if ours.patience is None else seconds_of(ours.patience),
        profile="" if ours.profile is None else _profile(Path(ours.profile)),
        het=len(request.lines) > 1 or bool(scripted.rest),
        place=ours.place,
    )
    checked(ours, ask.nodes)
    return ask


def _profile(path: Path) -> str:
    """Return what the file says, as the job's record keeps it.

    Raises:
        SubmissionError: it cannot be read.
        ProfileError, ModelInputError: it holds something else.
    """
    from deeplink.scheduler.model.profile import profile_from, profile_text

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        why = getattr(problem, "strerror", None) or problem
        raise SubmissionError(f"--deeplink-profile {path}: {why}", "Name a file that can be read.") from problem
    return profile_text(profile_from(text, str(path)))


def _unfold(text: str) -> tuple[NodeName, ...]:
    from deeplink.scheduler.slurm.nodeset import unfold

    return unfold(text)


def _asked_early(ask: Ask) -> Runner:
    """Return a way to run Slurm's commands; where the cluster's state will be wanted, it is asked for already."""
    from deeplink.scheduler.slurm.command import run

    if ask.no_wish:
        return run
    from deeplink.scheduler.wish.question import EarlyQuestion

    return EarlyQuestion()


def _submits(request: SbatchLine) -> bool:
    """Tell whether there will be a job that we can learn the id of."""
    return request.reaches_controller and not request.says("test-only", "quiet")


def _leave_to_sbatch(request: SbatchLine, made: Submission) -> None:
    from deeplink.scheduler.slurm.command import become
    from deeplink.scheduler.slurm.outer import without_outer

    if request.reaches_controller:
        _ask_controller()
    sys.stdout.flush()
    become(made.argv, env={**without_outer(os.environ), **made.changes})


def _say_why(found: Placed) -> None:
    if found.unreachable:
        click.echo(f"deeplink: no nodes are wished for: {found.decision.words}", err=True)


def _ask_controller() -> None:
    """Find out in bounded time that slurmctld hangs; whatever else is wrong, sbatch itself has words for.

    Raises:
        CommandTimeoutError: it does not answer.
    """
    from deeplink.scheduler.slurm.command import CommandError, CommandMissingError, run

    # One that is down is known at once, also to sbatch. Before one that hangs sbatch would stand silent for ever.
    with contextlib.suppress(CommandError, CommandMissingError):
        run(("scontrol", "ping"), timeout_s=PING_S)


def _script_text(name: str | None) -> str:
    """Return a script's text; empty where there is none to read, about which sbatch itself will have words."""
    if name is None:
        return ""
    found: str | None = name
    if not Path(name).is_file():
        import shutil

        found = shutil.which(name)
    try:
        with Path(found or name).open("rb") as file:
            return file.read(MOST_SCRIPT).decode(errors="replace")
    except OSError:
        return ""


def _open_closed_streams() -> None:
    """Where our caller closed a standard stream, there is one all the same, in which nothing is."""
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
        return request, _script_text(name), False
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
    from deeplink.config import load_config
    from deeplink.scheduler.slurm.programs import make_stand_ins

    folder = load_config().state / "shim"
    if not dry_run:
        make_stand_ins(folder)
    return str(folder)
