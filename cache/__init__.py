"""The distributed small-file cache: shards, index, packing, ownership, node store, server, client."""
