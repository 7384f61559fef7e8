"""The operator health console.

Other packages import: `collect`, `jobs`, `journal_queries`, `request_guard`, `serve`, `snapshot`.
"""
