"""A message as JSON on the standard input of a program of the site's own."""

from __future__ import annotations

import contextlib
import json
import tempfile
from typing import IO, TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.slurm.command import DEVNULL, TimeoutExpired, kill_group, spawn
from deeplink.scheduler.watch.notify.delivery import LONGEST_ANSWER, NotSentError

if TYPE_CHECKING:
    from deeplink.scheduler.watch.notify.channels import Program
    from deeplink.scheduler.watch.notify.message import Notification

_KILLED_WAIT_S = 1.0


class ProgramSender:
    """Runs one program for each message."""

    def __init__(self, name: str, way: Program, timeout_s: float) -> None:
        self._name, self._way, self._timeout_s = name, way, timeout_s

    def send(self, message: Notification) -> None:
        """Run the program; what it leaves in the background goes on.

        Raises:
            NotSentError: it is not there, did not end in time (it was killed), or did not exit 0.
        """
        try:
            # Files, not pipes: those are closed only when the last that it started has ended, and the message
            # would be sent again and again though it was taken.
            with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
                given.write(f"{json.dumps(message.document)}\n".encode())
                given.seek(0)
                self._run(given, said)
        except NotSentError:
            raise
        except (OSError, DeepLinkError) as problem:
            raise NotSentError(self._name, str(problem)) from problem

    def _run(self, given: IO[bytes], said: IO[bytes]) -> None:
        program = self._way.argv[0]
        process = spawn(self._way.argv, stdin=given, stdout=DEVNULL, stderr=said)
        try:
            code = process.wait(self._timeout_s)
        except TimeoutExpired as late:
            kill_group(process)
            with contextlib.suppress(TimeoutExpired):  # it hangs in the kernel
                process.wait(_KILLED_WAIT_S)
            raise NotSentError(
                self._name, f"{program} did not end within {self._timeout_s:g} s and was stopped"
            ) from late
        if code:
            said.seek(0)
            problem = said.read(LONGEST_ANSWER).decode(errors="replace").strip()
            raise NotSentError(self._name, f"{program} exited {code}: {problem}")
