""""""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.core.clock import ManualClock, SystemClock
from deeplink.scheduler.testbed import lifecycle, state
from deeplink.scheduler.testbed.errors import NotUpError, SandboxError
from deeplink.scheduler.testbed.processes import ProcessId
from deeplink.scheduler.testbed.programs import Programs
from deeplink.scheduler.testbed.settings import SandboxSettings, User
from deeplink.scheduler.testbed.shape import Shape
from deeplink.scheduler.testbed.state import Record, SandboxLayout, choose_user, default_root

LAYOUT = SandboxLayout(Path("/srv/b"))
USER = User("mia", 5, 6, LAYOUT.homes / "mia")


@pytest.mark.parametrize(
    "record",
    [
        Record(settings=SandboxSettings(shape=Shape(), user=USER), path="/bin", keeper=ProcessId(4, 9)),
        Record(
            settings=SandboxSettings(shape=Shape.of(3), user=USER, extra=("A=1", "B=2")),
            path="/bin",
            programs=Programs("a", "b", "c", plugins=Path("/p"), env={"X": "y"}),
            addresses={"ctl": "127.0.0.1:1"},
        ),
    ],
)
def test_a_record_is_read_as_it_was_written(tmp_path: Path, record: Record) -> None:
    layout = SandboxLayout(tmp_path)
    assert Record.read(layout) is None
    record.write(layout)
    assert Record.read(layout) == record


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"settings": {',
        "[]",
        "{}",
        '{"settings": {"user": {"home": "/h"}}}',
        json.dumps({"path": "", "keeper": None, "programs": None, "addresses": {}}),
    ],
)
def test_a_record_that_cannot_be_read_says_how_to_get_rid_of_the_sandbox(tmp_path: Path, text: str) -> None:
    layout = SandboxLayout(tmp_path)
    layout.record.write_text(text)
    with pytest.raises(SandboxError, match="another version") as caught:
        Record.read(layout)
    assert f"deeplink sandbox down --name {tmp_path.name}" in caught.value.remedy


@pytest.mark.parametrize("change", [{"shape": {"spines": 0}}, {"no_such_setting": 1}])
def test_a_record_of_another_version_is_not_guessed_at(tmp_path: Path, change: dict[str, object]) -> None:
    layout = SandboxLayout(tmp_path)
    Record(settings=SandboxSettings(shape=Shape(), user=USER), path="/bin", keeper=ProcessId(4, 9)).write(layout)
    raw = json.loads(layout.record.read_text())
    raw["settings"] |= change
    layout.record.write_text(json.dumps(raw))
    with pytest.raises(SandboxError, match=r"another version"):
        Record.read(layout)


def test_only_one_changes_a_sandbox_at_a_time(tmp_path: Path) -> None:
    layout, clock = SandboxLayout(tmp_path / "b"), ManualClock()
    with state.locked(layout, clock, make=True):
        with pytest.raises(SandboxError, match=r"has been working on"), state.locked(layout, clock):
            pass
        assert clock.now > 1_000 + state.LOCK_WAIT_S
    with state.locked(layout, clock):
        pass


def test_a_folder_removed_by_who_had_the_lock_before_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    layout, clock = SandboxLayout(tmp_path / "b"), ManualClock()
    layout.folder.mkdir()
    stale = os.open(layout.folder, os.O_RDONLY)
    fcntl.flock(stale, fcntl.LOCK_EX)
    layout.folder.rmdir()
    with state.locked(layout, clock, make=True):
        assert layout.folder.is_dir()
    os.close(stale)


def test_there_is_nothing_to_lock_where_there_is_no_sandbox(tmp_path: Path) -> None:
    other = SandboxLayout(tmp_path / "other")
    other.folder.mkdir()
    Record(settings=SandboxSettings(shape=Shape(), user=USER), path="").write(other)
    with pytest.raises(NotUpError) as missing, state.locked(SandboxLayout(tmp_path / "b"), ManualClock()):
        pass
    assert "(up: other)" in str(missing.value)
    assert not (tmp_path / "b").exists()


