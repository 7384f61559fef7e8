"""How a release of Slurm's library is told of a job: its functions take other arguments from one to the next."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deeplink.scheduler.slurm import completion
from tests.waiting import LIMIT_S

# As the libraries of these releases say it: 22.05.8, 24.11.5, 26.05.5.
V22_05, V24_11, V26_05 = 0x260000, 0x2A0000, 0x2D0000


@pytest.mark.parametrize("version", [V22_05, V24_11, 0x2B0000])
def test_up_to_25_05_a_job_is_its_number(version: int) -> None:
    named = completion.job_argument(version, 7)
    assert isinstance(named, ctypes.c_uint32)
    assert named.value == 7


@pytest.mark.parametrize("version", [0x2C0000, V26_05])
def test_from_25_11_on_a_job_is_a_step_that_names_none(version: int) -> None:
    named: Any = completion.job_argument(version, 7)
    step = named._obj  # what the pointer points to
    assert (step.sluid, step.job_id, step.step_het_comp, step.step_id) == (0, 7, 0xFFFFFFFE, 0xFFFFFFFE)
    assert ctypes.sizeof(step) == 24, "as slurm.h has it"


@pytest.mark.parametrize("version", [0, 0x2E0000, 0x1A0505 << 8])
def test_a_library_that_is_not_known_is_not_called(version: int) -> None:
    assert completion.job_argument(version, 7) is None


LIBRARY = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
typedef struct {{ uint64_t sluid; uint32_t job_id, step_het_comp, step_id; }} slurm_step_id_t;
long slurm_api_version(void) {{ return {version}; }}
void slurm_perror(char *what) {{ fprintf(stderr, "%s: refused\\n", what); }}
int slurm_complete_job({signature}, uint32_t code) {{ printf("%u %u\\n", {job}, code); return {result}; }}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="a library is compiled")
@pytest.mark.parametrize(
    ("version", "result", "code", "said"),
    [
        (V24_11, 0, 0, "7 768\n"),
        (V24_11, -1, 1, "7 768\n"),
        (V26_05, 0, 0, "7 768\n"),
        (0x2E0000, 0, 1, ""),
    ],
)
def test_a_library_gets_job_and_exit_code_as_it_takes_them(
    version: int, result: int, code: int, said: str, tmp_path: Path
) -> None:
    is_step = version >= V26_05
    source = LIBRARY.format(
        version=version,
        result=result,
        signature="slurm_step_id_t *step" if is_step else "uint32_t job",
        job="step->job_id" if is_step else "job",
    )
    (tmp_path / "slurm.c").write_text(source)
    library = tmp_path / "libslurm.so"
    made = ["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "slurm.c")]
    subprocess.run(made, check=True, timeout=LIMIT_S)
    argv = [sys.executable, "-I", "-S", completion.__file__, str(library), "7", "3"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (code, said)
    assert bool(done.stderr) is bool(code)
