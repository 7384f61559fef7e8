"""Samples on this node, copies and views of them; those that no node has; whether the small files are faster.

Other packages import: `batch`, `fallback`, `local`, `mapped`, `step_aside`.
"""
