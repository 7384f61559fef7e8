"""A process that stands still between the look for a newer claim and the rename, and goes on when one has come.

Real processes: they stop themselves (SIGSTOP) at exactly that place, and are continued. The signal goes to the
very thread that is there (`pthread_kill`): one to the process may be taken by another of its threads, and until
that has had its turn on a busy machine, this one goes on through looks and renames.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deeplink.checkpoints import Checkpoints, NothingWholeError
from deeplink.core.types import Attempt
from tests.deeplink.checkpoints.nodes import Nodes
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow]
FIRST, SECOND = Attempt(17, 0, 0), Attempt(17, 0, 1)

SAVER = """
import signal, sys, threading
from pathlib import Path
from deeplink.checkpoints import Checkpoints, FencedError
from deeplink.checkpoints.ownership import FolderOwnership
from deeplink.core.types import Attempt

folder, what = Path(sys.argv[1]), sys.argv[2]
checkpoints = Checkpoints(
    folder / "shared", attempt=Attempt(17, 0, 0), keep=1, local=folder / "ssd" if what == "copied" else None
)

def save(step):
    with checkpoints.save(step=step) as draft:
        (draft / "state").write_bytes(b"zombie" * step)

save(1)
checkpoints.wait()
asked, refuse = [0], FolderOwnership.refuse_if_fenced

def refuse_and_stop(self):
    refuse(self)
    asked[0] += 1
    if asked[0] == int(sys.argv[3]):
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

FolderOwnership.refuse_if_fenced = refuse_and_stop
try:
    save(2)
    checkpoints.wait()
except FencedError as fenced:
    print("fenced", fenced.newest, flush=True)
    sys.exit(77)
"""

PRUNER = """
import signal, sys, threading
from pathlib import Path
from deeplink.checkpoints import inspection
from deeplink.checkpoints.claims import Claims
from deeplink.checkpoints.claims import Retention

folder = Path(sys.argv[1]) / "shared"
plan = inspection.plan_pruning(folder, Retention(1))
look, stopped = Claims.newest_number, []

def look_and_stop(self):
    found = look(self)
    if sys.argv[2] == "after the look" and not stopped:
        stopped.append(True)
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    return found

Claims.newest_number = look_and_stop
if sys.argv[2] == "before the look":
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
inspection.prune(folder, plan)
"""


def stopped(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Return a process that has stopped itself."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + LIMIT_S
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.02)
    return process


def goes_on(process: subprocess.Popen[str]) -> tuple[int, str]:
    os.kill(process.pid, signal.SIGCONT)
    said, errors = process.communicate(timeout=LIMIT_S)
    return process.returncode, said + errors


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "claims")


# The looks of a save into the shared folder: at its begin, before the rename, after it, and twice in tidying.
# The copying thread looks before the rename and after it, and the save on the node's disk three times before.
@pytest.mark.parametrize(
    ("what", "look"),
    [*(("saved", look) for look in range(1, 6)), *(("copied", look) for look in range(2, 7))],
)
def test_what_a_stopped_saver_still_publishes_is_taken_back(tmp_path: Path, what: str, look: int) -> None:
    zombie = stopped(SAVER, str(tmp_path), what, str(look))
    newer = Checkpoints(
        tmp_path / "shared", attempt=SECOND, keep=3, local=tmp_path / "ssd1" if what == "copied" else None
    )
    found = newer.latest()
    assert found is not None
    before = names(tmp_path / "shared")
    code, said = goes_on(zombie)
    agreed = Checkpoints(tmp_path / "shared", attempt=SECOND).latest()
    assert agreed is not None
    assert agreed.step == found.step
    assert agreed.path.name == found.path.name
    assert (agreed.path / "state").read_bytes() == b"zombie" * found.step
    whole = [name for name in names(tmp_path / "shared") if name.startswith("step-")]
    # Stopped in its tidying it has the older one hidden, and puts it back when it finds itself fenced.
    hidden = {name.removeprefix(".draft-").rpartition("-")[0] for name in before if name.startswith(".draft-")}
    back = {"step-0000000001.a1"} & hidden
    assert set(whole) <= {name for name in before if name.startswith("step-")} | {found.path.name} | back, said
    if found.step == 1:
        assert whole == ["step-0000000001.a1"]
        assert code == 77, said
    with newer.save(step=3) as draft:
        (draft / "state").write_bytes(b"newer")
    newer.close()
    left = {name for name in names(tmp_path / "shared") if name.startswith("step-")}
    assert {found.path.name, "step-0000000003.a2"} <= left <= {*whole, "step-0000000003.a2"}
    assert not list((tmp_path / "shared").glob(".draft-*"))


@pytest.mark.parametrize("where", ["before the look", "after the look"])
def test_a_stopped_pruning_removes_nothing_that_a_newer_attempt_goes_on_from(tmp_path: Path, where: str) -> None:
    shared = tmp_path / "shared"
    for step in (1, 2):
        with Checkpoints(shared, attempt=FIRST, keep=9).save(step=step) as draft:
            (draft / "state").write_bytes(b"state")
    pruning = stopped(PRUNER, str(tmp_path), where)
    # What would be left is torn meanwhile: the newer attempt has only what is about to go.
    (shared / "step-0000000002.a1" / "state").write_bytes(b"st")
    newer = Checkpoints(shared, attempt=SECOND)
    if where == "before the look":
        found = newer.latest()
        goes_on(pruning)
        assert found is not None
        assert (found.path / "state").read_bytes() == b"state"
    else:  # it is hidden already: nobody goes on from it, and nobody begins at zero
        with pytest.raises(NothingWholeError, match="state has 2 bytes"):
            newer.latest()
        goes_on(pruning)
        assert names(shared) == ["step-0000000002.a1"]
        return
    again = Checkpoints(shared, attempt=SECOND).latest()
    assert again is not None
    assert again.step == found.step


AGENT = """
import signal, sys, threading
from pathlib import Path
from deeplink.agent import checkpoint_replicas
from deeplink.agent.agent import Agent, AgentSettings
from deeplink.core.config import Config
from deeplink.rpc.tokens import read_token
from deeplink.core.types import NodeName

