"""Which nodes a job should have, and which should hold copies of a shard: functions of values; pure.

Other packages import: `model`, `predicted`, `request`, `search`, `sweep`.
"""
