# An array of eight tasks of one node each, on nodes where the data was not packed.
deeplink demo --write-digits digits
salloc -N1 -w n0 --exclusive deeplink pack digits digits
cat >task.sh <<'TASK'
#!/bin/bash
#SBATCH --array=0-7 --nodes=1 --exclude=n0 --exclusive -o task-%a.log
deeplink run --nproc-per-node 1 -- python epochs.py digits 3
TASK
sbatch --wait task.sh
cat task-*.log
