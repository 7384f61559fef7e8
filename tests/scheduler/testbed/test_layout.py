from __future__ import annotations

from pathlib import Path

import pytest

from deeplink.scheduler.testbed.errors import SandboxError
from deeplink.scheduler.testbed.layout import SandboxLayout, choose_user, default_root


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
