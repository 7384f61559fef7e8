"""Reports of a rank: progress, sections, the time of its steps, and its stacks when a signal asks.

Other packages import: `progress`, `step_split`, `timing`.
"""
