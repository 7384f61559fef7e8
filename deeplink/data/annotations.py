"""Annotation files: a table beside the samples, with a row for each (CSV, TSV, JSON Lines)."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from deeplink.cache.errors import KeyMissingError
from deeplink.data.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deeplink.cache.format.index import Index

FILE_NAME: Final = "file_name"
"""The field that says which file a row is about, as in Hugging Face's image folders."""
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_KINDS = (*_DELIMITERS, "jsonl")


def check_kind(path: str) -> None:
    """Return if the name of a file says how it is to be read.

    Raises:
        ValueError: it does not.
    """
    if path.rpartition(".")[2].lower() not in _KINDS:
        raise ValueError(f"annotations {path!r}: a file that ends in .{', .'.join(_KINDS)} is meant")


def rows_of(path: str, data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row: the file that it is about, and its other fields (text, of JSON what it says).

    Raises:
        DatasetError: a row cannot be read, or has no `file_name`.
    """
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
    """Return the fields of each sample's annotation; None where it has none. Objects, shape (samples,).

    Args:
        path: of the annotations in the dataset; files are named from its folder.
        data: its bytes.
        index: of the version.
        table: rows of each sample's files, int64, shape (samples, columns), -1 for none.
        strict: whether a row about a file that is no sample's is an error.

    Raises:
        DatasetError: as said, as `rows_of`, or two rows are about one sample.
    """
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
