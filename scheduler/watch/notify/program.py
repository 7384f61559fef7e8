"""A message as JSON on the standard input of a program of the site's own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.scheduler.slurm.command import finish
from deeplink.scheduler.watch.notify.trying import NotSentError

if TYPE_CHECKING:
    from deeplink.scheduler.watch.notify.channels import Program
    from deeplink.scheduler.watch.notify.message import Message


class ProgramSender:
    """Runs one program for each message."""

    def __init__(self, name: str, way: Program, timeout_s: float) -> None:
        self._name, self._way, self._timeout_s = name, way, timeout_s

    def send(self, message: Message) -> None:
        """Run the program.

        Raises:
            NotSentError: it is not there, did not end in time (it was killed), or did not exit 0.
        """
        try:
            done = finish(self._way.argv, timeout_s=self._timeout_s, stdin=json.dumps(message.document) + "\n")
        except (OSError, DeepLinkError) as problem:
            raise NotSentError(self._name, str(problem)) from problem
        if done.code:
            raise NotSentError(self._name, f"{self._way.argv[0]} exited {done.code}: {done.stderr.strip()}")
