"""Arguments that name a place in a dataset, completed by the shell as paths are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem
from typing_extensions import override

from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from deeplink.library import Library

_MOST = 200
"""Completions offered at once."""


class PlaceType(click.ParamType[str]):
    """`NAME[@VERSION][/PATH]`, as text."""

    name = "place"

    @override
    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from deeplink.library import Library  # noqa: PLC0415 - a command that is not completed does not pay for it

        try:
            found = completions(Library(), incomplete)
        except (DeepLinkError, OSError):
            return []  # the command itself will say what is wrong
        return [CompletionItem(text) for text in found]


def completions(library: Library, beginning: str) -> list[str]:
    """Return the places that a text may be the beginning of: datasets, versions, folders and samples.

    Raises:
        DeepLinkError: the catalog cannot be read.
    """
    folder, slash, name = beginning.rpartition("/")
    if slash:
        found = library.at(folder)
        prefix = folder + slash
        below = [entry.path + "/" * entry.is_folder for entry in found.entries() if entry.path != found.entry.path]
        texts = [prefix + path.removeprefix(f"{found.place.inner}/").lstrip("/") for path in below]
        return [text for text in texts if text.startswith(beginning)][:_MOST]
    dataset, at, version = name.partition("@")
    if at:
        versions = reversed(library.catalog.versions(dataset))
        return [f"{dataset}@{found}" for found in versions if found.startswith(version)][:_MOST]
    return [found for found in library.catalog.names(lost=True) if found.startswith(name)][:_MOST]
