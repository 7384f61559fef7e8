"""Bytes on disk: blocks, the index and its parts.

Other packages import: `block`, `index`, `index_format`, `names`.
"""
