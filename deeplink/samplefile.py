"""A sample as an open file, to be read only."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, NoReturn

from typing_extensions import override

from deeplink.library import ReadOnlyDatasetError

if TYPE_CHECKING:
    from collections.abc import Iterable


class SampleFile(io.BytesIO):
    """A sample's bytes, in memory, as an open file: seekable, picklable with its position.

    Attributes:
        path: where the sample lies.
        size: bytes.
        mode: `rb`.
    """

    mode = "rb"

    def __init__(self, path: str, data: bytes) -> None:
        super().__init__(data)
        self.path, self.size = path, len(data)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (type(self), self.path, self.getvalue(), self.tell())

    @override
    def writable(self) -> bool:
        return False

    @override
    def write(self, _data: Any) -> NoReturn:
        raise ReadOnlyDatasetError("write to a sample")

    @override
    def writelines(self, _lines: Iterable[Any]) -> NoReturn:
        raise ReadOnlyDatasetError("write to a sample")

    @override
    def truncate(self, _size: int | None = None) -> NoReturn:
        raise ReadOnlyDatasetError("truncate a sample")


def _reopened(kind: type[SampleFile], path: str, data: bytes, position: int) -> SampleFile:
    file = kind(path, data)
    file.seek(position)
    return file
