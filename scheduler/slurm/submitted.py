"""`submission.json` in a job's folder: what was submitted, for who may have to submit it again.

It holds the environment, and so what may be secret in it: nobody but the user may read it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Self

from deeplink.errors import DeepLinkError
from deeplink.private import private_folder
from deeplink.publish import write_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAME = "submission.json"
FORMAT = 1


class SubmissionFormatError(DeepLinkError):
    """What should be the record of a submission is none that this version can read."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"no record of a submission: {problem}", remedy="It was damaged, or written by another version."
        )
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A submission, as it was made.

    Attributes:
        argv: sbatch, its options, script and arguments; without a wish for nodes.
        script: the script's text; None where --wrap holds it.
        cwd: where it was submitted.
        env: the environment.
        generation: how often it was submitted anew.
        predecessor: the job that it stands for; 0 for the first.
    """

    argv: tuple[str, ...]
    script: str | None
    cwd: str
    env: Mapping[str, str]
    generation: int = 0
    predecessor: int = 0

    def text(self) -> str:
        """Return what `parse` reads."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `text` gave.

        Raises:
            SubmissionFormatError: it is no such thing.
        """
        try:
            found = json.loads(text)
            if found.pop("format") != FORMAT:
                raise SubmissionFormatError("another format")
            return cls(**{**found, "argv": tuple(found["argv"])})
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise SubmissionFormatError(f"{type(problem).__name__}: {problem}") from problem


def keep(folder: Path, submitted: Submitted) -> None:
    """Keep a submission in its job's folder, whole or not at all; makes the folder.

    Raises:
        OSError: it cannot be written.
    """
    private_folder(folder)
    write_text(folder / NAME, submitted.text(), mode=0o600)


def kept(folder: Path) -> Submitted | None:
    """Return how a job was submitted; None where nothing was kept.

    Raises:
        OSError: it is there, and cannot be read.
        SubmissionFormatError: it is something else.
    """
    try:
        return Submitted.parse((folder / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as problem:
        raise SubmissionFormatError(str(problem)) from problem
