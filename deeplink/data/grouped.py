"""`deeplink.GroupedDataset`: packed files that belong together as one sample, WebDataset's way."""

from __future__ import annotations

import csv
import enum
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, SupportsIndex

import numpy as np
from typing_extensions import override

from deeplink.cache.errors import KeyMissingError
from deeplink.data.dataset import MapDatasetBase
from deeplink.data.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deeplink.cache.format.index import Index
    from deeplink.core.config import Config

_DOT, _SLASH = ord("."), ord("/")
_AT_ONCE = 1 << 16
"""Rows looked at together: some ten MiB of temporary arrays."""
_CASE = ord("a") - ord("A")
_NAMED = 5
_ANNOTATION = "annotation"
FILE_NAME: Final = "file_name"
"""The field that says which file a row of annotations is about, as in Hugging Face's image folders."""
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_KINDS = (*_DELIMITERS, "jsonl")


@dataclass(frozen=True, slots=True, eq=False)
class Grouping:
    """Which files of an index are one sample together."""

    rows: np.ndarray  # int64, shape (files,): the rows that have an extension
    stems: np.ndarray  # int64, the same shape: bytes of each row's path before the dot
    groups: np.ndarray  # int64, the same shape: the group of each, numbered in the order of their first rows
    count: int  # how many groups there are


