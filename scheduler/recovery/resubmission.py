"""The command line and environment that submit a job again, and our part of Slurm's comments; pure.

jobs/17/submission.json     0600, kept by `deeplink sbatch --deeplink-resubmit=on`: command, script, environment
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from deeplink.core.text import printable
from deeplink.scheduler.recovery.evidence import TAG
from deeplink.scheduler.slurm.nodeset import fold, unfold
from deeplink.scheduler.slurm.sbatch_options import SBATCH

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deeplink.core.types import NodeName
    from deeplink.scheduler.slurm.sbatch_options import CommandLine
    from deeplink.scheduler.slurm.submission import Submitted

LONGEST = 200  # characters of ours: squeue and sinfo print a comment on one line
_JOINT = " | "
_OURS = re.compile(rf"(?:^|{re.escape(_JOINT)}){re.escape(TAG)}.*\Z", re.DOTALL)


def comment_of(text: str) -> str:
    r"""Return a text as it can stand in a comment: one line, not too long.

    >>> comment_of("two\nlines")
    'two lines'
    """
    line = printable(" ".join(text.split()))
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."


def ours_in_comment(comment: str) -> str:
    """Return what of a comment is ours; empty where nothing is.

    >>> ours_in_comment("mine | deeplink: held"), ours_in_comment("of deeplink: I know nothing")
    ('deeplink: held', '')
    """
    found = _OURS.search(comment)
    return found[0].removeprefix(_JOINT) if found else ""


def with_our_comment(comment: str, ours: str) -> str:
    """Return a comment with our words behind those of others, in place of what we said before.

    >>> with_our_comment("mine | deeplink: old", "deeplink: new"), with_our_comment("", "deeplink: new")
    ('mine | deeplink: new', 'deeplink: new')
    """
    theirs = _OURS.sub("", comment)
    return _JOINT.join(filter(None, (theirs, ours)))


SCRIPT_NAME = "resubmitted.sh"
MOST_GENERATIONS = 8  # so often a job is submitted again, one after the other; then somebody should look at it

_DEPENDENCIES = "dependency"
_REPLACED = frozenset({"begin", "comment", "exclude", "hold", "job-name", "parsable", "wait"})
_ONE_OF_MANY = {
    "array": "it is an array: its tasks are restarted by Slurm alone",
    _DEPENDENCIES: "it was submitted with --dependency, which may not be true any more",
    "clusters": "it was submitted to a cluster by name",
}
_ENV_OF_MANY = ("SBATCH_ARRAY_INX", "SBATCH_CLUSTERS")
_ENV_DROPPED = ("SBATCH_WAIT", "SBATCH_QUIET")


def why_not(submitted: Submitted, bad: Iterable[NodeName]) -> str:
    """Return why a job is not submitted again; empty where it may be."""
    line = SBATCH.parse(submitted.argv[1:])
    scripted = _scripted(submitted)
    if ":" in line.rest or scripted.rest:
        return "it is a job of several components"
    for name, why in _ONE_OF_MANY.items():
        if line.last(name) or scripted.last(name):
            return why
    if any(name in submitted.env for name in _ENV_OF_MANY):
        return _ONE_OF_MANY["array"]
    named = line.last("nodelist") or scripted.last("nodelist")
    if named and {*unfold(named.value or "")} & {*bad}:
        return "its user named the lost node"
    if submitted.generation >= MOST_GENERATIONS:
        return f"it was submitted again {MOST_GENERATIONS} times"
    return ""


def _scripted(submitted: Submitted) -> CommandLine:
    return SBATCH.of_script(submitted.script or "")


def depends_on(job: int, dependencies: Iterable[str]) -> bool:
    """Whether one of these dependencies, in squeue's words, is on a job.

    >>> depends_on(17, ["afterok:17(unfulfilled)"]), depends_on(17, ["afterany:170_*(unfulfilled)", "(null)"])
    (True, False)
    """
    wanted = re.compile(rf"(?<![0-9]){job}(?![0-9])")
    return any(wanted.search(text) for text in dependencies)


def token_of(attempt: object, began_unix: float) -> str:
    """Return what the new job carries in its comment: by it, it is found again, whoever looks.

    >>> token_of("17.0.2", 1764000000.4)
    'deeplink: in place of 17.0.2@1764000000'
    """
    return f"{TAG}in place of {attempt}@{began_unix:.0f}"


def left_for(replacement: int) -> str:
    """Return what the old job carries in its comment before it is cancelled."""
    return f"{TAG}resubmitted as {replacement}"


def resubmit_argv(
    submitted: Submitted, *, script: str, name: str, comment: str, mark: str, excluded: Sequence[NodeName]
) -> list[str]:
    """Return the command that submits the job again, held: nothing starts before the old one is cancelled."""
    line = SBATCH.parse(submitted.argv[1:])
    kept = [word for option in line.options if option.name not in _REPLACED for word in option.words]
    ours = ["--parsable", "--hold", f"--job-name={name}", f"--comment={with_our_comment(comment, mark)}"]
    ours += [f"--exclude={fold(excluded)}"] if excluded else []
    # Its time to begin has come once: it is not to wait for `now+8hours` again.
    ours += ["--begin=now"] if line.last("begin") or _scripted(submitted).last("begin") else []
    return ["sbatch", *ours, *kept, *([] if submitted.script is None else [script, *line.rest[1:]])]


def resubmit_env(submitted: Submitted) -> dict[str, str]:
    """Return the environment to submit in."""
    return {name: value for name, value in submitted.env.items() if name not in _ENV_DROPPED}
