# Jobs on nodes that never saw the data: with agents, and plain Python under srun. The small files are gone by then.
deeplink demo --write-digits digits
salloc -N1 -w n0 --exclusive deeplink pack digits digits
mv digits moved
salloc -N2 -w n1,n2 --exclusive deeplink run --nproc-per-node 1 -- python epochs.py digits 3
srun -N1 -w n3 --exclusive python epochs.py digits 3
