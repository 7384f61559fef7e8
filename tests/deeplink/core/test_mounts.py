from __future__ import annotations

from pathlib import Path

import pytest

from deeplink.core import store_place

TABLE = [("/", "ext4"), ("/home", "nfs4"), ("/local/ssd", "xfs"), ("/dev/shm", "tmpfs"), ("/local/ssd", "ext4")]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/homes/a", "ext4"),
        ("/home", "nfs4"),
        ("/home/a/store", "nfs4"),
        ("/local/ssd/store", "ext4"),
    ],
)
def test_the_nearest_mount_above_counts_and_of_two_on_one_point_the_later(path: str, kind: str) -> None:
    assert store_place.file_system(Path(path), TABLE) == kind


def test_of_this_machine_it_is_read() -> None:
    assert store_place.file_system(Path("/proc/self")) == "proc"
    assert store_place.slowness(Path("/proc"), "/") == ""


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "store").symlink_to("/proc")
    assert store_place.file_system(tmp_path / "store") == "proc"


def test_lines_that_are_none_are_left_out() -> None:
    assert store_place.parse_mounts("nonsense\n1 2 3\n\n36 35 98:0 / /a rw,x shared:1 - lustre mds rw\n") == [
        ("/a", "lustre")
    ]


def test_it_is_said_where_the_files_themselves_are_quicker() -> None:
    assert "nfs4" in store_place.slowness(Path("/home/a"), "s3://bucket", TABLE)
    assert "lies in memory" in store_place.slowness(Path("/local/ssd"), "/dev/shm/data", TABLE)
    assert not store_place.slowness(Path("/local/ssd"), "/home/a", TABLE)
    assert not store_place.slowness(Path("/dev/shm/store"), "/dev/shm/data", TABLE)
