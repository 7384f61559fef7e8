"""One node's shards: what is there, marked and pinned.

Other packages import: `described`, `identity`, `pins`, `store`.
"""
