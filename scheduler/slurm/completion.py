"""Ends a job as its batch script's end would, with its exit code. Run as `completion.py LIBRARY JOB CODE`.

No command of Slurm's does that, but its library does for a job's owner: it is how salloc ends its own job. In a
process of its own, for the library is C, and may be another release's.
"""

from __future__ import annotations

import ctypes
import sys


def main(library: str, job: int, code: int) -> int:
    """Return 0 once slurmctld has taken the end of the job."""
    slurm = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # its plugins look for its names
    if hasattr(slurm, "slurm_init"):  # since 21.08
        slurm.slurm_init(None)
    slurm.slurm_complete_job.argtypes = [ctypes.c_uint32, ctypes.c_uint32]
    if not slurm.slurm_complete_job(job, code << 8):  # as wait(2) has it
        return 0
    slurm.slurm_perror(b"slurm_complete_job")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
