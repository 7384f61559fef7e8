"""`deeplink cat`: samples to standard output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from deeplink.completion import PlaceType

if TYPE_CHECKING:
    from deeplink.library import Library

_EPILOG = """
The bytes are those that were packed: each sample is compared with its checksum when it is read.

\b
Examples:
  deeplink cat mnist/labels.csv | head
  deeplink cat mnist@3f2a91/train/7/00001.png > seven.png
  deeplink cat --json mnist/train/7/00001.png mnist/train/7/00002.png

\b
Exit codes: 0 done, 1 a sample cannot be read, 2 there is no such sample.
"""
_AT_ONCE = 64


@click.command("cat", epilog=_EPILOG)
@click.argument("places", type=PlaceType(), nargs=-1, required=True, metavar="NAME[@VERSION]/PATH...")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line: path, bytes, checksum, base64.")
def command(*, places: tuple[str, ...], as_json: bool) -> None:
    """Write samples to standard output, one after another."""
    from deeplink.library import IsFolderError, Library

    library = Library()
    # A path that is wrong is told before anything is written.
    for place in places:
        if library.at(place).entry.is_folder:
            raise IsFolderError(place)
    for start in range(0, len(places), _AT_ONCE):
        _write(library, places[start : start + _AT_ONCE], as_json=as_json)


def _write(library: Library, places: tuple[str, ...], *, as_json: bool) -> None:
    import base64
    import json
    import sys

    from deeplink.cli import output_minded

    out = sys.stdout.buffer
    read = library.read(places)
    for place in places:
        data: bytes | memoryview = read[place]
        if as_json:
            found = library.at(place)
            facts = {"path": str(found.place), "bytes": found.bytes, "checksum": f"{found.checksum:016x}"}
            data = json.dumps({**facts, "base64": base64.b64encode(data).decode()}).encode() + b"\n"
        with output_minded(only_output=True):
            out.write(data)
            out.flush()
