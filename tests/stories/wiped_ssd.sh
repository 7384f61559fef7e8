# The SSDs are wiped between two jobs; the small files are not there any more when the second one runs.
deeplink demo --write-digits digits
salloc -N2 -w n0,n1 --exclusive deeplink pack digits digits
salloc -N2 -w n0,n1 --exclusive deeplink run --nproc-per-node 1 -- python epochs.py digits 1
mv digits moved
srun -N2 -w n0,n1 --ntasks-per-node=1 rm -rf /local/ssd/deeplink
echo wiped
salloc -N2 -w n0,n1 --exclusive deeplink run --nproc-per-node 1 -- python epochs.py digits 3
