"""What `make test` adds to pytest: unagreed skips and things left behind fail the run."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.near import nearest
from tests.waiting import LIMIT_S

TESTS = Path(__file__).parents[1]


def run(*argv: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # three times as quick
    return subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A test suite of its own with our conftest, one test that passes and one that is skipped."""
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "allowed-skips.txt").write_text("# nothing\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_passes(): pass\n"
        "@pytest.mark.skip(reason='no cluster here')\ndef test_skipped(): pass\n"
    )
    return tmp_path


def pytest_in(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "pytest", "-p", "no:cacheprovider", "--rootdir", folder, *options, folder, cwd=folder)


def test_an_unagreed_skip_fails_the_whole_run_and_is_named(suite: Path) -> None:
    done = pytest_in(suite, "--whole")
    assert done.returncode == 1, done.stdout
    assert "test_it.py::test_skipped: Skipped: no cluster here" in done.stdout
    assert "1 passed, 1 skipped" in done.stdout.splitlines()[-1]


def test_an_agreed_skip_passes(suite: Path) -> None:
    (suite / "allowed-skips.txt").write_text("test_it.py::test_skip*  needs a machine nobody has\n")
    done = pytest_in(suite, "--whole")
    assert done.returncode == 0, done.stdout


def test_a_skip_agreed_for_ordinary_users_is_not_agreed_for_root(suite: Path) -> None:
    (suite / "allowed-skips.txt").write_text("test_it.py::test_skip*  unless root: takes namespaces\n")
    assert pytest_in(suite, "--whole").returncode == (1 if os.geteuid() == 0 else 0)


def test_a_skipped_module_counts_too(suite: Path) -> None:
    (suite / "test_it.py").write_text("def test_passes(): pass\n")
    (suite / "test_more.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    done = pytest_in(suite, "--whole")
    assert done.returncode == 1, done.stdout
    assert "no_such_module" in done.stdout


def test_a_property_that_hangs_is_ended_when_its_time_is_up(suite: Path) -> None:
    (suite / "test_it.py").write_text(
        "import pytest, time\nfrom hypothesis import given, strategies as st\n"
        "@pytest.mark.timeout(1)\n@given(st.booleans())\ndef test_hangs(_): time.sleep(40)\n"
        "def test_passes(): pass\n"
    )
    done = pytest_in(suite, "-p", "pytest_timeout")
    assert "Timeout (>1.0s)" in done.stdout
    assert "1 failed, 1 passed" in done.stdout.splitlines()[-1]


def test_a_part_of_the_suite_may_skip(suite: Path) -> None:
    assert pytest_in(suite).returncode == 0


def test_a_pattern_without_a_reason_is_refused(suite: Path) -> None:
    (suite / "allowed-skips.txt").write_text("test_it.py::*\n")
    done = pytest_in(suite, "--whole")
    assert done.returncode != 0
    assert "the reason" in done.stdout + done.stderr


def test_the_developers_own_settings_do_not_reach_the_tests(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPLINK_STORE", "/somewhere")
    (suite / "test_it.py").write_text("import os\ndef test_it(): assert 'DEEPLINK_STORE' not in os.environ\n")
    assert pytest_in(suite).returncode == 0


def test_a_slow_test_that_the_lanes_would_not_find_is_refused(suite: Path) -> None:
    (suite / "marks.py").write_text("import pytest\nWAITS = pytest.mark.slow\n")
    (suite / "test_it.py").write_text("from marks import WAITS\n@WAITS\ndef test_passes(): pass\n")
    done = pytest_in(suite)
    assert done.returncode == 4
    assert "do not say mark.slow themselves" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT, signal.SIGHUP])
def test_what_a_test_starts_heeds_a_signal_that_the_runs_caller_ignores(suite: Path, number: int) -> None:
    (suite / "test_it.py").write_text(
        f"import subprocess\ndef test_it(): assert subprocess.call(['sh', '-c', 'kill -{int(number)} $$']) < 0\n"
    )
    before = signal.signal(number, signal.SIG_IGN)
    try:
        done = pytest_in(suite)
    finally:
        signal.signal(number, before)
    assert done.returncode == 0, done.stdout


