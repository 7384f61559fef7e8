"""What the machines of a sandbox can do, whatever they are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deeplink.scheduler.sandbox.processes import ProcessEntry, ProcessId


class Hardware(Protocol):
    """The running machines of one sandbox."""

    def enter(self, machine: str, argv: Sequence[str], env: Mapping[str, str], *, root: bool) -> list[str]:
        """Return the command that runs `argv` on a machine, in the user's home.

        Raises:
            NotRunningError: the machine is powered off.
            NotRootError: to be root there takes being root here.
        """
        ...

    def cut(self, part: str) -> None:
        """Take the cable out that connects a machine, leaf or spine to the switch above.

        Raises:
            NoNetworkError: there are no cables.
        """
        ...

    def heal(self, part: str) -> None:
        """Put the cable back in; raises what `cut` raises."""
        ...

    def crash(self, machine: str, *, keep_link: bool) -> None:
        """End all processes of a machine at once, its link cut first unless that is kept.

        Raises:
            NotRunningError: the machine is powered off already.
        """
        ...

    def boot(self, machine: str, timeout_s: float) -> None:
        """Start a crashed machine; on a running one start its daemon if that is gone, and heal its link.

        Raises:
            BootError: it did not come up in time.
        """
        ...

    def process_1(self, machine: str) -> ProcessId | None:
        """Return the process that all others of a machine end with; None when it is powered off."""
        ...

    def daemon(self, machine: str, processes: Mapping[int, ProcessEntry]) -> int | None:
        """Return the number, on the host, of a machine's Slurm daemon; None when it does not run."""
        ...

    def links(self) -> dict[str, bool]:
        """Return each cable by what hangs on it, and whether it is whole; empty where there are none."""
        ...

    def end(self) -> None:
        """End every process of the sandbox.

        Raises:
            BootError: one cannot be ended.
        """
        ...
