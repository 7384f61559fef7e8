"""One check, as the schedule sees it."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.scheduler.health.look import Look

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from deeplink.scheduler.health.settings import CheckTiming


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """A check of this node.

    Attributes:
        name: of the findings.
        look: looks once. It is called from one thread at a time; what it raises means that it could not tell.
        timing: how often, for how long, and what becomes of it.
        hung: returns, at once, what a look says that has not ended for so many seconds; None: then the check
            cannot tell.
        about: what it looks at, for people.
        close: ends what a look may have left behind.
        absent: why there is nothing for it to look at on this node; empty where there is.
    """

    name: str
    look: Callable[[], Look]
    timing: CheckTiming
    hung: Callable[[float], Look] | None = None
    about: str = ""
    close: Callable[[], None] = lambda: None
    absent: str = ""


def hung_look(check: HealthCheck, age_s: float) -> Look:
    """Return what a look of a check says that has not ended for so many seconds."""
    said = f"the check has not ended for {age_s:.0f} s"
    try:
        return check.hung(age_s) if check.hung is not None else Look((), said)
    except Exception as problem:  # noqa: BLE001 - as with a look: that it fails says nothing of the node
        return Look((), f"{said}; {type(problem).__name__}: {problem}")


def closed(checks: Iterable[HealthCheck], longest_s: float) -> None:
    """Have the checks end what their looks left behind, all at the same time; return within `longest_s`."""
    threads = []
    for check in checks:
        name = f"deeplink-close-{check.name}"[:60]
        thread = threading.Thread(target=_close, args=(check,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: what there is to end is no less there
            _close(check)
        else:
            threads.append(thread)
    end = time.monotonic() + longest_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _close(check: HealthCheck) -> None:
    with contextlib.suppress(OSError, ValueError):  # a look of it may still be waiting for the same child
        check.close()
