"""The operator health console.

Other packages import: `collect`, `journal_queries`, `request_guard`, `serve`, `snapshot`.
"""
