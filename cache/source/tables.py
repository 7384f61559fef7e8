"""What is in a table's file, parquet or Arrow: each row's columns are the parts of a sample.

The part of row 12's column `image` is called `00000012.image`, or by a column that has the rows' keys. Bytes and
text are packed as they are, a struct's field `bytes` too (images and audio of Hugging Face datasets), all else as
JSON; a null is no part. How long a value is stands in no parquet file: a listing reads every value once.
"""

from __future__ import annotations

import io
import json
import threading
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from deeplink.cache.errors import SourceError
from deeplink.cache.source.containers import ContainerFile, FileRanges

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from deeplink.cache.source.source import Source

_BUFFER = 1 << 20
_HELD_BYTES = 128 << 20
"""Of decoded rows, in one file, unless one group of rows alone is more."""
_KEY_BYTES = 200
"""Of memory, the key of a row, about."""
_DIGITS = 8
_CAST = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary_view)
"""Kinds of columns whose values are bytes once they are cast."""
_TAKEN_FROM = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
"""Of dictionaries of views no values can be taken."""
_AGAIN = "Fetch or write it again."
_NESTED = "it may have dictionaries of dictionaries, which Arrow files cannot hold: write plain columns"


@dataclass(frozen=True, slots=True)
class TableColumns:
    """Which columns of a table are packed, and which has the keys."""

    key: str = ""  # a column whose values, as text, are unique within a file; empty: the rows' numbers
    columns: tuple[str, ...] = ()  # that become parts of samples; (): all but that of the keys

    @classmethod
    def parsed(cls, url: str, settings: str) -> TableColumns:
        """Return what stands behind the `#` of a source's URL."""
        said = dict(parse_qsl(settings))
        if settings and not (said and set(said) <= {"key", "columns"}):
            raise SourceError(
                url, f"{settings!r} is not key=COLUMN&columns=COLUMN,COLUMN", "Mend what is behind the #."
            )
        return cls(said.get("key", ""), tuple(filter(None, said.get("columns", "").split(","))))

    def url(self, source: str) -> str:
        """Return a source's URL with this behind its `#`."""
        said = {"key": self.key, "columns": ",".join(self.columns)}
        settings = urlencode({name: value for name, value in said.items() if value}, safe=",")
        return f"{source}#{settings}" if settings else source


class TableContainer(ContainerFile):
    """The rows of one parquet or Arrow file."""

    def __init__(self, files: Source, name: str, size: int, wanted: TableColumns) -> None:
        self._url, self._name, self._key = f"{files.url}/{name}", name, wanted.key
        self._lock = threading.Lock()
        self._decoded: OrderedDict[int, dict[str, list[bytes | None]]] = OrderedDict()
        self._decoded_bytes: dict[int, int] = {}
        file = io.BufferedReader(FileRanges(files, name, size), _BUFFER)
        try:
            self._groups = _ParquetGroups(file) if name.endswith(".parquet") else _arrow_groups(file)
        except (pa.ArrowException, OSError) as problem:
            raise SourceError(files.url, f"{name!r} cannot be read: {problem}", _AGAIN, key=name) from problem
        there = self._groups.schema.names
        self._columns = wanted.columns or tuple(column for column in there if column != wanted.key)
        for column in (*self._columns, *filter(None, [wanted.key])):
            if there.count(column) != 1:
                what = "more than one column" if column in there else "no column"
                known = f"There are: {', '.join(there)}."
                raise SourceError(files.url, f"{name!r} has {what} {column!r}", known, key=name)
        twice = [(a, b) for a in self._columns for b in self._columns if b.endswith(f".{a}")]
        if twice:
            raise SourceError(
                files.url,
                f"columns {twice[0][0]!r} and {twice[0][1]!r} may make the same key",
                "Name the columns.",
            )
        self._starts = [0, *accumulate(self._groups.rows)]

    @cached_property
    def _row_of(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for group in range(len(self._groups.rows)):
            for row, key in enumerate(self._keys(group), self._starts[group]):
                found.setdefault(key, row)
        return found

    def _keys(self, group: int) -> list[str]:
        if not self._key:
            return [f"{row:0{_DIGITS}d}" for row in range(self._starts[group], self._starts[group + 1])]
        column = self._read(group, [self._key]).column(0)
        if column.null_count:
            raise SourceError(
                self._url, f"column {self._key!r} has rows without a key", "Take another column.", key=self._name
            )
        return [str(key) for key in column.to_pylist()]

    @property
    @override
    def held_bytes(self) -> int:
        keys = len(self.__dict__.get("_row_of", ()))
        return _KEY_BYTES * keys + sum(self._decoded_bytes.copy().values())

    @override
    def entries(self) -> Iterable[tuple[str, int | SourceError]]:
        for group in range(len(self._groups.rows)):
            with self._lock:
                keys, values = self._keys(group), self._values(group)
            for column in self._columns:
                for key, value in zip(keys, values[column], strict=True):
                    if value is not None:
                        yield f"{key}.{column}", len(value)

    @override
    def read(self, names: Sequence[str]) -> list[bytes]:
        return [self._value(name) for name in names]

    def _value(self, name: str) -> bytes:
        column = next((column for column in self._columns if name.endswith(f".{column}")), None)
        if column is None:
            raise KeyError(name)
        key = name[: -len(column) - 1]
        with self._lock:
            if self._key:
                row = self._row_of.get(key, -1)
            else:
                row = int(key) if key.isascii() and key.isdigit() and key == f"{int(key):0{_DIGITS}d}" else -1
            if not 0 <= row < self._starts[-1]:
                raise KeyError(name)
            group = bisect_right(self._starts, row) - 1
            value: bytes | None = self._values(group)[column][row - self._starts[group]]
        if value is None:
            raise KeyError(name)
        return value

    def _read(self, group: int, columns: Sequence[str]) -> pa.Table:
        try:
            table = self._groups.read(group, columns)
            for number, column in enumerate(table.columns):
                if pa.types.is_dictionary(column.type):
                    table = table.set_column(number, table.field(number).name, _plain(column))
        except (pa.ArrowException, OSError) as problem:
            raise self._unread(problem) from problem
        return table

    def _unread(self, problem: Exception) -> SourceError:
        return SourceError(self._url, f"cannot be read: {problem}", _AGAIN, key=self._name)

    def _values(self, group: int) -> dict[str, list[bytes | None]]:
        """Return a group's values by column, decoded; those of the last groups are kept."""
        if group not in self._decoded:
            table = self._read(group, self._columns)
            found = {column: self._as_bytes(column, table.column(column)) for column in self._columns}
            self._decoded[group] = found
            self._decoded_bytes[group] = sum(len(value or b"") for values in found.values() for value in values)
            while len(self._decoded) > 1 and sum(self._decoded_bytes.values()) > _HELD_BYTES:
                oldest, _ = self._decoded.popitem(last=False)
                del self._decoded_bytes[oldest]
        self._decoded.move_to_end(group)
        return self._decoded[group]

    def _as_bytes(self, name: str, column: pa.ChunkedArray) -> list[bytes | None]:
        kind = column.type
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            try:
                held = _plain(pc.struct_field(column, "bytes"))
            except pa.ArrowException as problem:
                raise self._unread(problem) from problem
            if held.null_count > column.null_count:
                raise SourceError(
                    self._url,
                    f"column {name!r} has paths of files, not their bytes",
                    "Pack those files.",
                    key=self._name,
                )
            column, kind = held, held.type
        if any(is_kind(kind) for is_kind in _CAST):
            column, kind = column.cast(pa.large_binary()), pa.large_binary()
        values: list[Any] = column.to_pylist()
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
            return values
        return [None if value is None else as_json(value) for value in values]


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column's values out of the dictionaries that hold them."""
    while pa.types.is_dictionary(column.type):
        kind = _TAKEN_FROM.get(column.type.value_type, column.type.value_type)
        values = [chunk.dictionary.cast(kind).take(chunk.indices) for chunk in column.chunks]
        column = pa.chunked_array(values, kind)
    return column


def _has_dictionary(kind: pa.DataType) -> bool:
    below = (kind.field(number).type for number in range(kind.num_fields))
    return pa.types.is_dictionary(kind) or any(map(_has_dictionary, below))


def as_json(value: Any) -> bytes:
    """Return a number, text, time, list or mapping as JSON; TypeError: it is none of these."""
    text: str = json.dumps(value, default=_as_text, ensure_ascii=False, separators=(",", ":"))
    return text.encode()


def _as_text(value: object) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, date | time | timedelta | Decimal | UUID | bytes):
        return str(value)
    raise TypeError(type(value).__name__)  # an array's text leaves out most of it


