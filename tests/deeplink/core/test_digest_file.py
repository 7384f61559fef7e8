"""Lists of members that lie in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from deeplink.core.errors import DeepLinkError
from deeplink.core.publish import leave, leave_members, read_members
from deeplink.core.types import Member, NodeName, format_members

MEMBERS = tuple(Member(NodeName(f"n{i}"), f"10.0.0.{i}:7411", 512, f"leaf{i // 4}") for i in range(8))


def test_a_list_is_the_same_by_its_file_and_by_itself(tmp_path: Path) -> None:
    text = format_members(MEMBERS)
    assert read_members(leave_members(tmp_path, text)) == read_members(text)
    assert [member.address for member in read_members(text)] == [member.address for member in MEMBERS]


def test_a_file_has_the_name_of_its_content_and_is_written_once(tmp_path: Path) -> None:
    one = leave(tmp_path, "launch", b"one")
    before = one.stat()
    assert leave(tmp_path, "launch", b"one") == one
    assert (one.stat().st_ino, one.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    other = leave(tmp_path, "launch", b"other")
    assert (one.read_bytes(), other.read_bytes()) == (b"one", b"other")
    assert sorted(tmp_path.iterdir()) == sorted([one, other]), "no draft is left"
    assert one.name.startswith("launch.")


def test_a_file_that_cannot_be_read_or_holds_no_list_is_said(tmp_path: Path) -> None:
    with pytest.raises(DeepLinkError, match=r"cannot read .*/nowhere"):
        read_members(f"@{tmp_path}/nowhere")
    (tmp_path / "odd").write_text("n0")
    with pytest.raises(ValueError, match="odd: 'n0' is not NAME=HOST:PORT"):
        read_members(f"@{tmp_path}/odd")


def test_a_file_that_is_not_what_its_name_says_is_no_list_and_is_written_again(tmp_path: Path) -> None:
    value = leave_members(tmp_path, format_members(MEMBERS))
    path = Path(value.removeprefix("@"))
    path.write_bytes(path.read_bytes()[:40])  # as a node that died may leave it
    with pytest.raises(ValueError, match="not what its name says"):
        read_members(value)
    assert leave_members(tmp_path, format_members(MEMBERS)) == value
    assert len(read_members(value)) == len(MEMBERS)
