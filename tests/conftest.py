"""What holds for every test: no setting of the developer's own, and no skip that nobody agreed to."""

from __future__ import annotations

import os
import signal
import socket
import time
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from types import FrameType

    from tests.cache.keepers import Keepers

ALLOWED_SKIPS = Path(__file__).parent / "allowed-skips.txt"
# How long an example takes says how busy the machine is, and nothing of the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=25)
settings.load_profile("untimed")
# What takes numbers from it: tests/effort.py, tests/faults/test_model.py.
settings.register_profile("thorough", parent=settings.get_profile("untimed"), print_blob=True, max_examples=100)
_NOT_ALLOWED = pytest.StashKey[list[str]]()
_BEGAN = pytest.StashKey[float]()
_NOT_REACHED = pytest.StashKey[int]()


@pytest.fixture
def keepers(tmp_path: Path) -> Iterator[Keepers]:
    """Members in this process that look after their stores; none runs yet."""
    from tests.cache.keepers import Keepers

    running = Keepers(tmp_path)
    yield running
    running.stop_all()


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of this host on which nobody listens, nor can before the test is over."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("deeplink")
    group.addoption(
        "--whole", action="store_true", help="fail when a test is skipped that --allowed-skips does not name"
    )
    group.addoption(
        "--within", type=float, metavar="SECONDS", help="begin no test after so long, and count the rest"
    )
    group.addoption("--allowed-skips", type=Path, default=ALLOWED_SKIPS, help="file of patterns and reasons")


def _goes_on(_number: int, _frame: object) -> None:
    """Do nothing: this process goes on, and what it starts has the system's default again (execve(2))."""


def pytest_configure(config: pytest.Config) -> None:
    # nohup and a shell's background jobs ignore these, and what the tests start would, too.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _goes_on)
    config.stash[_NOT_ALLOWED] = []
    config.stash[_BEGAN], config.stash[_NOT_REACHED] = time.monotonic(), 0
    for name in [name for name in os.environ if name.startswith("DEEPLINK_") and name != "DEEPLINK_TEST_RUN"]:
        del os.environ[name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a slow test that tests/lanes.py would not find: it reads which files have some."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    silent = sorted(str(path) for path in slow if "mark.slow" not in path.read_text(encoding="utf-8"))
    if silent:
        raise pytest.UsageError(f"slow tests in files that do not say mark.slow themselves: {', '.join(silent)}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> object:
    within = item.config.getoption("--within")
    if within is None or time.monotonic() - item.config.stash[_BEGAN] < within:
        return None
    item.config.stash[_NOT_REACHED] += 1
    return True


class TooLongError(BaseException):
    """A test has taken longer than it may."""


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer() -> Generator[None, object, object]:
    """Let no property outlive its time.

    Hypothesis takes pytest-timeout's own failure for one of the example's, and looks for a smaller one: each runs
    as long, without a limit now, for five minutes.
    """
    done = yield
    fail = signal.getsignal(signal.SIGALRM)

    def end(number: int, frame: FrameType | None) -> None:
        try:
            if callable(fail):
                fail(number, frame)
        except pytest.fail.Exception as late:
            raise TooLongError(str(late)) from None

    if callable(fail):
        signal.signal(signal.SIGALRM, end)
    return done


def allowed_skips(text: str, *, root: bool, torch: bool = True) -> list[str]:
    """Return the patterns of an allow-list that hold; a pattern without a reason is an error."""
    patterns = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, gap, reason = line.partition("  ")
        if not gap or not reason.strip():
            raise pytest.UsageError(
                f"allowed-skips, line {number}: a pattern, two spaces, and the reason: {line!r}"
            )
        needless = [f"unless {name}: " for name, there in (("root", root), ("torch", torch)) if there]
        if not reason.strip().startswith(tuple(needless)):
            patterns.append(pattern)
    return patterns


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if not config.getoption("--whole") or terminal is None:
        return
    patterns = allowed_skips(
        config.getoption("--allowed-skips").read_text(encoding="utf-8"),
        root=os.geteuid() == 0,
        torch=find_spec("torch") is not None,
    )
    config.stash[_NOT_ALLOWED] = [
        f"{report.nodeid}: {_reason(report)}"
        for report in terminal.stats.get("skipped", [])
        if not any(fnmatchcase(report.nodeid, pattern) for pattern in patterns)
    ]
    if config.stash[_NOT_ALLOWED] and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[_NOT_REACHED]:
        within = config.getoption("--within")
        terminalreporter.line(
            f"{config.stash[_NOT_REACHED]} tests were not reached in {within:.0f} s: `make test`."
        )
    refused = config.stash[_NOT_ALLOWED]
    if refused:
        terminalreporter.section("skipped, and not allowed to be", red=True)
        for line in refused:
            terminalreporter.line(line)
        terminalreporter.line(
            f"The run fails. {config.getoption('--allowed-skips')} names the skips that are agreed."
        )
