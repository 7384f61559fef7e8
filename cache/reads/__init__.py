"""Samples on this node: open shard files, copies and views of them, and what serves where they fail."""
