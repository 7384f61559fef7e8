"""What `deeplink sbatch` makes of a command line: sbatch's own, and three options that recovery needs; pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.slurm.options import SBATCH, CommandLine, Grammar, directives

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_GRAMMAR = Grammar(
    valued=SBATCH.valued | {"deeplink-spares"},
    flags=SBATCH.flags | {"deeplink-shim", "deeplink-dry-run", "dry-run"},
    short=SBATCH.short,
)
_OURS = frozenset({"deeplink-spares", "deeplink-shim", "deeplink-dry-run", "dry-run"})

# What is added, unless any of these is given: on the command line, in the environment, or in the script.
_ADDED = (
    ("--requeue", ("requeue", "no-requeue"), ("SBATCH_REQUEUE", "SBATCH_NO_REQUEUE")),
    ("--no-kill", ("no-kill",), ("SBATCH_NO_KILL",)),
    ("--open-mode=append", ("open-mode",), ("SBATCH_OPEN_MODE",)),
)
SPARES_VARIABLE = "DEEPLINK_SPARES"
SHIM_VARIABLE = "DEEPLINK_SHIM"
"""Names the folder of the stand-ins for srun and torchrun, in a job that uses them."""


class SubmissionError(DeepLinkError):
    """The command line asks for something that cannot be done; nothing was submitted."""

    exit_code = 2

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy=remedy)
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A command line of `deeplink sbatch`, understood.

    Attributes:
        words: all of it.
        line: its options and its script.
        spares: nodes that are to rest; None when not said.
        shim: whether srun and torchrun of the script are to be ours.
        dry_run: whether to print and not to submit.
    """

    words: tuple[str, ...]
    line: CommandLine
    spares: int | None
    shim: bool
    dry_run: bool

    @property
    def script(self) -> str | None:
        """The script's name; None when it comes by --wrap or from standard input."""
        return self.line.rest[0] if self.line.rest and self.line.last("wrap") is None else None

    @property
    def from_stdin(self) -> bool:
        """Whether sbatch will read the script from standard input."""
        return not self.line.rest and not any(
            self.line.last(name) for name in ("wrap", "help", "usage", "version")
        )

    @property
    def reaches_controller(self) -> bool:
        """Whether sbatch will talk to this cluster's controller, as far as the command line tells."""
        return not any(self.line.last(name) for name in ("help", "usage", "version", "clusters"))


@dataclass(frozen=True, slots=True)
class Submission:
    """What is to be executed: `argv`, in our environment with these changes."""

    argv: tuple[str, ...]
    changes: Mapping[str, str] = field(default_factory=dict)


def understood(words: Sequence[str]) -> Wish:
    """Read a command line.

    Raises:
        SubmissionError: an option of ours that does not exist, or has no usable value.
    """
    line = _GRAMMAR.parse(words)
    for option in line.options:
        if option.name.startswith("deeplink") and option.name not in _OURS:
            raise SubmissionError(
                f"there is no option --{option.name}",
                "Ours are --deeplink-spares N, --deeplink-shim, --deeplink-dry-run.",
            )
        if option.name in _OURS - {"deeplink-spares"} and option.value is not None:
            raise SubmissionError(f"--{option.name} takes no value", "Leave the value out.")
    spares = line.last("deeplink-spares")
    if spares is not None and not (spares.value or "").isdigit():
        raise SubmissionError(
            f"--deeplink-spares {spares.value or ''} is no number", "Give how many nodes of the job shall rest."
        )
    return Wish(
        words=tuple(words),
        line=line,
        spares=None if spares is None else int(spares.value or 0),
        shim=line.last("deeplink-shim") is not None,
        dry_run=line.last("deeplink-dry-run") is not None or line.last("dry-run") is not None,
    )


def submission(wish: Wish, script_text: str, env: Mapping[str, str], shim_folder: str = "") -> Submission:
    """Return what to execute for a wish.

    Args:
        wish: the command line.
        script_text: the script, for its `#SBATCH` lines; empty where there is none.
        env: our environment.
        shim_folder: where the stand-ins are, if the wish asks for them.

    Raises:
        SubmissionError: the job would not get the environment it needs.
    """
    in_script = SBATCH.parse(list(directives(script_text)))
    added = [
        option
        for option, names, variables in _ADDED
        if not any(wish.line.last(name) or in_script.last(name) for name in names)
        and not any(variable in env for variable in variables)
    ]
    changes: dict[str, str] = {}
    if wish.spares is not None:
        changes[SPARES_VARIABLE] = str(wish.spares)
    if wish.shim:
        changes[SHIM_VARIABLE] = shim_folder
        changes["PATH"] = f"{shim_folder}:{env.get('PATH', '')}"
    dropped = {
        place for option in wish.line.options if option.name in _OURS for place in _places(option.at, option.words)
    }
    export = _export(wish, in_script, env, tuple(changes)) if changes else None
    if export is not None:
        added.append(f"--export={export}")
        dropped |= {
            place
            for option in wish.line.options
            if option.name == "export"
            for place in _places(option.at, option.words)
        }
    kept = [word for place, word in enumerate(wish.words) if place not in dropped]
    return Submission(("sbatch", *added, *kept), changes)


def _places(at: int, words: Sequence[str]) -> range:
    return range(at, at + len(words))


def _export(wish: Wish, in_script: CommandLine, env: Mapping[str, str], needed: tuple[str, ...]) -> str | None:
    """Return the --export that lets the needed variables through; None where they pass anyway."""
    said = wish.line.last("export")
    scripted = in_script.last("export")
    value = said.value if said else env.get("SBATCH_EXPORT", scripted.value if scripted else None)
    if wish.line.last("export-file") or in_script.last("export-file") or "SBATCH_EXPORT_FILE" in env:
        raise _closed("--export-file", needed)
    if value is None:
        return None
    items = value.split(",")
    if items[0].upper() in {"NONE", "NIL"}:
        raise _closed(f"--export={value}", needed)
    if "PATH" in needed and any(item.startswith("PATH=") for item in items):
        raise _closed(f"--export={value}", ("PATH",))
    if items[0].upper() == "ALL":
        return None
    return ",".join([value, *(name for name in needed if name not in items)])


def _closed(option: str, needed: tuple[str, ...]) -> SubmissionError:
    return SubmissionError(
        f"{option} keeps {', '.join(needed)} from the job, which --deeplink-spares and --deeplink-shim work by",
        "Use --export=ALL,..., or call `deeplink run --spares N -- COMMAND` in the script instead.",
    )
