"""From small files to shards: plans, shards being built, members that pack, and what was lost made again.

Other packages import: `building`, `distributed_pack`, `parts`, `plan`, `rebuild_index`, `shard_pipeline`,
`verifying`.
"""
