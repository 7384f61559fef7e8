"""The grammar of sbatch's and srun's command lines: which options take values, and where the command begins; pure.

Nothing here decides what an option means; whatever is not known is said to be unknown. Imports next to nothing:
`deeplink sbatch` waits for it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

# One table for sbatch(1) and srun(1) of Slurm 22.05.8, 24.11.5 and 26.05.5, as their parsers answered when they
# were asked for each option with a value and without (the answers: tests/data/slurm/options). A version that
# lacks an option says so itself. None of them takes a value of its own in one version and not in another.
_VALUED = """
account acctg-freq bb bbf begin chdir cluster-constraint clusters comment constraint container container-id
container-type core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency
distribution error exclude export extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node
gpus-per-socket gpus-per-task gres gres-flags hint input job-name licenses mail-type mail-user
mcs-label mem mem-bind mem-per-cpu mem-per-gpu mem-update mincpus network nodefile nodelist nodes ntasks
ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket ntasks-per-tres open-mode output partition power
prefer priority profile qos reservation resources segment signal sockets-per-node switches tasks-per-node
thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid wckey
"""
_FLAGS = """
consolidate-segments contiguous exclusive help hold nice no-kill oom-kill-step overcommit oversubscribe propagate
quiet reboot resv-ports spread-job spread-segments stepmgr test-only usage use-min-nodes verbose version
"""
_SHORT = """
A:account B:extra-node-info b:begin C:constraint c:cpus-per-task D:chdir d:dependency e:error
F:nodefile G:gpus H:hold h:help i:input J:job-name k:no-kill L:licenses M:clusters m:distribution
N:nodes n:ntasks O:overcommit o:output p:partition Q:quiet q:qos S:core-spec s:oversubscribe t:time
V:version v:verbose w:nodelist x:exclude
"""
_SRUN_VALUED = """
accel-bind bcast-exclude cpu-bind epilog het-group ignore-signals jobid mpi msg-timeout pack-group prolog relative
slurmd-debug task-epilog task-prolog threads treewidth wait
"""
_SRUN_FLAGS = """
async bcast compress debugger-test disable-status exact external-launcher immediate kill-on-bad-exit label
multi-prog no-allocate overlap parsable preserve-env pty quit-on-interrupt send-libs unbuffered wait-for-children
x11
"""


@dataclass(frozen=True, slots=True)
class SlurmOption:
    """One option as given."""

    name: str  # its long name without dashes; for an unknown one, as it was written
    value: str | None  # what was given with it; None where nothing was
    words: tuple[str, ...]  # the arguments it was written as
    at: int  # the place of the first of them on the command line
    known: bool = True  # whether the grammar has it


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Options, and what follows them: a script or a command with its own arguments."""

    options: tuple[SlurmOption, ...]
    rest: tuple[str, ...]
    # the unknown option right before `rest`, whose value that may begin with; None for none
    unclear: SlurmOption | None = None

    def last(self, name: str) -> SlurmOption | None:
        """Return the option that counts where it is given several times; None if it is not given."""
        return next((option for option in reversed(self.options) if option.name == name), None)


