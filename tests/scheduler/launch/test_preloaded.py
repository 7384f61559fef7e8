"""Processes that did a rank's imports before it is known which rank: they must be as a fresh one would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.core.types import Attempt, NodeName
from deeplink.scheduler.launch.container import Container
from deeplink.scheduler.launch.environment import SLOTS_VARIABLE, Launch, NodeFacts, leave_slots
from deeplink.scheduler.launch.preload import deeplink_preload
from deeplink.scheduler.launch.preloaded import PythonCommand
from deeplink.v1 import node_pb2
from tests.scheduler.launch.test_slots import FIRST, SECOND, STEP, Node
from tests.waiting import LIMIT_S, until

OTHER = NodeFacts(node="n1", address="127.0.0.1:1", token_file="/nowhere/secret")  # noqa: S106 - a file
ALL = (NodeName("n0"), NodeName("n1"))
# A rank that tells all that it finds, and which process has imported `heavy`.
SCRIPT = """
import json, os, sys
import heavy

def told():
    main = sys.modules["__main__"]
    with open("/proc/self/environ", "rb") as environ:
        shown = dict(one.split(b"=", 1) for one in environ.read().split(b"\\0") if b"=" in one)
    return {
        "env": dict(os.environ), "argv": sys.argv, "orig": sys.orig_argv, "path": sys.path, "name": __name__,
        "file": __file__, "main": main is sys.modules[__name__], "main_file": main.__file__, "cwd": os.getcwd(),
        "flags": list(sys.flags), "shown": [shown.get(one, b"").decode() for one in (b"RANK", b"DEEPLINK_SLOT")],
        "mask": [int(one) for one in __import__("signal").pthread_sigmask(0, [])],
        "group": os.getpgid(0) == os.getpid(), "parent": os.getppid(), "cpus": sorted(os.sched_getaffinity(0)),
    }

where = sys.argv[1]
with open(os.path.join(where, "draft"), "w") as file:
    json.dump({**told(), "pid": os.getpid(), "imported_by": heavy.PID}, file)
os.rename(os.path.join(where, "draft"), os.path.join(where, "told"))
exec(open(os.path.join(where, "then")).read() if os.path.exists(os.path.join(where, "then")) else "")
"""


SLOT = """
import os, sys
from deeplink.scheduler.launch import slot
slot.PRELOAD_AFTER_S = float(sys.argv[1])
sys.exit(slot.main(sys.argv[2:], dict(os.environ)))
"""


class PreloadingNode(Node):
    """A node that is a spare first, with a slot whose ranks run SCRIPT with a module of the user's own."""

    beside_s = 600.0
    container: Container | None = None

    def begin(self, heavy: str = "", preload: tuple[str, ...] | None = None, *options: str) -> None:
        (self.folder / "script").mkdir()
        secret = self.folder / "n0" / "secret"
        secret.touch(0o600)
        secret.write_text("t" * 64)
        (self.folder / "script" / "heavy.py").write_text(f"import os\nPID = os.getpid()\n{heavy}\n")
        (self.folder / "script" / "train.py").write_text(SCRIPT)
        resting = Launch(
            attempt=FIRST, nodes=(OTHER,), spares=(self.facts,), ranks=(1,), master_port=1, passed_on={}
        )
        told = leave_slots(self.folder, STEP, resting, ALL, preload)
        slurm = {"SLURMD_NODENAME": "n0", "SLURM_STEP_ID": "3", "SLURM_LOCALID": "0", SLOTS_VARIABLE: told}
        argv = [sys.executable, "-P", "-c", SLOT, str(self.beside_s), "--"]
        argv += [sys.executable, *options, str(self.folder / "script" / "train.py"), str(self.folder), "-x", "a b"]
        errors = (self.folder / "errors").open("wb")
        with errors:
            env = {**os.environ, **slurm}
            self.slots.append(subprocess.Popen(argv, env=env, stderr=errors, cwd=self.folder))

    def await_preloaded(self) -> None:
        until(lambda: any(one.said.preloaded for one in self.agent._slots), told=lambda: self.errors)

    @property
    def errors(self) -> str:
        return (self.folder / "errors").read_text()

    def rank(self, attempt: Attempt = SECOND) -> dict[str, object]:
        """Have it run a rank; return what that tells."""
        self.ask(self.launch(attempt))
        path = self.folder / "told"
        until(path.exists, told=lambda: self.errors)
        said: dict[str, object] = json.loads(path.read_text())
        path.unlink()
        return said

    def launch(self, attempt: Attempt = SECOND) -> Launch:
        return Launch(
            attempt=attempt,
            nodes=(self.facts,),
            spares=(),
            ranks=(1,),
            master_port=2,
            passed_on={"DEEPLINK_X": "y"},
            container=self.container,
        )

    def ended(self, attempt: Attempt = SECOND, **wanted: object) -> node_pb2.RankState:
        (one,) = self.await_ranks(self.launch(attempt), lambda one: one.ended, **wanted)
        return one


