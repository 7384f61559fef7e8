"""A kind of source, `slow://FOLDER`, that is as slow as a file beside the folder says, or fails."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override

from deeplink.core.publish import write_text


def set_pace(folder: Path, pace: str) -> None:
    """Say how many seconds each read takes from now on; "gone": reads fail."""
    write_text(_pace_file(folder), pace)


def _pace_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.pace")


class SlowFileSystem(LocalFileSystem):  # type: ignore[misc]
    """Local files behind a line that is slow."""

    protocol = "slow"

    @classmethod
    @override
    def _strip_protocol(cls, path: str) -> str:
        found: str = super()._strip_protocol(str(path).removeprefix("slow://"))
        return found

    @override
    def cat_file(self, path: str, *args: Any, **options: Any) -> bytes:
        self._wait(path)
        found: bytes = super().cat_file(path, *args, **options)
        return found

    @override
    def open(self, path: str, *args: Any, **options: Any) -> Any:
        self._wait(path)
        return super().open(path, *args, **options)

    def _wait(self, path: str) -> None:
        for folder in list(Path(self._strip_protocol(path)).parents)[:-1]:
            pace = _pace_file(folder)
            if pace.exists():
                said = pace.read_text(encoding="ascii")
                if said == "gone":
                    raise OSError("the line is dead")
                time.sleep(float(said))


def register() -> None:
    """Make the kind known to fsspec in this process."""
    fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
