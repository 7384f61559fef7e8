"""What a user sees of jobs: gathered from Slurm and from what jobs leave behind, and put into words.

Other packages import: `job_folder`, `follow`, `job_names`, `job_view`, `job_output`, `picture`, `reasons`.
"""