@pytest.fixture
def node(tmp_path: Path) -> Iterator[PreloadingNode]:
    one = PreloadingNode(tmp_path, "n0")
    one.listen()
    yield one
    one.close()


HEAVY = ("heavy",)


@pytest.mark.parametrize("options", [(), ("-u", "-W", "ignore", "-Xutf8")])
def test_a_preloaded_process_becomes_the_rank_just_as_a_fresh_one_does(
    node: PreloadingNode, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(node.folder / "of-the-user"))
    node.begin("copied = dict(os.environ)", HEAVY, *options)  # as torch does
    node.await_preloaded()
    assert not (node.folder / "told").exists(), "it waits before the script"
    warm = node.rank()
    ended = node.ended()
    assert warm["pid"] == warm["imported_by"] == ended.pid
    assert (ended.code, ended.unstarted) == (0, "")
    cold = node.rank(Attempt(7, 0, 2))  # by the same slot, which has had no time to preload
    assert warm["shown"] == ["0", f"{SECOND}:{warm['parent']}"]
    for one in (warm, cold):
        for varying in ("pid", "imported_by", "shown"):
            del one[varying]
        env = one["env"]
        assert isinstance(env, dict)
        for varying in (
            "SLURM_TASK_PID",
            "DEEPLINK_ATTEMPT",
            "DEEPLINK_SLOT",
            "DEEPLINK_MEMBERS",
            "DEEPLINK_TOKEN_FILE",
        ):
            assert env.pop(varying)
    assert warm == cold
    assert node.errors == ""


def test_an_import_that_asked_for_what_is_another_now_is_not_used(node: PreloadingNode) -> None:
    node.begin("os.environ.get('RANK')", HEAVY)
    node.await_preloaded()
    told = node.rank()
    assert told["pid"] == told["imported_by"] == node.ended().pid
    assert "starts without its preloaded imports: an import has asked for RANK" in node.errors


def test_a_rank_whose_command_is_another_starts_afresh(node: PreloadingNode) -> None:
    enters = node.folder / "apptainer"
    enters.write_text(
        f"#!/bin/sh\ntouch {node.folder}/entered\nwhile [ $1 != {sys.executable} ]; do shift; done\n"
    )
    with enters.open("a") as script:
        script.write('exec "$@"\n')
    enters.chmod(0o755)
    node.container = Container(str(enters), "image")
    node.begin("", HEAVY)
    node.await_preloaded()
    told = node.rank()
    assert told["pid"] == told["imported_by"] == node.ended().pid
    assert (node.folder / "entered").exists()
    assert "starts without its preloaded imports: the rank's command is another" in node.errors


