"""Samples on this node: open shard files, copies and views of them.

Other packages import: `batch`, `fallback`, `local`, `mapped`.
"""
