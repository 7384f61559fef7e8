"""From a description of the fabric to rank order and placement; pure.

Other packages import: `graph`, `network`, `rank_order`.
"""
