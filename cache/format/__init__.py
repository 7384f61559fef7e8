"""Bytes on disk: blocks, shards, the index and its parts.

Other packages import: `access`, `block`, `index`, `index_format`, `names`, `shard`.
"""
