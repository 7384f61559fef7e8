# An unchanged script that opens the files of a folder, on a node where the folder was not packed.
deeplink demo --write-digits digits
salloc -N1 -w n0 --exclusive deeplink pack digits digits
cat >train.sh <<'TRAIN'
#!/bin/bash
srun python told.py imagefolder.py digits 3 0
TRAIN
deeplink sbatch --deeplink-shim --deeplink-paths -N1 -w n1 --exclusive --wait -o train.log train.sh
cat train.log
# The same script by itself, with workers; nobody can read the files any more.
find digits -type f -exec chmod 000 {} +
cat >again.sh <<'AGAIN'
#!/bin/bash
srun python imagefolder.py digits 1 2
AGAIN
deeplink sbatch --deeplink-shim --deeplink-paths=digits -N1 -w n1 --exclusive --wait -o again.log again.sh
sed 's/^/with workers: /' again.log
