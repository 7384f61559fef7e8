"""Packed datasets for the tests of batches as one tensor, and of streams of them."""

from __future__ import annotations

from pathlib import Path

from deeplink.cache.packer import pack
from deeplink.core.config import Config

CLASSES = ("ant", "bee", "cat")
COUNT = 240


def body(number: int) -> bytes:
    return f"{number} ".encode() * (number * 37 % 211)


def packed_below(base: Path) -> Config:
    """Pack "many" (lengths of 0 and more), "even" (100 bytes each) and "flat" (no classes) below a folder."""
    config = Config(
        catalog=base / "catalog", store=base / "store", state=base / "state", node="n0", shard_bytes=64 << 10
    )
    for number in range(COUNT):
        for name, data in (("many", body(number)), ("even", b"%100d" % number)):
            path = base / name / CLASSES[number * 3 // COUNT] / f"{number:03d}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    (base / "flat").mkdir()
    (base / "flat" / "one").write_bytes(b"1")
    for name in ("many", "even", "flat"):
        pack(str(base / name), name, config=config)
    return config
