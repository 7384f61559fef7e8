"""fsspec's own conformance suite over packed datasets, as far as it only reads.

Of `fsspec.tests.abstract`, Copy, Put, Pipe and Open write to what they test; that each such call is refused is
shown in test_filesystem.py. Of Get, `test_get_directory_recursive` makes its own files in what it
tests: here it reads the same files from a packed tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests
from typing_extensions import override

from deeplink.cache.packer import pack
from deeplink.fs.filesystem import DeepLinkFileSystem
from tests.cache.agents import config_below

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SCENARIOS = {
    "bulk": AbstractFixtures._bulk_operations_scenario_0,
    "glob": AbstractFixtures._glob_edge_cases_files,
    "prefix": AbstractFixtures._dir_and_file_with_same_name_prefix,
    "hashed": AbstractFixtures._10_files_with_hashed_names,
}


def join(*parts: Any) -> str:
    return "/".join(str(part) for part in parts)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> DeepLinkFileSystem:
    """One dataset with a folder per scenario of the suite, each made by the suite itself."""
    base = tmp_path_factory.mktemp("conformance")
    local, fixtures = LocalFileSystem(auto_mkdir=True), AbstractFixtures()
    for name, make in SCENARIOS.items():
        make(fixtures, local, join, base / "tree" / name)
    local.touch(join(base, "tree", "recursive", "src", "file"))
    config = config_below(base)
    pack(str(base / "tree"), "conformance", config=config)
    return DeepLinkFileSystem(config=config)


class TestGet(AbstractGetTests, AbstractFixtures):  # type: ignore[misc]
    @pytest.fixture
    def fs(self, packed: DeepLinkFileSystem) -> DeepLinkFileSystem:
        return packed

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return join

    @pytest.fixture
    def fs_path(self) -> str:
        return "conformance/recursive"

    @pytest.fixture
    def fs_bulk_operations_scenario_0(self) -> str:
        return "conformance/bulk/source"

    @pytest.fixture
    def fs_glob_edge_cases_files(self) -> str:
        return "conformance/glob/source"

    @pytest.fixture
    def fs_dir_and_file_with_same_name_prefix(self) -> str:
        return "conformance/prefix/source"

    @pytest.fixture
    def fs_10_files_with_hashed_names(self) -> str:
        return "conformance/hashed/source"

    @override
    def test_get_directory_recursive(
        self, packed: DeepLinkFileSystem, fs_path: str, local_fs: LocalFileSystem, tmp_path: Path
    ) -> None:
        """The suite's own test of this name, but for the lines that make the files."""
        source, target = join(fs_path, "src"), join(tmp_path, "target")
        for expected in ("file", "src/file"):  # into a new folder, then into one that is there
            packed.get(source, target, recursive=True)
            assert local_fs.isfile(join(target, expected))
        assert sorted(local_fs.find(target)) == [join(target, "file"), join(target, "src", "file")]
        local_fs.rm(target, recursive=True)
        for _ in range(2):
            packed.get(source + "/", target, recursive=True)
            assert local_fs.find(target) == [join(target, "file")]
