"""A real multi-host Slurm cluster on one machine, for trying, testing and demonstrating.

Other packages import: `cluster`, `errors`, `namespaced`, `processes`, `settings`, `shape`, `state`.
"""