class _ParquetGroups:
    """The row groups of a parquet file."""

    def __init__(self, file: io.BufferedReader[FileRanges]) -> None:
        import pyarrow.parquet as pq  # noqa: PLC0415 - training processes import this module, and few of them need it

        self._file = pq.ParquetFile(file)
        facts = self._file.metadata
        self.schema = self._file.schema_arrow
        self.rows = [facts.row_group(group).num_rows for group in range(facts.num_row_groups)]

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        return self._file.read_row_group(group, columns=list(columns))


class _ArrowGroups:
    """The record batches of an Arrow file, or of a stream of which it is known where each begins."""

    def __init__(self, schema: pa.Schema, batches: Iterator[tuple[int, pa.RecordBatch]], at: Any) -> None:
        self.schema, self._at = schema, at
        self._places, self.rows = [], []
        for place, batch in batches:
            self._places.append(place)
            self.rows.append(batch.num_rows)

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        batch = self._at(self._places[group])
        return pa.Table.from_batches([batch]).select(list(columns))


def _arrow_groups(file: io.BufferedReader[FileRanges]) -> _ArrowGroups:
    try:
        found = pa.ipc.open_file(file)
    except pa.ArrowInvalid:
        file.seek(0)
        return _stream_groups(file)
    batches = ((number, found.get_batch(number)) for number in range(found.num_record_batches))
    try:
        return _ArrowGroups(found.schema, batches, found.get_batch)
    except (pa.ArrowException, OSError) as problem:
        if any(map(_has_dictionary, found.schema.types)):
            raise pa.ArrowInvalid(f"{problem} ({_NESTED})") from problem
        raise


def _stream_groups(file: io.BufferedReader[FileRanges]) -> _ArrowGroups:
    schema = pa.ipc.read_schema(source := pa.PythonFile(file))
    if any(map(_has_dictionary, schema.types)):
        raise pa.ArrowInvalid("it is a stream with dictionaries; write it as an Arrow file, or as parquet")

    def at(place: int) -> pa.RecordBatch:
        source.seek(place)
        return pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)

    def batches() -> Iterator[tuple[int, pa.RecordBatch]]:
        while True:
            place = source.tell()
            try:
                message = pa.ipc.read_message(source)
            except EOFError:
                return
            if message is None:
                return
            yield place, pa.ipc.read_record_batch(message, schema)

    return _ArrowGroups(schema, batches(), at)
