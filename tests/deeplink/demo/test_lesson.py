from __future__ import annotations

from pathlib import Path

import pytest

from deeplink.cache.catalog import checked_name
from deeplink.core.errors import DeepLinkError
from deeplink.demo.story import lesson, write_digits


def test_digits_are_small_images_in_train_and_test(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    assert write_digits(folder) == 1797
    assert sorted(path.name for path in (folder / "train").iterdir()) == [str(digit) for digit in range(10)]
    assert max(path.stat().st_size for path in folder.rglob("*.png")) < 4096
    assert write_digits(folder) == 1797, "a folder that is there is taken as it is"
    plan = lesson(folder, ranks=4)
    assert (plan.train_root, plan.test_root, plan.size) == ("train", "test", 8)
    assert plan.steps == plan.epochs * 23  # 1,437 images, 64 per step


def test_a_folder_may_have_any_name_and_classes_may_have_folders(tmp_path: Path) -> None:
    write_digits(tmp_path / "digits")
    source = tmp_path / "My pics (2)"
    (tmp_path / "digits" / "train").rename(source)
    deeper = source / "0" / "more"
    deeper.mkdir()
    for path in sorted((source / "0").glob("*.png"))[:7]:
        path.rename(deeper / path.name)
    plan = lesson(source, ranks=4)
    assert checked_name(plan.name) == "my-pics-2"
    assert plan.steps == plan.epochs * 23


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    write_digits(tmp_path / "digits")
    (tmp_path / "digits" / "train" / "3" / "notes.txt").write_text("not an image")
    with pytest.raises(DeepLinkError, match=r"notes\.txt"):
        lesson(tmp_path / "digits", ranks=4)


def test_a_tree_without_split_trains_on_all_of_it(tmp_path: Path) -> None:
    write_digits(tmp_path / "digits")
    (tmp_path / "digits" / "train").rename(tmp_path / "flat")
    plan = lesson(tmp_path / "flat", ranks=4)
    assert (plan.train_root, plan.test_root) == ("", "")


@pytest.mark.parametrize("what", ["absent", "empty", "no image"])
def test_what_cannot_be_trained_on_is_refused_by_name(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "data"
    if what != "absent":
        folder.mkdir()
    if what == "no image":
        (folder / "class").mkdir()
        (folder / "class" / "x.png").write_text("no image at all")
    with pytest.raises(DeepLinkError, match=str(folder)):
        lesson(folder, ranks=4)
