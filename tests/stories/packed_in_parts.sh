# A source packed by an array of jobs, one part each: it is listed once, and one command makes the dataset of it.
deeplink demo --write-digits digits
cat >part.sh <<'TASK'
#!/bin/bash
#SBATCH --array=1-4 --nodes=1 --exclusive -o part-%a.log
deeplink pack digits digits --part $SLURM_ARRAY_TASK_ID/4 --shard-size 100K
TASK
sbatch --wait part.sh || { cat part-*.log; exit 1; }
cat part-*.log
echo "listings: $(find ~ -name 'listing-*.npz' | wc -l)"
deeplink index merge digits
echo "left: $(find ~ -path '*/.parts/*' | wc -l)"
srun -N1 -w n1 python epochs.py digits 2
