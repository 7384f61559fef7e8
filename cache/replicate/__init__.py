"""Which shards a node holds: fetching, filling, keeping, warming and recovering them.

Other packages import: `budget`, `fetching`, `fill`, `keeper`, `residency`, `shard_recovery`, `warming`.
"""
