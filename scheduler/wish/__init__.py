"""What a job asks, what the cluster has for it, and the wish that comes of both: sbatch's way to better nodes."""
