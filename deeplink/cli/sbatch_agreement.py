"""Asks whether something that outlives a login session looks after nodes wished by name."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import TYPE_CHECKING

from deeplink.clock import SystemClock
from deeplink.publish import write_unsynced

if TYPE_CHECKING:
    from deeplink.config import Config

AGREED_S = 60.0
"""How long the watchdog's answer is kept."""


def agreed(config: Config) -> str:
    """Return why nothing that outlives this session would look after nodes wished by name; empty where it does.

    What the watchdog said is kept for a minute: to ask it takes as long as a submission does.
    """
    if not config.watch:
        return "no watchdog would take them off the job again (setting `watch`)"
    path, now = config.state / "wishes" / "agreed.json", SystemClock().unix()
    host = socket.gethostname()  # hosts share the state, and each has a loopback of its own
    try:
        kept = json.loads(path.read_bytes())
        if (kept["watch"], kept["host"]) == (config.watch, host) and 0.0 <= now - kept["unix"] < AGREED_S:
            return str(kept["problem"])
    except (OSError, ValueError, TypeError, KeyError):
        pass
    problem = _asked_watchdog(config.watch)
    said = {"watch": config.watch, "host": host, "unix": now, "problem": problem}
    with contextlib.suppress(OSError):
        write_unsynced(path, json.dumps(said).encode())
    return problem


def _asked_watchdog(address: str) -> str:
    from deeplink.cli.plan_life import user_name
    from deeplink.scheduler.watch.agreement import looks_after

    problem = looks_after(address, user_name())
    return f"the watchdog at {address} does not take them off the job again: {problem}" if problem else ""
