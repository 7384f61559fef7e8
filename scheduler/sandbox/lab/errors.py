"""What can go wrong in the fault laboratory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.scheduler.sandbox.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Sequence


class UnknownFaultError(SandboxError):
    """There is no fault of this name."""

    exit_code = 2

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(f"there is no fault {name!r}", remedy=f"There are: {' '.join(known)}.")
        self.name, self.known = name, tuple(known)


class NoTargetError(SandboxError):
    """A fault has nothing to hit: no rank runs there, no daemon, no checkpoint lies there."""

    def __init__(self, fault: str, target: str, lacking: str) -> None:
        super().__init__(
            f"{fault}: {lacking}{f' on {target}' if target else ''}",
            remedy="`deeplink sandbox fault --list` says what each hits, `deeplink sandbox status` what is up.",
        )
        self.fault, self.target, self.lacking = fault, target, lacking


class NotPossibleHereError(SandboxError):
    """This sandbox cannot have that fault."""

    exit_code = 2

    def __init__(self, fault: str, problem: str, remedy: str) -> None:
        super().__init__(f"{fault}: {problem}", remedy=remedy)
        self.fault, self.problem = fault, problem


class WoundRecordError(SandboxError):
    """What faults are in effect cannot be read."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(
            f"{path} is damaged ({problem})",
            remedy="Take the sandbox down and bring up another: `deeplink sandbox down`.",
        )
        self.path, self.problem = path, problem
