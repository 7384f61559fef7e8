"""Real node agents on this machine, as a job has them: for whoever measures what ranks have to do with them."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from deeplink.core.types import Attempt
from deeplink.rpc.tokens import new_token, token_of, write_token

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

START_S, END_S = 60.0, 20.0


@contextmanager
def agents(folder: Path, nodes: Sequence[str]) -> Iterator[dict[str, str]]:
    """Run an agent for each node, and give the environment of a rank on the first of them.

    Each keeps its shards and copies below `folder`/NODE; the token is `folder`/token.

    Raises:
        RuntimeError: one did not come up; what it said is on standard error.
    """
    secret = new_token()
    write_token(folder / "token", token_of(secret, Attempt(1, 0, 0)))
    with ExitStack() as held:
        members = [f"{node}={held.enter_context(_agent(node, folder / node, secret))}" for node in nodes]
        yield {
            "DEEPLINK_ATTEMPT": "1.0.0",
            "DEEPLINK_NODE": nodes[0],
            "DEEPLINK_AGENT": members[0].partition("=")[2],
            "DEEPLINK_MEMBERS": ",".join(members),
            "DEEPLINK_TOKEN_FILE": str(folder / "token"),
        }


@contextmanager
def _agent(node: str, store: Path, secret: str) -> Iterator[str]:
    argv = [sys.executable, "-m", "deeplink", "node", "--job", "--name", node]
    argv += ["--bind", "127.0.0.1:0", "--store", str(store)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        try:
            if agent.stdin is None or agent.stdout is None:
                raise AssertionError("pipes were asked for")
            agent.stdin.write(f"{secret}\n")
            agent.stdin.flush()
            heard, _, _ = select.select([agent.stdout], [], [], START_S)
            ready = agent.stdout.readline() if heard else ""  # empty, too, where it ended
            if not ready:
                raise RuntimeError(f"the agent of {node} did not come up")
            yield json.loads(ready)["address"]
        finally:
            agent.terminate()
            try:
                agent.wait(END_S)
            except subprocess.TimeoutExpired:
                agent.kill()
