"""The node agent towards its ranks: what they report, who they are, and where they stand when they hang.

Other packages import: `disk`, `host_checks`, `rank_processes`, `rank_slots`, `reading`, `servicer`, `settings`,
`stacks`, `watching`.
"""
