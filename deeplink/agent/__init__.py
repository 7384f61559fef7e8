"""The node agent: serves shards and copies of checkpoints, watches its node, passes the ranks' progress on.

Other packages import: `agent`.
"""
