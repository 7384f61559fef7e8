"""Operators' actions through the console's API, on a real Slurm: done by the watchdog, on record, taken back."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.journal.operations import OperationLog
from deeplink.scheduler.slurm.client import NodeOrder, Slurm
from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL
from tests.cluster.jobs import folder_of
from tests.cluster.watchdogs import watchdog
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.cluster]
PORT, CONSOLE = 7419, 8649
PROGRAM = """
import json, sys, urllib.error, urllib.request
method, url, token, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode() or None, method=method)
request.add_header("content-type", "application/json")
if token:
    request.add_header("deeplink-token", token)
try:
    print(urllib.request.urlopen(request, timeout=60).read().decode())
except urllib.error.HTTPError as refused:
    print(json.dumps({"status": refused.code, **json.loads(refused.read())}))
"""


def asked(cluster: Sandbox, path: str, token: str = "", body: dict[str, Any] | None = None) -> dict[str, Any]:
    url, method = f"http://127.0.0.1:{CONSOLE}/api/v1/{path}", "GET" if body is None else "POST"
    words = [method, url, token, json.dumps(body) if body else ""]
    done = cluster.run(CTL, [sys.executable, "-c", PROGRAM, *words])
    assert done.code == 0, done
    return dict(json.loads(done.stdout))


def agreed(cluster: Sandbox, token: str, **words: Any) -> dict[str, Any]:
    """Ask, and agree to what is shown."""
    plan = asked(cluster, "actions/plan", token, words)
    if plan.get("refused") or "status" in plan:
        return plan
    return asked(cluster, "actions", token, {**words, "saw": plan["saw"], "request": plan["request"]})


def test_a_node_is_drained_and_resumed_and_a_held_job_released(sandbox: Sandbox) -> None:
    slurm, admin = Slurm(sandbox.runner()), Slurm(sandbox.runner(root=True))
    node, other = list(sandbox.nodes)[:2]
    folder = folder_of(sandbox)
    with watchdog(sandbox, PORT, folder) as env:
        argv = [sys.executable, "-m", "deeplink", "watch", "--mint", "root", "--operator"]
        minted = sandbox.run(CTL, [*argv, "--token-file", str(folder / "token")], root=True)
        token = minted.stdout.strip()
        argv = [sys.executable, "-m", "deeplink", "console", "--bind", f"127.0.0.1:{CONSOLE}"]
        with (folder / "console").open("wb") as said:
            argv += ["--journal", str(folder / "watch.sqlite")]
            console = sandbox.spawn(CTL, argv, root=True, env=env, stdout=said, stderr=said)
        try:
            until(lambda: "console: " in (folder / "console").read_text(), 3 * LIMIT_S)
            assert asked(sandbox, "role")["role"] == "viewer"
            role = asked(sandbox, "role", token)
            assert role["name"] == "root", role
            refused = asked(sandbox, "actions/plan", "", {"verb": "drain", "target": node, "why": "x"})
            assert refused["status"] == 403

            done = agreed(sandbox, token, verb="drain", target=node, why="fan is loud")
            assert (done["outcome"], done["undo"]) == ("done", "resume"), done
            (row,) = slurm.nodes([node])
            assert (row.drained, row.reason) == (True, "operator root: fan is loud")
            assert agreed(sandbox, token, verb="resume", target=node, why="new fan")["outcome"] == "done"
            assert not slurm.nodes([node])[0].drained

            admin.update_node(other, NodeOrder.DRAIN, "mine, says the site")
            theirs = agreed(sandbox, token, verb="resume", target=other, why="why not")
            assert "mine, says the site" in theirs["refused"]
            forced = agreed(sandbox, token, verb="resume", target=other, why="asked him", force=True)
            assert forced["outcome"] == "done"

            job = slurm.submit(["-N1", "--hold", "--wrap", "sleep 600"])
            assert agreed(sandbox, token, verb="release", target=str(job), why="go")["outcome"] == "done"
            until(lambda: slurm.job(job).state is JobState.RUNNING, 3 * LIMIT_S)
            assert agreed(sandbox, token, verb="cancel", target=str(job), why="enough")["outcome"] == "done"

            listed = asked(sandbox, f"actions?target={node}")["actions"]
            assert [(each["verb"], each["person"], each["why"]) for each in listed] == [
                ("resume", "root", "new fan"),
                ("drain", "root", "fan is loud"),
            ]
        finally:
            console.terminate()
            console.wait(LIMIT_S)
    with Journal(folder / "watch.sqlite", read_only=True) as journal:
        found = OperationLog(journal).newest([str(job)])
    assert [(each.verb, each.outcome, each.commands) for each in found] == [
        ("cancel", "done", (f"scancel --quiet {job}",)),
        ("release", "done", (f"scontrol release {job}",)),
    ]
