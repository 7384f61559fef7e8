from __future__ import annotations

import os
from pathlib import Path

import pytest

from deeplink.core.publish import published_file, published_folder, write_text


def test_a_file_appears_whole(tmp_path: Path) -> None:
    final = tmp_path / "a"
    with published_file(final, mode=0o600) as draft:
        draft.write_text("hello")
        assert not final.exists()
    assert final.read_text() == "hello"
    assert final.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["a"]


def test_a_failure_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    final = tmp_path / "a"
    write_text(final, "old")
    with pytest.raises(RuntimeError), published_file(final) as draft:
        draft.write_text("half")
        raise RuntimeError
    assert final.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    final = tmp_path / "d"
    with published_folder(final) as draft:
        (draft / "sub").mkdir()
        (draft / "sub" / "x").write_text("1")
        assert not final.exists()
    assert (final / "sub" / "x").read_text() == "1"


def test_a_folder_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    final = tmp_path / "d"
    final.mkdir()
    (final / "keep").write_text("1")
    with pytest.raises(OSError, match="not empty"), published_folder(final) as draft:
        (draft / "x").write_text("2")
    assert os.listdir(final) == ["keep"]
    assert os.listdir(tmp_path) == ["d"]


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127 + "x"])
def test_a_name_may_be_as_long_as_a_file_system_allows(tmp_path: Path, name: str) -> None:
    write_text(tmp_path / name, "whole")
    assert (tmp_path / name).read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == [name]
