"""What `deeplink sbatch` makes of a command line, sbatch's own and options of ours; environments of jobs; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.scheduler.slurm.sbatch_options import SBATCH, CommandLine, Grammar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from deeplink.scheduler.slurm.client import Allocation

_PREFIX = "deeplink-"
_VALUED = frozenset({"spares", "data", "patience", "place", "profile", "resubmit"})
_SCRIPTED = _VALUED | {"shim", "paths"}
_FLAGS = frozenset({"shim", "paths", "dry-run", "json"})
_OURS = frozenset(_PREFIX + name for name in _VALUED | _FLAGS) | {"dry-run"}
_GRAMMAR = Grammar(
    valued=SBATCH.valued | {_PREFIX + name for name in _VALUED},
    flags=SBATCH.flags | {_PREFIX + name for name in _FLAGS} | {"dry-run"},
    short=SBATCH.short,
)
# A `#DEEPLINK` line has our options alone, so that they need no prefix there; with it they do as well.
_IN_SCRIPT = Grammar(
    valued=_VALUED | {_PREFIX + name for name in _VALUED},
    flags=frozenset({"shim", "paths", _PREFIX + "shim", _PREFIX + "paths"}),
    short={},
)
DIRECTIVE = "#DEEPLINK"

_RUNS_RANKS = re.compile(r"\bdeeplink\s+run\b")
# What is added, unless any of these is given: on the command line, in the environment, or in the script.
_ADDED = (
    ("--requeue", ("requeue", "no-requeue"), ("SBATCH_REQUEUE", "SBATCH_NO_REQUEUE")),
    ("--no-kill", ("no-kill",), ("SBATCH_NO_KILL",)),
    ("--open-mode=append", ("open-mode",), ("SBATCH_OPEN_MODE",)),
)
SPARES_VARIABLE = "DEEPLINK_SPARES"
PATHS_VARIABLE = "DEEPLINK_PATHS"
SHIM_VARIABLE = "DEEPLINK_SHIM"
"""Names the folder of the stand-ins for srun and torchrun, in a job that uses them."""
_FIRST_SPECIAL = 0xFFFF_FFF0
"""Step numbers from here on are those of the batch script, of salloc's shell and the like (slurm.h)."""
_TASKS = ("SLURM_NTASKS", "SLURM_NPROCS")
_OF_GPUS = {
    "SLURM_GPUS": "Job",
    "SLURM_GPUS_PER_NODE": "Node",
    "SLURM_GPUS_PER_SOCKET": "Socket",
    "SLURM_GPUS_PER_TASK": "Task",
}
LEFT_BEHIND = frozenset(
    (
        "SLURM_RESTART_COUNT",
        *_TASKS,
        "SLURM_NTASKS_PER_NODE",
        "SLURM_NTASKS_PER_CORE",
        "SLURM_NTASKS_PER_SOCKET",
        "SLURM_NTASKS_PER_GPU",
        "SLURM_CPUS_PER_TASK",
        "SLURM_CPUS_PER_GPU",
        *_OF_GPUS,
        "SLURM_TRES_PER_TASK",
        "SLURM_GPU_BIND",
        "SLURM_TRES_BIND",
        "SLURM_MEM_PER_CPU",
        "SLURM_MEM_PER_GPU",
        "SLURM_MEM_PER_NODE",
        "SLURM_DISTRIBUTION",
        "SLURM_OVERCOMMIT",
        "SLURM_THREADS_PER_CORE",
    )
)
"""What a job that submits another one leaves behind in that one's environment: sbatch hands its own on, and of
these Slurm sets only what the new job itself asks for (measured with 22.05.8). No input of sbatch's begins so."""


