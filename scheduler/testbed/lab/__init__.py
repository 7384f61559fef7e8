"""The fault laboratory: one fault at a time, put into a sandbox and taken out again.

Other packages import: `faults`, `laboratory`.
"""
