"""The operator health console.

Other packages import: `collect`, `demo_sources`, `jobs`, `journal_queries`, `request_guard`, `serve`, `snapshot`.
"""
