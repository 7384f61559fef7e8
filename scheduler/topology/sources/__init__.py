"""Readers of what tells a topology, one module for each format; pure: text in, graph and findings out.

Other packages import: `assemble`, `document`, `gathering`, `nvidia`, `slurm_topology`.
"""
