"""A file backend for OpenMMLab's `mmengine`: its datasets and transforms read packed samples.

Importing this module registers the backend under the name `deeplink` and for paths that begin with `deeplink://`;
in a config file: `custom_imports = dict(imports=["deeplink.fs.mmengine_backend"])`.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mmengine.fileio import BaseStorageBackend, register_backend

from deeplink.core.publish import write_unsynced
from deeplink.fs.library import PROTOCOL, DatasetNotFoundError, Library, ReadOnlyDatasetError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deeplink.core.config import Config
    from deeplink.fs.library import PathEntry

    FilePath = str | os.PathLike[str]


class DeepLinkBackend(BaseStorageBackend):  # type: ignore[misc]
    """Packed datasets as mmengine reads files. Read only; each dataset stays at one version.

    Args:
        path_mapping: beginnings of paths, and what stands for them, such as `{"data/coco/": "deeplink://coco/"}`:
            a config that names local folders then reads a packed dataset. The longest that fits counts.
        versions: dataset name to version, or the beginning of one, for datasets not to be read at their newest.
        config: where catalog, store and members are; what the environment and the files say when None.

    Raises:
        ConfigError: the configuration cannot be used.
    """

    def __init__(
        self,
        path_mapping: Mapping[str, str] | None = None,
        *,
        versions: Mapping[str, str] | None = None,
        config: Config | None = None,
    ) -> None:
        mapping = path_mapping or {}
        self._mapping = sorted(mapping.items(), key=lambda item: len(item[0]), reverse=True)
        self._library = Library(versions=versions, config=config)

    def _place(self, filepath: FilePath) -> str:
        path = os.fspath(filepath)
        for beginning, instead in self._mapping:
            if path.startswith(beginning):
                path = instead + path.removeprefix(beginning)
                break
        # pathlib makes one slash of two.
        return path.removeprefix(f"{PROTOCOL}:").strip("/")

    def get(self, filepath: FilePath) -> bytes:
        """Return a sample's bytes.

        Raises:
            DatasetNotFoundError, IsFolderError: there is no such sample.
            NotReadError: its bytes cannot be had anywhere.
        """
        place = self._place(filepath)
        return bytes(self._library.read([place])[place])

    def get_text(self, filepath: FilePath, encoding: str = "utf-8") -> str:
        """Return a sample as text. Raises as `get`."""
        return self.get(filepath).decode(encoding)

    def exists(self, filepath: FilePath) -> bool:
        """Tell whether something lies there."""
        return self._kind(filepath) is not None

    def isdir(self, filepath: FilePath) -> bool:
        """Tell whether it is a folder."""
        return self._kind(filepath) is True

    def isfile(self, filepath: FilePath) -> bool:
        """Tell whether it is a sample."""
        return self._kind(filepath) is False

    def _kind(self, filepath: FilePath) -> bool | None:
        try:
            return self._library.at(self._place(filepath)).entry.is_folder
        except DatasetNotFoundError:
            return None

    def join_path(self, filepath: FilePath, *filepaths: FilePath) -> str:
        """Return the parts of a path as one."""
        parts = [os.fspath(filepath).rstrip("/"), *(os.fspath(part).strip("/") for part in filepaths)]
        return "/".join(parts)

    @contextmanager
    def get_local_path(self, filepath: FilePath) -> Iterator[str]:
        """Give a local file with a sample's bytes and its name's ending, until the end of the `with`.

        Raises:
            DatasetNotFoundError, IsFolderError, NotReadError: as `get`.
            OSError: it cannot be written.
        """
        data = self.get(filepath)
        with tempfile.TemporaryDirectory(prefix="deeplink-") as folder:
            path = Path(folder, f"sample{Path(filepath).suffix}")
            path.write_bytes(data)
            yield str(path)

    def copyfile_to_local(self, src: FilePath, dst: FilePath) -> str:
        """Copy a sample to a local file, or into a local folder; return the file.

        Raises:
            DatasetNotFoundError, IsFolderError, NotReadError: as `get`.
            OSError: it cannot be written.
        """
        target = Path(dst)
        if target.is_dir():
            target /= self._place(src).rpartition("/")[2]
        write_unsynced(target, memoryview(self.get(src)))
        return str(target)

    def copytree_to_local(self, src: FilePath, dst: FilePath) -> str:
        """Copy all that lies below a folder to a local one; return it. Raises as `planned` and `fetch` do."""
        from deeplink.fs.copy_out import fetch, planned  # noqa: PLC0415 - datasets that only read do not need it

        target = Path(dst)
        if target.exists():
            raise FileExistsError(f"{target} exists")
        tasks = planned(self._library, [self._place(src)], str(target), recursive=True)
        for _, problem in fetch(tasks, progress=lambda _files, _bytes: None):
            raise problem
        return str(target)

    def list_dir_or_file(
        self,
        dir_path: FilePath,
        list_dir: bool = True,  # noqa: FBT001, FBT002 - mmengine's
        list_file: bool = True,  # noqa: FBT001, FBT002 - mmengine's
        suffix: str | tuple[str, ...] | None = None,
        recursive: bool = False,  # noqa: FBT001, FBT002 - mmengine's
    ) -> Iterator[str]:
        """Yield what lies in a folder by paths relative to it, without files whose names begin with a dot.

        Args:
            dir_path: the folder.
            list_dir: folders.
            list_file: samples.
            suffix: only samples that end so; goes with `list_dir=False`.
            recursive: all that lies below, too.

        Raises:
            TypeError: a suffix and folders at once, or a suffix of the wrong kind.
            DatasetNotFoundError: there is no such folder.
        """
        if list_dir and suffix is not None:
            raise TypeError("`suffix` should be None when `list_dir` is True")
        if suffix is not None and not isinstance(suffix, str | tuple):
            raise TypeError("`suffix` must be a string or tuple of strings")
        found = self._library.at(self._place(dir_path))
        if not found.entry.is_folder:
            raise DatasetNotFoundError(str(found.place), "it is no folder")
        depth = None if recursive else 1
        return self._listed(found, suffix or "", depth, folders=list_dir, files=list_file)

    @staticmethod
    def _listed(
        found: PathEntry, suffix: str | tuple[str, ...], depth: int | None, *, folders: bool, files: bool
    ) -> Iterator[str]:
        skip = len(found.place.inner) + 1 if found.place.inner else 0
        for entry in found.below(depth):
            path = entry.path[skip:]
            if entry.is_folder:
                if folders:
                    yield path
            elif files and path.endswith(suffix) and not path.rpartition("/")[2].startswith("."):
                yield path

    def _refuse(self, *_args: Any, **_options: Any) -> NoReturn:
        raise ReadOnlyDatasetError("write or remove through mmengine")

    put = put_text = copyfile = copytree = copyfile_from_local = copytree_from_local = _refuse
    remove = rmtree = copy_if_symlink_fails = _refuse


register_backend(PROTOCOL, DeepLinkBackend, force=True, prefixes=PROTOCOL)
