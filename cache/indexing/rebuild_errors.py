"""What can go wrong when an index is made anew of shards alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.errors import DeepLinkError
from deeplink.text import listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeplink.types import ShardId


class ShardsUnknownError(DeepLinkError):
    """Nobody says of which shards an index is to be made."""

    exit_code = 2

    def __init__(self, name: str, version: str) -> None:
        super().__init__(
            f"of which shards version {version or '(none)'} of {name!r} was made is not on record",
            remedy="Name them with --shard, or take all there are with --all; --source says where the files are.",
        )
        self.name, self.version = name, version


class ShardsNotFoundError(DeepLinkError):
    """Shards that an index is to be made of are in no folder and at no member that was asked."""

    def __init__(self, missing: Sequence[ShardId], wanted: int, asked: Sequence[str]) -> None:
        some = listed(missing, 3)
        what = f"{len(missing)} of {wanted} shards were not found ({some})" if wanted else "no shard was found"
        super().__init__(
            f"{what}; asked: {'; '.join(asked) or 'nobody'}",
            remedy="Name more folders with --from or more agents with --members.",
        )
        self.missing, self.wanted, self.asked = tuple(missing), wanted, tuple(asked)


class KeyInTwoShardsError(DeepLinkError):
    """Shards that an index is to be made of hold samples of one name: they are of several versions."""

    def __init__(self, keys: int, example: str, shards: tuple[ShardId, ShardId]) -> None:
        super().__init__(
            f"{keys:,} keys are in two shards, such as {example!r} in {shards[0]} and {shards[1]}",
            remedy="They are of different versions: name the shards of one version with --shard.",
        )
        self.keys, self.example, self.shards = keys, example, shards


class RebuiltDiffersError(DeepLinkError):
    """An index made anew is not the one that was lost."""

    def __init__(self, name: str, wanted: str, found: str) -> None:
        super().__init__(
            f"what the shards of {name!r} make is version {found}, not {wanted}",
            remedy="--as-new publishes it as a version of its own; it may hold samples the lost one left out.",
        )
        self.name, self.wanted, self.found = name, wanted, found
