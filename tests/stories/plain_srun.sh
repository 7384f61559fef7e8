# What a notebook does: Python under srun, without `deeplink run` and without any agent.
deeplink demo --write-digits digits
salloc -N1 -w n0 --exclusive deeplink pack --no-home digits digits
srun -N1 -w n1 --exclusive python epochs.py digits 3
srun -N1 -w n1 --exclusive python epochs.py digits 1  # the next one on this node
