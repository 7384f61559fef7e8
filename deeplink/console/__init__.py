"""The operator health console.

Other packages import: `actions`, `collect`, `jobs`, `journal_queries`, `request_guard`, `roles`, `serve`, `snapshot`.
"""
