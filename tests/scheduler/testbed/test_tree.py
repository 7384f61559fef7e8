"""The plan of the machines' file tree, on trees made up here; tests/cluster runs it for real."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typing_extensions import override

from deeplink.scheduler.testbed.errors import SandboxError
from deeplink.scheduler.testbed.tree import MountPlan, ThisHost, follow, plan

KEPT = Path("/var/lib/boxes/b")
NEW = KEPT / "root"
STAGE = KEPT / "exposed"


@dataclass
class Made(ThisHost):
    """A file tree: folders and files with their modes, links with their targets."""

    modes: dict[str, int]
    links: dict[str, str] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)

    @override
    def children(self, folder: Path) -> list[str]:
        return sorted({Path(p).name for p in [*self.modes, *self.links] if Path(p).parent == folder and p != "/"})

    @override
    def is_folder(self, path: Path) -> bool:
        return str(path) in self.modes and str(path) not in self.plain

    @override
    def exists(self, path: Path) -> bool:
        return str(path) in self.modes or str(path) in self.links

    @override
    def link(self, path: Path) -> str | None:
        return self.links.get(str(path))

    @override
    def closed(self, path: Path) -> bool:
        return not self.modes[str(path)] & (0o004 if str(path) in self.plain else 0o001)


def host(**more: int) -> Made:
    folders = ["/", "/usr", "/usr/lib", "/proc", "/sys", "/dev", "/etc", "/tmp", "/run", "/var", "/var/lib"]
    modes = dict.fromkeys([*folders, "/var/lib/boxes", str(KEPT), "/lost+found"], 0o755)
    return Made({**modes, "/root": 0o700, "/root/py": 0o755, "/root/py/v3": 0o755, **more}, {"/lib": "usr/lib"})


def planned(tree: Made, *exposed: str) -> MountPlan:
    return plan(tree, NEW, STAGE, KEPT, [Path(path) for path in exposed])


def binds(steps: tuple[tuple[str, ...], ...]) -> dict[str, str]:
    return {step[-1]: step[-2] for step in steps if step[:2] in {("mount", "--rbind"), ("mount", "--bind")}}


def covers(steps: tuple[tuple[str, ...], ...]) -> list[str]:
    return [step[-1] for step in steps if step[-2] == "cover"]


def test_top_folders_are_bound_but_for_those_that_each_machine_has_of_its_own() -> None:
    steps = planned(host()).shared
    assert binds(steps).keys() == {f"{NEW}{top}" for top in ("/usr", "/dev", "/var")} | {f"{NEW}{KEPT}"}
    for made in ("/tmp", "/run", "/local", "/proc", "/sys", "/root"):
        assert ("mkdir", f"{NEW}{made}") in steps
    assert ("ln", "-s", "usr/lib", f"{NEW}/lib") in steps
    assert ("cp", "-a", "/etc", f"{NEW}/etc") in steps
    assert not any("lost+found" in word for step in steps for word in step)


def test_a_path_below_a_closed_folder_is_shown_read_only_in_an_open_one_in_its_place() -> None:
    steps = planned(host(), "/root/py/v3").shared
    assert covers(steps) == [f"{NEW}/var/lib/boxes", f"{NEW}/root"]
    assert binds(steps)[f"{NEW}/root/py/v3"] == "/root/py/v3"
    assert ("mount", "-o", "remount,bind,ro", f"{NEW}/root/py/v3") in steps


def test_a_path_that_others_reach_already_needs_nothing() -> None:
    assert planned(host(), "/usr/lib") == planned(host())


def test_other_sandboxes_are_hidden() -> None:
    steps = planned(host()).shared
    assert f"{NEW}/var/lib/boxes" in covers(steps)
    assert binds(steps)[f"{NEW}{KEPT}"] == str(KEPT)


def test_a_closed_folder_itself_is_made_anew_with_what_others_may_read_in_it() -> None:
    tree = host(**{"/usr/clone": 0o700, "/usr/clone/src": 0o755, "/usr/clone/key": 0o700, "/usr/clone/a": 0o644})
    tree.plain.add("/usr/clone/a")
    tree.links["/usr/clone/l"] = "src"
    steps = planned(tree, "/usr/clone").shared
    assert covers(steps)[1:] == [f"{NEW}/usr/clone"]
    shown = {place: source for place, source in binds(steps).items() if "clone" in place}
    assert shown == {f"{NEW}/usr/clone/{name}": f"/usr/clone/{name}" for name in ("src", "a")}
    assert ("ln", "-sfn", "src", f"{NEW}/usr/clone/l") in steps
    assert ("touch", f"{NEW}/usr/clone/a") in steps


def test_links_on_the_way_are_made_again_where_they_would_be_covered() -> None:
    tree = host()
    tree.links["/root/py/current"] = "v3"
    steps = planned(tree, "/root/py/current").shared
    assert ("ln", "-sfn", "v3", f"{NEW}/root/py/current") in steps
    assert f"{NEW}/root/py/v3" in binds(steps)


def test_what_is_exposed_in_tmp_is_bound_into_the_tmp_of_each_machine() -> None:
    tree = host(**{"/tmp/x": 0o700, "/tmp/x/clone": 0o755})
    found = planned(tree, "/tmp/x/clone")
    [(place, source)] = [item for item in binds(found.shared).items() if item[0].startswith(f"{NEW}{STAGE}")]
    assert source == "/tmp/x/clone"
    assert binds(found.own) == {"/tmp/x/clone": place.removeprefix(str(NEW))}
    assert ("mkdir", "-p", "/tmp/x/clone") in found.own


def test_a_closed_folder_that_is_called_tmp_is_no_tmp() -> None:
    found = planned(host(**{"/usr/tmp": 0o700, "/usr/tmp/x": 0o755}), "/usr/tmp/x")
    assert found.own == ()
    assert f"{NEW}/usr/tmp/x" in binds(found.shared)


def test_a_closed_folder_inside_an_exposed_one_can_be_exposed_too() -> None:
    tree = host(**{"/root/py/v3/in": 0o700, "/root/py/v3/in/side": 0o755})
    steps = planned(tree, "/root/py/v3/in/side", "/root/py/v3").shared
    assert covers(steps)[1:] == [f"{NEW}/root", f"{NEW}/root/py/v3/in"]
    places = list(binds(steps))
    assert places.index(f"{NEW}/root/py/v3") < places.index(f"{NEW}/root/py/v3/in/side")


def test_what_does_not_exist_or_is_unreadable_is_refused_by_name() -> None:
    tree = host(**{"/usr/key": 0o600})
    tree.plain.add("/usr/key")
    tree.links.update({"/usr/a": "b", "/usr/b": "a"})
    for path, why in {
        "/usr/none": "does not exist",
        "/usr/key": "may not read",
        "/usr/a": "circles",
        "/": "all",
    }.items():
        with pytest.raises(SandboxError, match=r"cannot expose") as refused:
            planned(tree, path)
        assert f"expose {path}:" in str(refused.value)
        assert why in str(refused.value) or path == "/"


def test_this_machines_tree_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "f").write_text("x")
    (tmp_path / "l").symlink_to("d/../f")
    (tmp_path / "d").chmod(0o700)
    (tmp_path / "f").chmod(0o644)
    here = ThisHost()
    links, real = follow(here, tmp_path / "l")
    assert (links[-1], real) == ((tmp_path / "l", "d/../f"), tmp_path / "f")
    assert here.children(tmp_path) == ["d", "f", "l"]
    assert here.closed(tmp_path / "d")
    assert not here.closed(tmp_path / "f")
    assert here.is_folder(tmp_path / "d")
    assert not here.is_folder(tmp_path / "l")
