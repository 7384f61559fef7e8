"""Ranks in a container of Charliecloud's read a dataset through their nodes' agents."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from deeplink.scheduler.slurm.states import JobState
from deeplink.scheduler.testbed.cluster import Sandbox
from tests.cluster.jobs import folder_of, submit
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.cluster]

READ = """\
import os, pathlib, tempfile
from deeplink.cache.reader import Reader
os.environ["DEEPLINK_STORE"] = tempfile.mkdtemp()  # nothing lies there: all comes from the agents, for the token
pictures = Reader.open("pictures")
total = sum(map(len, pictures.read(range(len(pictures)))))
inside = pathlib.Path("/image-of-the-test").exists()
print(f"rank {os.environ['RANK']}: {len(pictures)} samples, {total} bytes, inside {inside}")
"""


def image_of(cluster: Sandbox, folder: Path) -> Path:
    """Make an image: a root with nothing of its own but the places where this machine's programs are mounted."""
    image = folder / "image"
    for name in ("bin", "dev", "etc", "lib", "lib64", "proc", "sys", "tmp", "usr"):
        (image / name).mkdir(parents=True)
    for name in ("etc/passwd", "etc/group", "etc/hosts", "etc/resolv.conf", "image-of-the-test"):
        (image / name).touch()
    for path in (image, *image.rglob("*")):
        shutil.chown(path, cluster.user.uid, cluster.user.gid)  # with --write it makes the other places itself
    return image


def test_a_rank_inside_reads_through_the_agent_outside(sandbox: Sandbox) -> None:
    folder = folder_of(sandbox)
    small = folder / "pictures" / "train"
    small.mkdir(parents=True)
    for number in range(50):
        (small / f"{number}.bin").write_bytes(bytes([number]) * 1000)
    (folder / "read.py").write_text(READ)
    image = image_of(sandbox, folder)
    python = Path(sys.executable)
    programs = ["/usr", "/bin", "/lib", "/lib64", str(Path(sys.base_prefix)), str(python.parents[2])]
    mounts = " ".join(f"--container-mount={path}" for path in programs)
    script = f"""\
export USER=$(id -un)
deeplink pack {folder}/pictures pictures
run="deeplink run --nproc-per-node 1 --container {image} --container-option=-w {mounts}"
$run --nnodes 1 -- true  # makes the places in the image: two at once would trip over each other
$run -- {python} {folder}/read.py
"""
    job = submit(sandbox, "-N2", script, folder=folder)
    assert job.await_end(3 * LIMIT_S).state is JobState.COMPLETED, job.told()
    for rank in (0, 1):
        assert f"rank {rank}: 50 samples, 50000 bytes, inside True" in job.output(), job.told()
