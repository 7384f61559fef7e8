"""Samples on other nodes: batches asked of members, the wire they travel on, and members that fail.

Other packages import: `client`, `fleet`, `frames`.
"""
