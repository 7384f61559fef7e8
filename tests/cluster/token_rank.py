"""A rank that notes which tokens the agents of its job take; it fails in the job's first attempt.

`token_rank.py FOLDER`; each attempt leaves its token there, for the next one to try it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import deeplink
from deeplink.core.clock import SystemClock
from deeplink.core.publish import read_members
from deeplink.core.types import Attempt
from deeplink.rpc.plain import PlainConnection, PlainRefusedError

CALL_S, LIMIT_S = 20.0, 120.0
FAILS = 3


def is_taken(address: str, token: str) -> bool:
    """Return whether an agent answers a call with this token."""
    try:
        with PlainConnection(address, token, SystemClock()) as connection:
            connection.call("/grpc.health.v1.Health/Check", b"", time.monotonic() + CALL_S)
    except PlainRefusedError:
        return False
    return True


def main(folder: Path) -> int:
    """Note what is taken; return the exit code."""
    attempt, rank = Attempt.parse(os.environ["DEEPLINK_ATTEMPT"]), os.environ["RANK"]
    mine = Path(os.environ["DEEPLINK_TOKEN_FILE"]).read_text(encoding="ascii")
    members = read_members(os.environ["DEEPLINK_MEMBERS"])
    found: dict[str, dict[str, bool]] = {
        "own": {str(member.name): is_taken(member.address, mine) for member in members}
    }
    if attempt.relaunch:
        before = (folder / f"token{rank}").read_text(encoding="ascii")
        found["before"] = {str(member.name): is_taken(member.address, before) for member in members}
        found["same"] = {"token": mine == before}
    (folder / f"token{rank}").write_text(mine, encoding="ascii")
    (folder / f"found{attempt.relaunch}.{rank}").write_text(json.dumps(found), encoding="utf-8")
    deeplink.report(step=1 + attempt.relaunch)
    end = time.monotonic() + LIMIT_S  # the first rank that fails has the others ended
    all_found = [folder / f"found{attempt.relaunch}.{one}" for one in range(int(os.environ["WORLD_SIZE"]))]
    while not all(file.exists() for file in all_found):
        assert time.monotonic() < end
        time.sleep(0.05)
    return 0 if attempt.relaunch else FAILS


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
