"""Ends a job as its batch script's end would, with its exit code. Run as `completion.py LIBRARY JOB CODE`.

No command of Slurm's does that, but its library does for a job's owner: it is how salloc ends its own job. In a
process of its own, for the library is C, and may be another release's.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

# What `slurm_api_version` has in its upper half; Slurm's own version is another number.
API_25_11, API_26_05 = 44, 45
_NO_VALUE = 0xFFFFFFFE


class StepIdentity(ctypes.Structure):
    """`slurm_step_id_t`, from Slurm 25.11 on; a job's where it names no step."""

    _fields_ = (
        ("sluid", ctypes.c_uint64),
        ("job_id", ctypes.c_uint32),
        ("step_het_comp", ctypes.c_uint32),
        ("step_id", ctypes.c_uint32),
    )


def job_argument(api_version: int, job: int) -> Any | None:
    """Return what a library of this version takes as the job; None where nobody knows."""
    release = api_version >> 16
    if not 0 < release <= API_26_05:
        return None
    if release < API_25_11:
        return ctypes.c_uint32(job)
    return ctypes.byref(StepIdentity(0, job, _NO_VALUE, _NO_VALUE))


def main(library: str, job: int, code: int) -> int:
    """Return 0 once slurmctld has taken the end of the job; 1 where it has not, or the library is not known."""
    slurm = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # its plugins look for its names
    slurm.slurm_api_version.restype = ctypes.c_long
    version = slurm.slurm_api_version()
    named = job_argument(version, job)
    if named is None:  # what it takes may have changed again
        sys.stderr.write(f"{library}: version {version:#x} of Slurm's library is not known\n")
        return 1
    if hasattr(slurm, "slurm_init"):  # since 21.08
        slurm.slurm_init(None)
    if not slurm.slurm_complete_job(named, ctypes.c_uint32(code << 8)):  # as wait(2) has it
        return 0
    slurm.slurm_perror(b"slurm_complete_job")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
