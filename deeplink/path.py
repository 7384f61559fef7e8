"""Where something lies: `deeplink://name[@version]/path`, a dataset, a folder in it, or a sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from typing_extensions import override

from deeplink.cache.catalog import checked_name
from deeplink.cache.errors import DatasetMissingError, DatasetNameError
from deeplink.errors import DeepLinkError

if TYPE_CHECKING:
    from deeplink.cache.catalog import Catalog
    from deeplink.types import Version

PROTOCOL = "deeplink"
_SCHEME = f"{PROTOCOL}://"


class VersionAmbiguousError(DeepLinkError):
    """The beginning of a version's name fits several of them."""

    exit_code = 2

    def __init__(self, name: str, beginning: str, found: list[Version]) -> None:
        super().__init__(
            f"dataset {name!r}: {beginning!r} is the beginning of {', '.join(found)}",
            remedy="Give more digits of the version.",
        )
        self.name, self.beginning, self.found = name, beginning, tuple(found)


@dataclass(frozen=True, slots=True)
class DatasetPath:
    """A place in a dataset.

    Attributes:
        name: the dataset; empty for the catalog itself.
        version: what stood behind the @, a version or its beginning; empty for the newest.
        inner: folder or sample in the dataset, without slashes at its ends; empty for the whole dataset.
    """

    name: str
    version: str = ""
    inner: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `[deeplink://]name[@version][/path]`.

        >>> DatasetPath.parse("deeplink://mnist@3f2a/train/7/")
        DatasetPath(name='mnist', version='3f2a', inner='train/7')
        >>> DatasetPath.parse("")
        DatasetPath(name='', version='', inner='')

        Raises:
            DatasetNameError: the first part cannot be a dataset's name.
        """
        root, _, inner = stripped(text).partition("/")
        name, at, version = root.partition("@")
        if root and not (version if at else name):
            raise DatasetNameError(root)
        return cls(checked_name(name) if root else "", version, inner)

    @property
    def root(self) -> str:
        """The part before the first slash."""
        return f"{self.name}@{self.version}" if self.version else self.name

    @override
    def __str__(self) -> str:
        return f"{self.root}/{self.inner}" if self.inner else self.root


def stripped(text: str) -> str:
    """Return a path without its scheme and without slashes at its ends.

    >>> stripped("deeplink://mnist/train/")
    'mnist/train'
    """
    return text.removeprefix(_SCHEME).strip("/")


def resolved_version(catalog: Catalog, name: str, beginning: str) -> Version:
    """Return the version that a text means: the newest for an empty one, else the one that begins with it.

    Raises:
        DatasetMissingError: there is none.
        DatasetNameError: no dataset can be called so.
        VersionAmbiguousError: there are several.
        CatalogError, IndexFormatError: the catalog cannot be read.
    """
    if not beginning:
        return catalog.latest(name)
    there = catalog.versions(name)
    found = [version for version in there if version.startswith(beginning)]
    if len(found) > 1:
        raise VersionAmbiguousError(name, beginning, found)
    if not found:
        lost = [version for version in catalog.recorded(name) if version.startswith(beginning)]
        raise DatasetMissingError(name, beginning, catalog.root, there, lost=lost)
    return found[0]