@pytest.mark.parametrize(
    ("heavy", "said"),
    [
        ("raise ValueError('no such GPU')", "ValueError: no such GPU"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("os._exit(3)", "it ended"),
        ("os.kill(os.getpid(), 11)", "it ended"),
        ("held = open('/dev/dri/x') if os.path.exists('/dev/dri/x') else 1 / 0", "ZeroDivisionError"),
    ],
)
def test_an_import_that_fails_costs_a_line(node: PreloadingNode, heavy: str, said: str) -> None:
    node.begin(f"if 'RANK' not in os.environ:\n    {heavy}", HEAVY)
    until(lambda: "ranks start without" in node.errors)
    assert said in node.errors
    told = node.rank()
    assert told["pid"] == told["imported_by"] == node.ended().pid


def test_an_import_that_hangs_is_no_rank_and_holds_none_up(node: PreloadingNode) -> None:
    mark = node.folder / "hangs"
    node.begin(
        f"if 'RANK' not in os.environ:\n    open({str(mark)!r}, 'w')\n    import time; time.sleep(600)", HEAVY
    )
    until(mark.exists)
    told = node.rank()
    assert told["pid"] == told["imported_by"] == node.ended().pid


def test_a_preloaded_rank_heeds_signals_fails_and_is_ended_as_any_other(node: PreloadingNode) -> None:
    (node.folder / "then").write_text("import time\ntime.sleep(600)")
    node.begin("", HEAVY)
    node.await_preloaded()
    told = node.rank()
    ended = node.ended(end=True, grace_s=2.0)
    assert (ended.pid, ended.code) == (told["pid"], 128 + signal.SIGTERM)


def test_beside_a_rank_the_next_one_is_preloaded_and_neither_ends_the_other(node: PreloadingNode) -> None:
    node.beside_s = 0.1
    (node.folder / "then").write_text("import time\ntime.sleep(600)")
    node.begin("", HEAVY)
    node.await_preloaded()
    first = node.rank()
    node.await_preloaded()
    assert not node.ask(node.launch()).ranks[0].exited
    assert node.ended(end=True, grace_s=0.0).pid == first["pid"]
    (node.folder / "then").write_text("")
    second = node.rank(Attempt(7, 0, 2))
    ended = node.ended(Attempt(7, 0, 2))
    assert second["pid"] == second["imported_by"] == ended.pid != first["pid"]
    assert (ended.code, node.errors) == (0, "")
    env = second["env"]
    assert isinstance(env, dict)
    assert env["DEEPLINK_ATTEMPT"] == "7.0.2"


def test_its_exit_code_and_traceback_are_its_own(node: PreloadingNode) -> None:
    (node.folder / "then").write_text("raise KeyError('lost')")
    node.begin("", HEAVY)
    node.await_preloaded()
    node.rank()
    ended = node.ended()
    assert (ended.code, ended.unstarted) == (1, "")
    assert node.errors.startswith("Traceback (most recent call last):\n  File")
    assert "preload" not in node.errors


def test_a_waiting_process_ends_with_its_slot(node: PreloadingNode) -> None:
    node.begin(f"open({str(node.folder / 'pid')!r}, 'w').write(str(os.getpid()))", HEAVY)
    node.await_preloaded()
    pid = (node.folder / "pid").read_text()
    node.slots[0].kill()
    node.slots[0].wait(LIMIT_S)
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_what_a_script_begins_with_is_preloaded_up_to_the_users_own_code(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    (tmp_path / "mine.py").write_text("raise SystemExit('the user has set nothing yet')")
    script.write_text(
        '"""Train."""\nfrom __future__ import annotations\nimport json\nfrom typing import TYPE_CHECKING\n'
        "import grpc.aio, numpy\nif TYPE_CHECKING:\n    import none_such\n"
        "import os\nos.environ['X'] = '1'\nimport click"
    )
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from deeplink.scheduler.launch.preload import deeplink_preload\n"
        "print(deeplink_preload._import_leading(sys.argv[2:]))"
    )

    def loaded(*files: Path) -> list[str]:
        argv = [sys.executable, "-P", "-c", program, str(tmp_path), *map(str, files)]
        return list(json.loads(subprocess.check_output(argv, text=True, timeout=LIMIT_S).replace("'", '"')))

    assert loaded(script) == ["__future__", "json", "typing", "grpc.aio", "numpy", "os"]
    script.write_text("import json, mine\nimport numpy")
    assert loaded(script) == ["json"]
    script.write_text("print('first')\nimport numpy")
    assert loaded(script) == []


def test_the_files_of_a_module_are_those_of_its_packages_and_its_own(tmp_path: Path) -> None:
    (tmp_path / "pack" / "train").mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").touch()
    files = deeplink_preload._files("", "pack.run", str(tmp_path))
    assert [Path(one).relative_to(tmp_path).as_posix() for one in files] == ["pack/__init__.py", "pack/run.py"]
    (tmp_path / "pack" / "train" / "__init__.py").touch()
    files = deeplink_preload._files("", "pack.train", str(tmp_path))
    assert [Path(one).name for one in files] == ["__init__.py", "__init__.py", "__main__.py"]


@pytest.mark.parametrize(
    ("words", "script", "module"),
    [
        (["train.py", "-x"], "train.py", ""),
        (["-u", "-Wignore", "-X", "dev", "-m", "pack.train", "-m"], "", "pack.train"),
        (["-OO", "train.py"], "train.py", ""),
    ],
)
def test_python_with_a_script_is_known(words: list[str], script: str, module: str) -> None:
    found = PythonCommand.of([sys.executable, *words], None)
    assert found is not None
    assert (found.script, found.module) == (script, module)


@pytest.mark.parametrize("words", [["-c", "0"], ["-"], [], ["-I", "a"], ["-uE", "a"], ["-S", "a"], ["-m"]])
def test_python_that_goes_by_our_hook_is_not_taken(words: list[str]) -> None:
    assert PythonCommand.of([sys.executable, *words], None) is None


def test_a_script_that_is_called_python_is_not_taken(tmp_path: Path) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -E "$@"\n')
    wrapper.chmod(0o755)
    assert PythonCommand.of(["python", "train.py"], str(tmp_path)) is None
    assert PythonCommand.of(["bash", "train.sh"], os.defpath) is None
