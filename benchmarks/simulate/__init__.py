"""Real job traces replayed on a cluster, nodes chosen by one policy or another; pure but for reading traces."""
