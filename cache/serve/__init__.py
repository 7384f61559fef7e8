"""The agent's side of a read: open shards, and the port that sends them.

Other packages import: `server`.
"""