folder, name = Path(sys.argv[1]), sys.argv[2]
refuse, asked = checkpoint_replicas.KeepServicer._refuse_if_fenced, [0]

def refuse_and_stop(self, request, claim):
    refuse(self, request, claim)
    asked[0] += 1
    if asked[0] == 2:  # at its begin, and before the rename
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

checkpoint_replicas.KeepServicer._refuse_if_fenced = refuse_and_stop
settings = AgentSettings(
    node=NodeName(name), bind="127.0.0.1:0", token=read_token(folder / "token"), store=folder / name / "store",
    config=Config(state=folder / "state"), keeps_copies=True,
)
agent = Agent(settings)
print(agent.start(folder / "token").address, flush=True)
threading.Event().wait(60)
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    job = Nodes(tmp_path, count=1)
    yield job
    job.close()


def test_a_stopped_agent_keeps_no_copy_of_an_attempt_that_was_fenced_meanwhile(nodes: Nodes) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(AGENT), str(nodes.root), "n1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert agent.stdout is not None
        address = agent.stdout.readline().strip()
        assert address, agent.communicate()[1]
        with pytest.MonkeyPatch.context() as patch:
            env = nodes.env(FIRST, "n0", ["n0"])
            for name, value in {**env, "DEEPLINK_MEMBERS": f"{env['DEEPLINK_MEMBERS']},n1={address}"}.items():
                patch.setenv(name, value)
            old = Checkpoints(nodes.root / "shared", local=nodes.local("n0"), lease_s=None)
        with old.save(step=1) as draft:
            (draft / "state").write_bytes(b"state")
        end = time.monotonic() + LIMIT_S
        while Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < end
            time.sleep(0.02)
        run = next((nodes.root / "n1" / "store" / "checkpoints").iterdir())
        kept = run / "from-n0"
        # Another job's agent on the same disk learns of its claim.
        from deeplink.checkpoints.claims import Claims

        claims = Claims(run)
        newest = claims.newest()
        from dataclasses import replace

        assert claims.publish(
            replace(newest, number=newest.number + 100, attempt=Attempt(99, 0, 0), holder="other")
        )
        os.kill(agent.pid, signal.SIGCONT)
        end = time.monotonic() + LIMIT_S
        while old._mirror is not None and not old._mirror._to_partner.is_done(0.1):
            assert time.monotonic() < end
        assert [path.name for path in kept.glob("step-*")] == []
    finally:
        agent.kill()
        agent.communicate(timeout=LIMIT_S)
        shutil.rmtree(nodes.root / "n1", ignore_errors=True)
