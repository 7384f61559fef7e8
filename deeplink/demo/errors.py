"""What can go wrong with the demonstration itself."""

from __future__ import annotations

from deeplink.errors import DeepLinkError


class DemoError(DeepLinkError):
    """The story could not be told to its end."""

    def __init__(self, problem: str, said: str = "") -> None:
        detail = f":\n{said.strip()}" if said.strip() else ""
        super().__init__(f"{problem}{detail}", remedy="`make demo KEEP=1` leaves everything up to look at.")
        self.problem, self.said = problem, said


class DemoDataError(DeepLinkError):
    """The folder given is nothing the demonstration can train on."""

    exit_code = 2

    def __init__(self, folder: str, problem: str) -> None:
        super().__init__(
            f"{folder}: {problem}",
            remedy="Give a folder of image files as {train,test}/<class>/<file>, or <class>/<file>.",
        )
        self.folder, self.problem = folder, problem
