"""The one door to Slurm's commands, the parsers of their text, and the scripts we hand them."""
