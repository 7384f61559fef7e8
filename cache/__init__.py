"""The distributed small-file cache: shards, index, packing, ownership, node store, server, client.

Other packages import: `catalog`, `errors`, `membership`, `packer`, `reader`.
"""
