"""What a user sees of jobs: gathered from Slurm and from what jobs leave behind, and put into words.

Other packages import: `follow`, `goodput`, `job_folder`, `job_names`, `job_view`,
`measured`, `picture`.
"""
