"""Chooses where a pack keeps its shards besides, and removes from there what no version has any more."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deeplink.cache.errors import HomeError
from deeplink.cache.membership import configured_members
from deeplink.cache.source.home import FolderHome, home_beside, make_home_beside
from deeplink.core.mounts import file_system, is_shared
from deeplink.core.types import ShardId
from deeplink.ops.inventory import shards_of
from deeplink.rpc.daemon import is_loopback

if TYPE_CHECKING:
    from deeplink.cache.catalog import Catalog
    from deeplink.core.config import Config
    from deeplink.core.types import Version

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class HomeChoice:
    """Where a pack keeps the shards besides, and why."""

    url: str  # empty for nowhere
    why: str
    named: bool = False  # in the command or the configuration, else by the rule

    def made(self, catalog: Path) -> HomeChoice:
        """Return the choice once its folder is there; nowhere, where the rule's cannot be written to."""
        if self.named or not self.url:
            return self
        try:
            make_home_beside(catalog)
        except HomeError as problem:
            return HomeChoice("", str(problem))
        return self


def chosen_home(config: Config, given: str = "", *, local: int = 0, here: bool = False) -> HomeChoice:
    """Return the home of a pack onto what `pack_target.target` would give; writes nothing.

    `given` is a folder, a URL, "none", or empty for what the configuration says. Its "auto" is the folder beside a
    catalog that nodes share: one on a file system of that kind, and that of a pack in a Slurm job or onto agents
    of other hosts, which will look for it there.
    """
    asked = given or config.home
    if asked != AUTO:
        where = "as the command says" if given else "as the setting `home` says"
        path = asked if "://" in asked else os.path.expandvars(Path(asked).expanduser())
        return HomeChoice("" if asked == NONE else path, where, named=True)
    kind = file_system(config.catalog)
    if is_shared(kind):
        return HomeChoice(home_beside(config.catalog), f"the catalog lies on {kind}, which nodes share")
    members = () if here or local else configured_members(config)
    if not all(is_loopback(member.address.rpartition(":")[0].strip("[]")) for member in members):
        return HomeChoice(home_beside(config.catalog), "agents of other hosts read the catalog")
    if not (here or local or members) and os.environ.get("SLURM_JOB_ID"):
        return HomeChoice(home_beside(config.catalog), "the nodes of jobs read the catalog")
    return HomeChoice("", f"the catalog lies on {kind or 'an unknown file system'}, which no other node sees")


def orphans(catalog: Catalog, name: str, version: Version) -> tuple[str, list[str]]:
    """Return the home of a version, and its shards there that no other version in the catalog has.

    Empty where it is not the catalog's own home: other catalogs may count on that. Raises DeepLinkError where the
    index of the version cannot be read.
    """
    index = catalog.open(name, version)
    if index.home != home_beside(catalog.root):
        return "", []
    left = {entry.id for entry in index.shards}
    for other in catalog.names(lost=True):
        left -= shards_of(catalog, other, but=version if other == name else "")
    return index.home, sorted(left)


def remove_at_home(url: str, name: str, version: Version, shards: list[str]) -> None:
    """Remove an index and shards from a home in a folder."""
    home = FolderHome(url)
    home.remove_index(name, version)
    for shard in shards:
        home.remove(ShardId(shard))