def grouped(index: Index, rows: range) -> Grouping:
    """Return how the files in a run of an index's rows go together."""
    parts = list(_parts(index, rows))
    if not parts:
        empty = np.empty(0, np.int64)
        return Grouping(empty, empty, empty, 0)
    found = np.concatenate([part.rows for part in parts])
    stems = np.concatenate([part.stems for part in parts])
    begins = np.concatenate([part.begins for part in parts])
    numbers = np.cumsum(begins) - 1
    if any(part.has_dotted_folders for part in parts):
        numbers = _joined(index, found, stems, begins, numbers)
    return Grouping(found, stems, numbers, int(numbers.max()) + 1 if len(numbers) else 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    rows: np.ndarray
    stems: np.ndarray
    begins: np.ndarray  # whether a row begins a group: its key is not that of the row before it
    has_dotted_folders: bool


def _parts(index: Index, rows: range) -> Iterator[_Part]:
    last = b""
    for start in range(rows.start, rows.stop, _AT_ONCE):
        run = range(start, min(start + _AT_ONCE, rows.stop))
        text, bounds = index.key_text(run)
        names, dots, dotted = _split(text, bounds)
        has_one = dots > names
        places = np.flatnonzero(has_one)
        starts, stems = bounds[:-1][places], (dots - bounds[:-1])[places]
        begins = np.ones(len(places), bool)
        begins[1:] = ~_equal(text, starts[:-1], starts[1:], stems[:-1], stems[1:])
        if len(places):
            first = bytes(text[starts[0] : starts[0] + stems[0]])
            begins[0] = first != last
            last = bytes(text[starts[-1] : starts[-1] + stems[-1]])
        yield _Part(places + start, stems, begins, dotted)


def _split(text: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return where keys' own names begin, where their first dots are (0: none), and whether a folder has one."""
    starts, stops = bounds[:-1], bounds[1:]
    slashes, dots = np.flatnonzero(text == _SLASH), np.flatnonzero(text == _DOT)
    # The last slash before the key's end, if it is the key's own.
    before = np.append(-1, slashes)[np.searchsorted(slashes, stops)]
    names = np.maximum(before + 1, starts)
    behind = np.append(dots, len(text))[np.searchsorted(dots, names)]
    in_folders = np.searchsorted(dots, names) > np.searchsorted(dots, starts)
    return names, np.where(behind < stops, behind, 0), bool(in_folders.any())


def _equal(
    text: np.ndarray, starts: np.ndarray, others: np.ndarray, sizes: np.ndarray, other_sizes: np.ndarray
) -> np.ndarray:
    """Return, for each pair of pieces of `text`, whether they are the same bytes."""
    same: np.ndarray = sizes == other_sizes
    pairs = np.flatnonzero(same)
    if not len(pairs):
        return same
    lengths = sizes[pairs]
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
    differs = text[np.repeat(starts[pairs], lengths) + within] != text[np.repeat(others[pairs], lengths) + within]
    same[pairs] = np.add.reduceat(differs, ends - lengths) == 0
    return same


def _joined(
    index: Index, rows: np.ndarray, stems: np.ndarray, begins: np.ndarray, numbers: np.ndarray
) -> np.ndarray:
    """Return the groups' numbers where a folder may lie between the files of one: `a.c`, `a.d/x`, `a.e`."""
    number_of: dict[bytes, int] = {}
    places = np.flatnonzero(begins).tolist()
    known = [
        number_of.setdefault(key_of(index, int(rows[place]), int(stems[place])).encode(), len(number_of))
        for place in places
    ]
    found: np.ndarray = np.array(known, np.int64)[numbers]
    return found


def key_of(index: Index, row: int, size: int) -> str:
    """Return the key of the group that a row belongs to: so many bytes before the first dot of its own name."""
    raw = index.key(row).encode()
    dot = raw.index(b".", raw.rfind(b"/") + 1)
    return raw[dot - size : dot].decode()


def paired(index: Index, root: str, columns: Sequence[Sequence[tuple[str, str]]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the row of each sample's file in each column (-1: none), and the bytes of its key; int64.

    Each column lies in folders of its own, (folder, extension), of which the first counts that a sample has.
    """
    pieces: list[tuple[int, np.ndarray, np.ndarray]] = []
    for number, choices in enumerate(columns):
        for folder, extension in choices:
            whole = f"{root}/{folder}".strip("/")
            grouping = grouped(index, index.rows_below(whole))
            rows = column(index, grouping, [extension])
            stems = np.zeros(grouping.count, np.int64)
            stems[grouping.groups] = grouping.stems
            is_there = np.flatnonzero(rows >= 0)
            sizes = stems[is_there] - len(f"{whole}/".encode())
            found = zip(rows[is_there].tolist(), sizes.tolist(), strict=True)
            keys = np.array([key_of(index, row, size).encode() for row, size in found], np.bytes_)
            pieces.append((number, keys, rows[is_there]))
    every = np.unique(np.concatenate([keys for _, keys, _ in pieces]))
    table = np.full((len(every), len(columns)), -1, np.int64)
    for number, own, rows in reversed(pieces):  # so that the first choice is written last
        table[np.searchsorted(every, own), number] = rows
    return table, np.char.str_len(every).astype(np.int64)


def column(index: Index, grouping: Grouping, extensions: Sequence[str]) -> np.ndarray:
    """Return the row of each group's file with an extension, int64, shape (count,); -1 where it has none."""
    found = np.full(grouping.count, -1, np.int64)
    for extension in extensions:
        members = np.flatnonzero(_has(index, grouping, extension.encode()))
        groups = grouping.groups[members]
        order = np.argsort(groups, kind="stable")
        twice = np.flatnonzero(groups[order][1:] == groups[order][:-1])
        if len(twice):
            first, second = (index.key(int(grouping.rows[members[order[twice[0] + i]]])) for i in range(2))
            raise DatasetError(
                f"{first!r} and {second!r} are both column {extension!r} of one sample",
                remedy="Rename one of them and pack again.",
            )
        is_new = found[groups] < 0
        found[groups[is_new]] = grouping.rows[members[is_new]]
    return found


def _has(index: Index, grouping: Grouping, extension: bytes) -> np.ndarray:
    """Return whether each file has an extension, whatever the case of its letters."""
    wanted = np.frombuffer(extension, np.uint8)
    found = np.zeros(len(grouping.rows), bool)
    for start in range(0, len(grouping.rows), _AT_ONCE):
        rows, stems = grouping.rows[start : start + _AT_ONCE], grouping.stems[start : start + _AT_ONCE]
        first, last = int(rows[0]), int(rows[-1])
        text, bounds = index.key_text(range(first, last + 1))
        begins = bounds[rows - first] + stems + 1
        fits = np.flatnonzero(bounds[rows - first + 1] - begins == len(wanted))
        letters = text[begins[fits][:, None] + np.arange(len(wanted))]
        is_upper = (letters >= ord("A")) & (letters <= ord("Z"))
        found[start + fits] = (letters + is_upper * np.uint8(_CASE) == wanted).all(axis=1)
    return found


class Missing(enum.Enum):
    """What becomes of samples that lack a column."""

    ERROR = "error"
    """The dataset cannot be made."""
    SKIP = "skip"
    """They are left out."""
    NONE = "none"
    """The column is None."""


class GroupedDataset(MapDatasetBase):
    """Samples of several files: `a/7.jpg`, `a/7.json` and `a/7.seg.png` are columns of the sample `a/7`.

    Where columns lie in folders of their own, `img/a/7.jpg` and `mask/a/7.png`, the columns
    `{"image": "img/*.jpg", "mask": "mask/*.png"}` pair them: the key is the path below the folder, `a/7`.

    An item is a dict: `__key__`, and the bytes of each column by its name. The key is the path up to the first dot
    of the file's own name, the extension all that is behind it, in lower case. Files with other extensions are
    left alone. All files of a batch are read at once.

    The version is pinned when the dataset is made. Works with `ResumableSampler`, under DataLoader workers however
    they are started, and pickles.

    Args:
        name: what `deeplink pack` was given.
        columns: extensions, such as `("jpg", "json")`; or names and extensions, such as `{"image": "jpg;png"}`. Of
            several, separated by semicolons, the first that a sample has counts. Or all with folders below root,
            as above: `folder/*.extension`.
        transform: gets the dict of bytes; its result is the item. Without it the dict is. Under spawned workers it
            must be picklable.
        root: folder in the dataset to take the samples from, such as "train".
        annotations: path, below root, of a table in the dataset, .csv or .tsv with a head line, or .jsonl, with a
            row for each sample. Its field `file_name` says which of the dataset's files it is about, from the
            table's own folder; items get the other fields as a dict, `annotation`. A sample without a row lacks a
            column. The table is held in memory.
        seeded: call `transform(item, seed)`, as `Dataset` does.
        missing: what becomes of samples that lack a column: "error", "skip", or "none".
        version: its first digits are enough; the newest when None.
        config: where catalog, store and members are; what the environment and the files say when None.

    Attributes:
        name, root, version: as above; the version is the one that was found.
        columns: the names of the columns.

    Raises:
        DatasetMissingError: there is no such dataset, or not this version of it, or several that begin so.
        DatasetError: there are no samples below root, none has any of the columns, one lacks a column and
            `missing` is "error", one has two files for one extension, or the annotations cannot be used.
        ConfigError: the configuration cannot be used.
        KeyMissingError: there are no such annotations.
        ValueError: no column is named, some have folders and some have not, the annotations are no known kind,
            `missing` is none of these, or `seeded` is without a transform.
    """

    def __init__(
        self,
        name: str,
        columns: Sequence[str] | Mapping[str, str],
        transform: Callable[..., Any] | None = None,
        *,
        root: str = "",
        annotations: str = "",
        seeded: bool = False,
        missing: Missing | str = Missing.ERROR,
        version: str | None = None,
        config: Config | None = None,
    ) -> None:
        wanted = _wanted(columns)
        if annotations:
            check_kind(annotations)
            if _ANNOTATION in wanted:
                raise ValueError(f"columns {columns!r}: {_ANNOTATION!r} is what the annotations' column is called")
        self._missing = Missing(missing)
        if seeded and not transform:
            raise ValueError("seeded=True gives seeds to a transform, and there is none")
        super().__init__(name, root, version, config)
        self.transform, self.columns, self.seeded = transform, tuple(wanted), seeded
        self._folders = tuple({folder: None for choices in wanted.values() for folder, _ in choices})
        self._annotations: np.ndarray | None = None
        self._lengths: np.ndarray | None = None  # once they are asked for: readers ahead do for each batch
        self._rows, self._stems = self._table(list(wanted.values()))
        if annotations:
            self._annotate(f"{self.root}/{annotations}".lstrip("/"))

    def _annotate(self, path: str) -> None:
        """Give samples their annotations, as `missing` says."""
        index = self._reader.index
        data = bytes(self._reader.read([index.row(path)])[0])
        found = matched(path, data, index, self._rows, strict=self._missing is Missing.ERROR)
        lacking = np.flatnonzero(found == None)  # noqa: E711 - by element
        if len(lacking) and self._missing is Missing.ERROR:
            raise self._lacking("annotation", self._rows, self._stems, lacking)
        if self._missing is Missing.SKIP:
            kept = np.flatnonzero(found != None)  # noqa: E711
            if not len(kept):
                raise DatasetError(f"dataset {self.name!r}: annotations {path!r} are about none of its samples")
            self._rows, self._stems, found = self._rows[kept], self._stems[kept], found[kept]
        self._annotations = found

    def _table(self, choices: Sequence[Sequence[tuple[str, str]]]) -> tuple[np.ndarray, np.ndarray]:
        """Return each sample's rows by column (-1: none), and the bytes of its key; int64."""
        index, rows = self._reader.index, self._rows_below_root()
        if self._folders != ("",):
            table, stems = paired(index, self.root, choices)
        else:
            grouping = grouped(index, rows)
            extensions = [[extension for _, extension in names] for names in choices]
            table = np.stack([column(index, grouping, names) for names in extensions], axis=1)
            stems = np.zeros(grouping.count, np.int64)
            stems[grouping.groups] = grouping.stems
        is_there = table >= 0
        is_sample = is_there.all(axis=1) if self._missing is Missing.SKIP else is_there.any(axis=1)
        if not is_sample.any():
            columns = ", ".join(map(repr, self.columns))
            raise DatasetError(
                f"dataset {self.name!r}: below {self.root or '/'!r} no sample has {columns}",
                remedy="A column is what follows the first dot of files' names; `deeplink ls` shows them.",
            )
        table, stems = table[is_sample], stems[is_sample]
        if self._missing is Missing.ERROR:
            self._refuse_missing(table, stems)
        return table, stems

    def _refuse_missing(self, table: np.ndarray, stems: np.ndarray) -> None:
        for name, rows in zip(self.columns, table.T, strict=True):
            lacking = np.flatnonzero(rows < 0)
            if len(lacking):
                raise self._lacking(f"file for column {name!r}", table, stems, lacking)

    def _lacking(self, what: str, table: np.ndarray, stems: np.ndarray, lacking: np.ndarray) -> DatasetError:
        some = lacking[:_NAMED].tolist()
        keys = [key_of(self._reader.index, int(table[i].max()), int(stems[i])) for i in some]
        there = ", ".join(map(repr, keys)) + (" ..." if len(lacking) > len(keys) else "")
        return DatasetError(
            f"dataset {self.name!r}: {len(lacking):,} samples have no {what}: {there}",
            remedy='Give missing="skip" to leave them out, or missing="none" for None in its place.',
        )

    @override
    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_lengths": None}

    @override
    def __len__(self) -> int:
        return len(self._rows)

    @override
    def _pick(self, positions: np.ndarray) -> None:
        super()._pick(positions)
        self._rows, self._stems, self._lengths = self._rows[positions], self._stems[positions], None
        self._annotations = None if self._annotations is None else self._annotations[positions]

    @override
    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[Any]:
        positions = [self._position(index) for index in indices]
        seed_of = self._seed_of(indices)
        rows = self._rows[positions].reshape(-1)
        views = iter(self._reader.read(rows[rows >= 0]))
        items = []
        for position in positions:
            item: dict[str, Any] = {"__key__": self.key(position)}
            for name, row in zip(self.columns, self._rows[position].tolist(), strict=True):
                item[name] = bytes(next(views)) if row >= 0 else None
            if self._annotations is not None:
                fields = self._annotations[position]
                item[_ANNOTATION] = (
                    None if fields is None else dict(fields)
                )  # the item is the transform's to change
            items.append(self._made(position, self.transform, item, *seed_of(position)))
        return items

    @override
    def key(self, index: SupportsIndex) -> str:
        """Return an item's `__key__`, the path of its files (below the columns' folders) up to the first dot."""
        position = self._position(index)
        return key_of(self._reader.index, int(self._rows[position].max()), int(self._stems[position]))

    @override
    def index(self, key: str) -> int:
        """Return the number of the item with a `__key__`. Raises DatasetError where there is none."""
        for folder in self._folders:
            above = f"{self.root}/{folder}/".lstrip("/") if folder else ""
            rows = self._reader.index.rows_beginning(f"{above}{key}.")
            is_one = ((self._rows >= rows.start) & (self._rows < rows.stop)).any(axis=1)
            for number in np.flatnonzero(is_one).tolist():
                if self.key(number) == key:
                    return int(number)
        raise DatasetError(f"dataset {self.name!r} has no sample {key!r} here")

    @property
    @override
    def lengths(self) -> np.ndarray:
        if self._lengths is None:
            whole: np.ndarray = np.append(self._reader.index.lengths, np.uint64(0))  # of row -1, which is no file
            self._lengths = whole[self._rows].sum(axis=1, dtype=np.uint64)
            self._lengths.flags.writeable = False
        return self._lengths

    @override
    def will_need(self, indices: np.ndarray) -> None:
        rows = self._rows[indices]
        self._reader.will_need(rows[rows >= 0])

    @property
    def rows(self) -> np.ndarray:
        """Row in the index of each item's file in each column, -1 where it has none; int64, (len, columns)."""
        return self._rows.copy()


def _wanted(columns: Sequence[str] | Mapping[str, str]) -> dict[str, list[tuple[str, str]]]:
    """Return the folders and extensions of each column, the latter in lower case.

    >>> _wanted({"image": "JPG;png"}), _wanted({"mask": "masks/*.seg.png"})
    ({'image': [('', 'jpg'), ('', 'png')]}, {'mask': [('masks', 'seg.png')]})
    """
    if isinstance(columns, str):
        raise TypeError(f"columns is a list of extensions, or a dict of names and extensions: [{columns!r}]")
    named = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}
    found = {name: [_choice(part.strip()) for part in text.split(";")] for name, text in named.items()}
    choices = [choice for parts in found.values() for choice in parts]
    if not choices or not all(extension for _, extension in choices) or "__key__" in found:
        raise ValueError(f"columns {columns!r}: name at least one extension, and none __key__")
    if len({bool(folder) for folder, _ in choices}) > 1:
        raise ValueError(f"columns {columns!r}: give a folder for each (folder/*.extension), or for none")
    return found


def _choice(text: str) -> tuple[str, str]:
    folder, slash, name = text.rpartition("/")
    extension = name.removeprefix("*.") if slash else name
    if "*" in folder + extension or (slash and (extension == name or not folder.strip("/"))):
        raise ValueError(f"column {text!r}: an extension is meant (jpg), or a folder's (folder/*.jpg)")
    return folder.strip("/"), extension.lower()


# -- annotation files: a table beside the samples, with a row for each (CSV, TSV, JSON Lines)


def check_kind(path: str) -> None:
    """Return if the name of a file says how it is to be read."""
    if path.rpartition(".")[2].lower() not in _KINDS:
        raise ValueError(f"annotations {path!r}: a file that ends in .{', .'.join(_KINDS)} is meant")


def rows_of(path: str, data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row: the file that it is about, and its other fields (text, of JSON what it says)."""
    kind = path.rpartition(".")[2].lower()
    number = 0
    try:
        text = io.StringIO(data.decode("utf-8-sig"), newline="")
        found: Iterator[Any] = (
            csv.DictReader(text, delimiter=_DELIMITERS[kind], strict=True, restkey=FILE_NAME)
            if kind in _DELIMITERS
            else (json.loads(line) for line in text if line.strip())
        )
        for number, row in enumerate(found, 1):  # noqa: B007 - told where the next one is bad
            about = row.pop(FILE_NAME)
            if not isinstance(about, str) or not about:
                raise TypeError(f"its {FILE_NAME} is {about!r}")  # noqa: TRY301 - as what csv and json raise
            yield about, row
    except KeyError as problem:
        raise DatasetError(
            f"annotations {path!r}: row {number} has no {problem}",
            remedy=f"Each row names the file that it is about in {FILE_NAME}, from the annotations' own folder.",
        ) from problem
    except (ValueError, TypeError, AttributeError, csv.Error) as problem:
        raise DatasetError(f"annotations {path!r}: behind row {number}: {problem}") from problem


def matched(path: str, data: bytes, index: Index, table: np.ndarray, *, strict: bool) -> np.ndarray:
    """Return the fields of each sample's annotation, or None; with `strict` a row about no sample raises."""
    found = np.full(len(table), None, object)
    flat = table.reshape(-1)
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    above = path.rpartition("/")[0]
    for name, fields in rows_of(path, data):
        file = f"{above}/{name}".lstrip("/")
        try:
            row = index.row(file)
        except KeyMissingError:
            row = -2
        place = int(np.searchsorted(ordered, row))
        if place == len(ordered) or ordered[place] != row:
            if strict:
                raise DatasetError(
                    f"annotations {path!r} name {name!r}, and {file!r} is no file of a sample",
                    remedy=f'Mend the {FILE_NAME}, or give missing="skip" to leave out what has no counterpart.',
                )
            continue
        sample = int(order[place]) // table.shape[1]
        if found[sample] is not None:
            raise DatasetError(f"annotations {path!r}: two rows are about the sample of {name!r}")
        found[sample] = fields
    return found
