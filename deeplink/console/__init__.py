"""The operator health console.

Other packages import: `actions`, `collect`, `demo_sources`, `jobs`, `journal_queries`, `request_guard`, `serve`,
`snapshot`.
"""