class SubmissionError(DeepLinkError):
    """A command line asks for something that cannot be done."""

    def __init__(self, problem: str, remedy: str, *, exit_code: int = 2) -> None:
        super().__init__(problem, remedy=remedy, exit_code=exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """Our own options, of the command line or of a script."""

    spares: int | None = None  # nodes that are to rest; None when not said
    shim: bool = False  # whether srun and torchrun of the script are to be ours
    paths: str | None = (
        None  # whose paths `deeplink run` serves from the cache, as its --paths; None when not said
    )
    data: tuple[str, ...] = ()  # datasets that the job will read
    patience: str | None = None  # how long it may wait for better nodes, in Slurm's words; None when not said
    # file that tells how long its steps take, and what they send and read; None when not said
    profile: str | None = None
    place: bool | None = None  # whether a hint for nodes may be made; None when not said
    # once: whether it may be submitted again under another id; without effect, still accepted in scripts
    resubmit: bool | None = None

    def over(self, other: Ours) -> Ours:
        """Return both, these counting more."""
        return Ours(
            spares=other.spares if self.spares is None else self.spares,
            shim=self.shim or other.shim,
            paths=other.paths if self.paths is None else self.paths,
            data=self.data or other.data,
            patience=other.patience if self.patience is None else self.patience,
            profile=other.profile if self.profile is None else self.profile,
            place=other.place if self.place is None else self.place,
            resubmit=other.resubmit if self.resubmit is None else self.resubmit,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SbatchLine:
    """A command line of `deeplink sbatch`, understood."""

    words: tuple[str, ...]  # all of it
    line: CommandLine  # its options and its script
    ours: Ours  # our own options
    dry_run: bool  # whether to print and not to submit
    as_json: bool  # whether to print for machines

    @property
    def lines(self) -> tuple[CommandLine, ...]:
        """The options of each component of the job (`-N1 : -N2 job.sh`); what follows the last is the script."""
        found = [self.line]
        while found[-1].rest[:1] == (":",):
            found.append(SBATCH.parse(found[-1].rest[1:]))
        return tuple(found)

    @property
    def script(self) -> str | None:
        """The script's name; None when it comes by --wrap or from standard input."""
        rest = self.lines[-1].rest
        return rest[0] if rest and not self.says("wrap") else None

    @property
    def from_stdin(self) -> bool:
        """Whether sbatch will read the script from standard input."""
        return not self.lines[-1].rest and not self.says("wrap", "help", "usage", "version")

    @property
    def reaches_controller(self) -> bool:
        """Whether sbatch will talk to this cluster's controller, as far as the command line tells."""
        return not self.says("help", "usage", "version", "clusters")

    def says(self, *names: str) -> bool:
        """Whether one of these options is given, for any component."""
        return any(line.last(name) for line in self.lines for name in names)

    def with_script(self, path: str) -> SbatchLine:
        """Return the same with another script."""
        rest = self.lines[-1].rest
        at = len(self.words) - len(rest)
        words = (*self.words[:at], path, *rest[1:])
        return replace(self, words=words, line=_GRAMMAR.parse(words))


@dataclass(frozen=True, slots=True)
class Submission:
    """What is to be executed: `argv`, in our environment (`without_outer`) with these changes."""

    argv: tuple[str, ...]
    changes: Mapping[str, str] = field(default_factory=dict)

    def with_options(self, options: Sequence[str]) -> Submission:
        """Return the same with further options of sbatch, in place of its own of the same names."""
        words, named = self.argv[1:], {option.name for option in SBATCH.parse(options).options}
        dropped = _places(SBATCH.parse(words), named)
        kept = [word for place, word in enumerate(words) if place not in dropped]
        return Submission((self.argv[0], *options, *kept), self.changes)


def understood(words: Sequence[str]) -> SbatchLine:
    """Read a command line."""
    line = _GRAMMAR.parse(words)
    for option in line.options:
        if option.name.startswith("deeplink") and option.name not in _OURS:
            known = ", ".join(f"--{name}" for name in sorted(_OURS - {"dry-run"}))
            raise SubmissionError(f"there is no option --{option.name}", f"Ours are {known}.")
    request = SbatchLine(
        words=tuple(words),
        line=line,
        ours=_ours(line, _PREFIX),
        dry_run=_flag(line, "deeplink-dry-run") or _flag(line, "dry-run"),
        as_json=_flag(line, "deeplink-json"),
    )
    for one in request.lines:
        if one.unclear is not None:
            strange = one.unclear.words[0]
            raise SubmissionError(
                f"{strange} is an option that is not known here: {one.rest[0]} may be its value, or the script",
                f"Write its value into one word with it ({strange}=VALUE); has it none, put -- before the script.",
            )
    if request.as_json and not request.dry_run:
        raise SubmissionError(
            "--deeplink-json is the form of what --dry-run prints, and that is not asked for",
            "Add --dry-run; what a submission prints is sbatch's own (--parsable).",
        )
    return request


def in_script(script: str) -> Ours:
    """Read the `#DEEPLINK` lines of a script, up to its first line with a command, as sbatch reads its own."""
    line = _IN_SCRIPT.of_script(script, DIRECTIVE)
    strange = next((option.words[0] for option in line.options if not option.known), "") or "".join(line.rest[:1])
    if strange:
        known = ", ".join(f"--{name}" for name in sorted(_SCRIPTED))
        raise SubmissionError(
            f"{DIRECTIVE} {strange}: there is no such option", f"On such lines there are {known}."
        )
    prefixed = any(option.name.startswith(_PREFIX) for option in line.options)
    plain = _ours(line, "")
    return _ours(line, _PREFIX).over(plain) if prefixed else plain


def checked(ours: Ours, nodes: int) -> None:
    """Look for options that contradict each other."""
    if ours.place is False and (ours.data or ours.patience is not None or ours.profile is not None):
        raise SubmissionError(
            "--deeplink-place=off hints at no nodes, and --deeplink-data, --deeplink-patience and "
            "--deeplink-profile say for which",
            "Leave out one or the other.",
        )
    if nodes and ours.spares is not None and ours.spares >= nodes:
        raise SubmissionError(
            f"--deeplink-spares {ours.spares} of {nodes} nodes leaves none to run on",
            "Ask for more nodes with -N, or for fewer spares.",
        )


def _ours(line: CommandLine, prefix: str) -> Ours:
    def value(name: str, means: str) -> str | None:
        option = line.last(prefix + name)
        if option is not None and not option.value:
            raise SubmissionError(f"--{prefix}{name} has no value", f"Give {means}.")
        return None if option is None else option.value

    spares = value("spares", "how many nodes of the job shall rest")
    if spares is not None and not re.fullmatch("[0-9]{1,9}", spares):
        raise SubmissionError(
            f"--{prefix}spares {spares} is no number", "Give how many nodes of the job shall rest."
        )

    def switch(name: str) -> bool | None:
        said = value(name, "on or off")
        if said not in {None, "on", "off"}:
            raise SubmissionError(f"--{prefix}{name}={said} is neither on nor off", "Give one of them.")
        return None if said is None else said == "on"

    return Ours(
        spares=None if spares is None else int(spares),
        shim=_flag(line, f"{prefix}shim"),
        paths=None if (paths := line.last(f"{prefix}paths")) is None else paths.value or "all",
        data=tuple(filter(None, (value("data", "the name of a packed dataset") or "").split(","))),
        patience=value("patience", "a time as of --time, or 0"),
        profile=value("profile", "the file with the job's profile (docs/cost-model.md)"),
        place=switch("place"),
        resubmit=switch("resubmit"),
    )


def _flag(line: CommandLine, name: str) -> bool:
    option = line.last(name)
    if option is not None and option.value is not None:
        raise SubmissionError(f"--{name} takes no value", "Leave the value out.")
    return option is not None


def submission(
    request: SbatchLine, ours: Ours, script_text: str, env: Mapping[str, str], shim_folder: str = ""
) -> Submission:
    """Return what to execute for a command line, without any hint for nodes."""
    scripted = SBATCH.of_script(script_text)
    added = [
        option
        for option, names, variables in _ADDED
        if (option != "--no-kill" or _is_supervised(request, ours, script_text))
        and not request.says(*names)
        and not any(scripted.last(name) for name in names)
        and not any(variable in env for variable in variables)
    ]
    changes: dict[str, str] = {}
    if ours.spares is not None:
        changes[SPARES_VARIABLE] = str(ours.spares)
    if ours.paths is not None:
        changes[PATHS_VARIABLE] = ours.paths
    if ours.shim:
        changes[SHIM_VARIABLE] = shim_folder
        changes["PATH"] = f"{shim_folder}:{env.get('PATH', '')}"
    dropped = _places(request.line, _OURS)
    export = _export(request, scripted, env, tuple(changes)) if changes else None
    if export is not None:
        added.append(f"--export={export}")
        dropped |= _places(request.line, {"export"})
    kept = [word for place, word in enumerate(request.words) if place not in dropped]
    return Submission(("sbatch", *added, *kept), changes)


def _is_supervised(request: SbatchLine, ours: Ours, script_text: str) -> bool:
    """Whether somebody in the job starts its ranks again when a node is lost, as far as can be seen.

    With --no-kill Slurm leaves a job RUNNING whose batch host died (measured): without such a one, for ever.
    """
    wrapped = request.line.last("wrap")
    said = script_text if wrapped is None else wrapped.value or ""
    return ours.shim or ours.spares is not None or _RUNS_RANKS.search(said) is not None


def _places(line: CommandLine, named: AbstractSet[str]) -> set[int]:
    """Return where on the command line options of these names stand."""
    found = (range(option.at, option.at + len(option.words)) for option in line.options if option.name in named)
    return {place for places in found for place in places}


def _export(
    request: SbatchLine, scripted: CommandLine, env: Mapping[str, str], needed: tuple[str, ...]
) -> str | None:
    """Return the --export that lets the needed variables through; None where they pass anyway."""
    said = request.line.last("export")
    lines = scripted.last("export")
    value = said.value if said else env.get("SBATCH_EXPORT", lines.value if lines else None)
    if request.line.last("export-file") or scripted.last("export-file") or "SBATCH_EXPORT_FILE" in env:
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
        f"{option} keeps {', '.join(needed)} from the job, which --deeplink-spares, -paths and -shim work by",
        "Use --export=ALL,..., or call `deeplink run --spares N --paths -- COMMAND` in the script instead.",
    )


def is_in_step(env: Mapping[str, str]) -> bool:
    """Whether the process belongs to a step that srun made.

    From 26.05 on batch scripts have a step's number, too: -5.

    >>> [is_in_step({"SLURM_STEP_ID": number}) for number in ("0", "7", "-5", "4294967290")], is_in_step({})
    ([True, True, False, False], False)
    """
    number = env.get("SLURM_STEP_ID", "")
    return number.isascii() and number.isdigit() and int(number[:20]) < _FIRST_SPECIAL


def without_outer(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment to submit a job with: inside of a job, without what that one would leave behind."""
    return {name: value for name, value in env.items() if name not in LEFT_BEHIND or "SLURM_JOB_ID" not in env}


def not_contradicted(env: Mapping[str, str], told: Allocation, nodes: int) -> dict[str, str]:
    """Return a job's environment without what Slurm's record of the job contradicts.

    What the record cannot tell from the job's own stays: one task of an outer job and one node, say.
    """
    if is_in_step(env):
        return dict(env)
    tasks = _count_in(env, "SLURM_NTASKS")
    # With --ntasks-per-node it tells the most there may be. And of nodes that were lost their tasks are gone.
    fitting = {told.tasks, *range(nodes, nodes * told.tasks_per_node + 1)}
    stale = {name for name, kind in _OF_GPUS.items() if kind not in told.gpus_asked}
    if not told.restarts:  # Slurm sets any other count itself
        stale.add("SLURM_RESTART_COUNT")
    if told.tasks and told.nodes == nodes and tasks not in fitting:
        stale |= {*_TASKS}
    if told.cpus_per_task not in {0, _count_in(env, "SLURM_CPUS_PER_TASK")}:
        stale.add("SLURM_CPUS_PER_TASK")
    if told.tasks_per_node != _count_in(env, "SLURM_NTASKS_PER_NODE"):
        stale.add("SLURM_NTASKS_PER_NODE")
    return {name: value for name, value in env.items() if name not in stale}


def _count_in(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
