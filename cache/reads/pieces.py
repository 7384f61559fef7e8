"""Parts of a sample that is too long to be read whole for each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deeplink.cache import block
from deeplink.cache.errors import IndexFormatError, ShardCorruptError
from deeplink.cache.reads.mapped import ShardFile

if TYPE_CHECKING:
    from deeplink.cache.index import Index
    from deeplink.cache.store import Store


def read_piece(store: Store, index: Index, row: int, number: int) -> memoryview | None:
    """Return one piece of a sample longer than SPAN; None where this node does not hold it whole.

    Each piece has a block of its own, so it is compared with that block's checksum. Nothing is said of damage: who
    then reads the whole sample finds it.

    Args:
        store: this node's.
        index: the version.
        row: the sample.
        number: of the piece, from 0.
    """
    try:
        shard = int(index.shard[row])
        entry = index.shards[shard]
        where, _, length = index.pieces(row)[number]
        file = ShardFile(store.path(entry.id), entry.id, mapped=False, expected=entry.bytes)
        data = memoryview(bytearray(block.HEADER + length))
        file.read_into([data], [int(index.block_offsets(shard)[where]) - block.HEADER])
        header = block.decode_header(data[: block.HEADER], entry.id)
    except (ShardCorruptError, IndexFormatError, IndexError, OSError):
        return None
    piece = data[block.HEADER :]
    is_whole = (header.number, header.payload, header.checksum) == (where, length, block.checksum(piece))
    return piece if is_whole else None
