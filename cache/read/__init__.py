"""Samples on this node: open shard files, copies and views of them.

Other packages import: `agents_asked`, `batch`, `fallback`, `local`, `mapped`, `step_aside`.
"""
