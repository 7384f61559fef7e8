"""What is noted in a store beside its shards: marks, pins of running jobs, whether it was wiped."""
