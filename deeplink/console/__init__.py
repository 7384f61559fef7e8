"""The operator health console.

Other packages import: `app`, `collect`, `serve`, `snapshot`.
"""
