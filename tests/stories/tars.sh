# WebDataset's tars, packed as they are, and read by a job on a node where they were not packed.
deeplink demo --write-digits digits
mkdir tars
(cd digits && find . -type f | sort) | split -l 450 - tars/list-
for list in tars/list-*; do
    tar -C digits -cf "tars/digits-${list##*-}.tar" -T "$PWD/$list"
done
salloc -N1 -w n0 --exclusive deeplink pack "$PWD/tars/digits-*.tar" digits
salloc -N1 -w n1 --exclusive deeplink run --nproc-per-node 1 -- python epochs.py digits 3
