"""The one door to Slurm's commands, the parsers of their text, and the scripts we hand them.

Other packages import: `cached`, `client`, `command`, `munge`, `nodeset`,
`sbatch_options`, `parse`, `settings`, `states`, `submission`.
"""
