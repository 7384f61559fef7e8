"""What a job asks, what the cluster has for it, and the hint that comes of both: sbatch's way to better nodes.

Other packages import: `ask`, `cluster_survey`, `decide`, `decision`, `making`, `planner`, `reconcile`.
"""