@dataclass(frozen=True, slots=True)
class Grammar:
    """Which options a command has."""

    valued: frozenset[str]  # long names of options with a value of their own (`--name value` and `--name=value`)
    flags: frozenset[str]  # long names of options without, or with an optional value (`--name=value` alone)
    short: Mapping[str, str]  # one letter to the long name it stands for

    def parse(self, words: Sequence[str]) -> CommandLine:
        """Split a command line as GNU getopt_long does that stops at the first non-option (`+`).

        >>> SBATCH.parse(["-N4", "--no-k", "--time", "5", "job.sh", "-x"]).rest
        ('job.sh', '-x')
        """
        options: list[SlurmOption] = []
        place = 0
        while place < len(words) and words[place].startswith("-") and words[place] != "-":
            if words[place] == "--":
                return CommandLine(tuple(options), tuple(words[place + 1 :]))
            found, used = self._long(words, place) if words[place].startswith("--") else self._short(words, place)
            options.extend(found)
            place += used
        unclear = options[-1] if options and place < len(words) and self._may_have_value(options[-1]) else None
        return CommandLine(tuple(options), tuple(words[place:]), unclear)

    def of_script(self, script: str, mark: str = "#SBATCH") -> CommandLine:
        """Split a script's directives."""
        return self.alone(directives(script, mark))

    def alone(self, options: Iterable[str]) -> CommandLine:
        """Split options that no script or command follows: the word behind an unknown option is its value."""
        words = list(options)
        line = self.parse(words)
        while line.unclear is not None:
            words[line.unclear.at : line.unclear.at + 2] = [f"{line.unclear.words[0]}={line.rest[0]}"]
            line = self.parse(words)
        return line

    def _long(self, words: Sequence[str], place: int) -> tuple[list[SlurmOption], int]:
        written, equals, value = words[place][2:].partition("=")
        meant = self._meant(written)
        name, known = (meant[0], True) if len(meant) == 1 else (written, False)
        if meant and self.valued.issuperset(meant) and not equals:
            separate, used = self._following(words, place)
            return [SlurmOption(name, separate, tuple(words[place : place + used]), place, known)], used
        return [SlurmOption(name, value if equals else None, (words[place],), place, known)], 1

    def _meant(self, written: str) -> list[str]:
        """Return the options that a name stands for: itself, or all that it begins."""
        everything = self.valued | self.flags
        return [written] if written in everything else [name for name in everything if name.startswith(written)]

    def _may_have_value(self, option: SlurmOption) -> bool:
        """Whether no one can tell if the word behind an option is its value."""
        if option.known or option.value is not None:
            return False
        meant = self._meant(option.name) if option.words[0].startswith("--") else []
        return not meant or not self.flags.issuperset(meant)

    def _short(self, words: Sequence[str], place: int) -> tuple[list[SlurmOption], int]:
        letters = words[place][1:]
        found = []
        for at, letter in enumerate(letters):
            name = self.short.get(letter)
            if name is None:
                found.append(SlurmOption(letter, None, (words[place],), place, known=False))
            elif name in self.valued:
                if letters[at + 1 :]:
                    return [*found, SlurmOption(name, letters[at + 1 :], (f"-{letters[at:]}",), place)], 1
                value, used = self._following(words, place)
                written = (f"-{letter}", *words[place + 1 : place + used])
                return [*found, SlurmOption(name, value, written, place)], used
            else:
                found.append(SlurmOption(name, None, (f"-{letter}",), place))
        return found, 1

    @staticmethod
    def _following(words: Sequence[str], place: int) -> tuple[str | None, int]:
        """Return the value behind an option, and how many words both take."""
        return (words[place + 1], 2) if place + 1 < len(words) else (None, 1)


def directives(script: str, mark: str = "#SBATCH") -> Iterator[str]:
    r"""Yield the words of a script's `#SBATCH` lines as sbatch reads them, up to the first line with a command.

    With another mark those of lines that begin so.

    >>> list(directives("#!/bin/sh\n#SBATCH -N2 --comment='a b' # why\n\necho\n#SBATCH -N9\n"))
    ['-N2', '--comment=a b']
    """
    for line in script.split("\n"):
        if line.startswith(mark):
            words = line.removeprefix(mark)
            try:
                yield from shlex.split(words, comments=True)
            except ValueError:  # an open quote: sbatch itself will say so
                yield from words.split()
        elif line.strip() and not line.startswith("#"):
            return


def names(text: str) -> frozenset[str]:
    """Return the set of words in a text."""
    return frozenset(text.split())


def _letters(text: str) -> dict[str, str]:
    return dict(pair.split(":") for pair in text.split())


SBATCH = Grammar(
    valued=names(_VALUED + "array batch export-file kill-on-invalid-dep wait-all-nodes wrap"),
    flags=names(_FLAGS + "get-user-env ignore-pbs no-requeue parsable requeue wait"),
    short=_letters(_SHORT + "a:array W:wait"),
)
"""sbatch's part of the table."""


SRUN = Grammar(
    valued=names(_VALUED + _SRUN_VALUED),
    flags=names(_FLAGS + _SRUN_FLAGS),
    short=_letters(
        _SHORT + "E:preserve-env I:immediate K:kill-on-bad-exit l:label r:relative T:threads u:unbuffered "
        "W:wait X:disable-status Z:no-allocate"
    ),
)
"""srun's part of the table."""