def test_removal_takes_the_sandbox_and_leaves_others(tmp_path: Path) -> None:
    root = tmp_path / "boxes"
    mine, other = SandboxLayout(root / "b"), SandboxLayout(root / "c")
    for layout in (mine, other):
        (layout.folder / "log").mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    (mine.folder / "link").symlink_to(outside)
    state.empty(mine)
    assert list(mine.folder.iterdir()) == []
    state.remove(mine)
    assert sorted(path.name for path in root.iterdir()) == ["c"]
    state.remove(other)
    assert not root.exists()
    assert outside.is_dir()


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of all sandboxes: with a short name, as sockets want it."""
    with tempfile.TemporaryDirectory(prefix="dl") as folder:
        monkeypatch.setenv("DEEPLINK_SANDBOX_ROOT", folder)
        yield Path(folder)


def test_what_a_killed_command_left_is_named_and_what_somebody_is_at_is_not(root: Path) -> None:
    assert lifecycle.left_over(SystemClock()) == []
    for name in ("half", "busy", "gone", "Not one", "results"):
        (root / name).mkdir()
    (root / "half" / "log").mkdir()
    (root / "results" / "log").mkdir()
    (root / "results" / "model.pt").touch()  # somebody's own, beside
    gone = Record(settings=SandboxSettings(shape=Shape(), user=USER), path="/bin", keeper=ProcessId(1, 0))
    gone.write(SandboxLayout(root / "gone"))
    with state.locked(SandboxLayout(root / "busy"), SystemClock()):
        assert lifecycle.left_over(SystemClock()) == ["gone", "half"]
    assert "busy" in lifecycle.names()
    (root / "half" / "sandbox.json").write_text("{")
    assert lifecycle.left_over(SystemClock()) == ["busy", "gone"], "what cannot be read may be up"


def test_who_does_a_fault_changes_the_sandbox_and_two_do_none_at_once(tmp_path: Path) -> None:
    layout, clock = SandboxLayout(tmp_path), ManualClock()
    layout.log.mkdir()
    with (
        state.locked(layout, clock, faults=True),
        state.locked(layout, clock),
        pytest.raises(SandboxError, match=r"has been working on"),
        state.locked(layout, clock, faults=True),
    ):
        pytest.fail("two at once")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".", "-x", "A", "a b", "x" * 32, "ä", "a\n"])
def test_a_name_with_path_tricks_or_odd_characters_is_refused(name: str) -> None:
    with pytest.raises(SandboxError, match=r"^sandbox '") as refused:
        SandboxLayout.of(Path("/srv"), name)
    assert refused.value.exit_code == 2


def test_a_folder_too_long_for_sockets_is_refused_before_anything_is_made() -> None:
    assert SandboxLayout.of(Path("/") / ("x" * 40), "box").folder.name == "box"
    with pytest.raises(SandboxError, match="longer names than Linux allows"):
        SandboxLayout.of(Path("/") / ("x" * 90), "box")


def test_everything_lies_in_the_sandboxs_folder() -> None:
    layout = SandboxLayout.of(Path("/srv"), "box")
    assert all(layout.folder in folder.parents for folder in layout.folders)
    assert layout.ssd("n3") == Path("/srv/box/machines/n3/ssd")


def test_root_and_others_have_places_of_their_own(tmp_path: Path) -> None:
    assert default_root({}, root=True) == Path("/var/lib/deeplink-sandbox")
    assert default_root({"XDG_CACHE_HOME": str(tmp_path)}, root=False) == tmp_path / "deeplink" / "sandbox"
    assert default_root({"DEEPLINK_SANDBOX_ROOT": "/srv"}, root=True) == Path("/srv")


def test_a_user_of_the_host_keeps_name_and_number_and_gets_a_home_in_the_sandbox() -> None:
    layout = SandboxLayout.of(Path("/srv"), "box")
    assert choose_user("0", layout) == choose_user("root", layout)
    assert choose_user("root", layout).home == layout.homes / "root"


def test_an_unknown_user_exists_in_the_sandbox_alone() -> None:
    layout = SandboxLayout.of(Path("/srv"), "box")
    assert choose_user("mia-lou", layout).uid == 64100
    assert choose_user("54321", layout).name == "u54321"


@pytest.mark.parametrize("wanted", ["", "a:b", "Mia", "x/y", "9" * 12, "9" * 30, "a\nb"])
def test_what_no_user_can_be_called_is_refused(wanted: str) -> None:
    with pytest.raises(SandboxError, match=r"^user '"):
        choose_user(wanted, SandboxLayout.of(Path("/srv"), "box"))
