# A job of one node, on which the data was not packed.
deeplink demo --write-digits digits
salloc -N1 -w n0 --exclusive deeplink pack digits digits
salloc -N1 -w n1 --exclusive deeplink run --nproc-per-node 1 -- python epochs.py digits 3
