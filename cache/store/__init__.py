"""One node's shards, and its copies of indexes: what is there, marked and pinned.

Other packages import: `described`, `identity`, `index_copies`, `pins`, `store`.
"""