def test_a_command_that_leaves_nothing_keeps_its_exit_code(tmp_path: Path) -> None:
    for code in (0, 5):
        done = run(TESTS / "nothing_left.py", sys.executable, "-c", f"raise SystemExit({code})", cwd=tmp_path)
        assert done.returncode == code, done.stderr


@pytest.mark.slow
def test_a_process_left_behind_fails_the_run_and_is_ended(tmp_path: Path) -> None:
    leaves = (
        "import subprocess; p = subprocess.Popen(['sleep', '120'], start_new_session=True,"
        " stdin=-3, stdout=-3, stderr=-3); p.returncode = 0; print(p.pid)"
    )
    done = run(TESTS / "nothing_left.py", sys.executable, "-c", leaves, cwd=tmp_path)
    assert done.returncode == 1
    assert "sleep 120" in done.stderr
    pid = int(done.stdout)
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        state = "gone"
    assert state in {"gone", "Z"}, f"process {pid} of {os.getpid()} still runs"


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces and mounts need root")
def test_the_mount_point_that_the_first_ip_netns_makes_is_the_machines(tmp_path: Path) -> None:
    words = [sys.executable, str(TESTS / "nothing_left.py"), "sh", "-c", "ip netns add once && ip netns del once"]
    # A machine on which nobody has made a network namespace yet: all mounts are our own, and go with us.
    argv = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs fresh /run && exec {shlex.join(words)}"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")


CLUSTER, OTHERS = Path("tests/cluster/test_it.py"), Path("tests/test_lanes.py")


@pytest.fixture
def lanes(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n cluster: drives one\n slow: waits\n")
    (tmp_path / "tests" / "cluster").mkdir(parents=True)
    (tmp_path / CLUSTER).write_text("import pytest\n@pytest.mark.cluster\ndef test_of_a_cluster(): assert 3\n")
    (tmp_path / OTHERS).write_text(
        "import pytest\ndef test_of_others(): assert 1\n@pytest.mark.slow\ndef test_that_waits(): assert 2\n"
    )
    return tmp_path


def in_lanes(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run(TESTS / "lanes.py", "-p", "xdist.plugin", *options, cwd=folder)


def test_every_lane_runs_and_is_shown(lanes: Path) -> None:
    done = in_lanes(lanes)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("1 passed") == 3


@pytest.mark.parametrize(("file", "check"), [(CLUSTER, "assert 3"), (OTHERS, "assert 1"), (OTHERS, "assert 2")])
def test_a_failure_in_any_lane_fails_the_run(lanes: Path, file: Path, check: str) -> None:
    path = lanes / file
    path.write_text(path.read_text().replace(check, "assert 0"))
    done = in_lanes(lanes)
    assert done.returncode == 1, done.stdout
    assert done.stdout.count("1 passed") == 2


def test_nothing_chosen_is_no_success(lanes: Path) -> None:
    assert in_lanes(lanes, "-k", "nothing_is_called_so").returncode == 5
    assert in_lanes(lanes, "-k", "of_others").returncode == 0


def test_no_test_begins_after_the_time_and_the_rest_is_counted(suite: Path) -> None:
    (suite / "test_it.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    done = pytest_in(suite, "--within", "0")
    assert "2 tests were not reached in 0 s" in done.stdout
    assert "2 passed" in pytest_in(suite, "--within", "60").stdout


def test_tests_are_as_near_as_their_shortest_way_of_imports() -> None:
    graph = {"a": {"os"}, "b": {"a"}, "test_b": {"b"}, "test_a": {"a", "b"}, "test_c": {"os"}}
    files = {name: f"tests/{name}.py" for name in graph}
    assert nearest({"a"}, graph, files) == ["tests/test_a.py", "tests/test_b.py"]
    assert nearest({"test_c"}, graph, files) == ["tests/test_c.py"]
    assert nearest({"gone"}, graph, files) == []
