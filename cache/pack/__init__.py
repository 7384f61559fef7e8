"""From small files to shards: plans, shards being built, members that pack, and what was lost made again.

Other packages import: `building`, `distributed_pack`, `home_access`, `packing_service`, `parts`, `plan`,
`rebuild_index`, `rebuild_shard`, `shard_pipeline`, `verifying`.
"""
