"""A real multi-host Slurm cluster on one machine, for trying, testing and demonstrating."""
