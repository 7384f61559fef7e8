"""Every example whose framework installs here, run as its first lines say: two local nodes, real ranks.

TensorFlow and Horovod do not (a quarter of a gigabyte; no build for this torch): of theirs what they would find is
tested in tests/scheduler/launch/test_recipes.py.
"""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "digits.py")
NOT_RUN = {"tensorflow_mirrored.py", "horovod_torch.py"}
_SAID = re.compile(r"^\w+: rank (\d+) of (\d+) on (\S+), started as (\d+)$", re.MULTILINE)


def named() -> list[str]:
    """Return the command before one whose host's name is to be an address: JAX on CPUs looks it up."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return ["unshare", "--uts", "sh", "-c", 'hostname 127.0.0.1 && exec "$@"', "sh"]
    return []


def run(folder: Path, *options: str) -> str:
    """Return what the ranks wrote."""
    argv = [*named(), sys.executable, "-m", "deeplink", "run", "--local", "2", *options]
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "DEEPLINK_STATE": str(folder / "own"),
        "DEEPLINK_STORE": str(folder / "store"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(sys.prefix) / "deepspeed"),  # apart from the others (Makefile)
    }
    done = subprocess.run(
        argv, env=env, cwd=folder, capture_output=True, text=True, timeout=3 * LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ranks(said: str) -> list[tuple[int, int, str, int]]:
    """Return rank, number of ranks, node and RANK as each rank said them, in order of ranks."""
    return sorted((int(rank), int(world), node, int(own)) for rank, world, node, own in _SAID.findall(said))


def example(name: str, *words: str) -> list[str]:
    if name == "deepspeed_zero.py":
        # It would compile an extension for shared memory first, a minute or two of two cores.
        nothing_built = "import deepspeed.ops, runpy, sys; deepspeed.ops.__compatible_ops__ = {}; "
        start = f"{nothing_built}sys.path.insert(0, {str(EXAMPLES)!r}); runpy.run_path({str(EXAMPLES / name)!r})"
        return ["--", sys.executable, "-c", start]
    return ["--", sys.executable, str(EXAMPLES / name), *words]


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_says_how_it_is_started_and_reports_its_steps(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    said = ast.get_docstring(ast.parse(text)) or ""
    assert "deeplink run" in said
    assert f"examples/{name}" in said
    assert "deeplink.report(step=" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("torch_fsdp.py", "torch"),
        ("accelerate_loop.py", "accelerate"),
        ("deepspeed_zero.py", "deepspeed"),
        ("jax_sgd.py", "jax"),
        ("mpi_sgd.py", "mpi"),
    ],
)
def test_the_framework_takes_the_ranks_as_they_were_started(tmp_path: Path, name: str, recipe: str) -> None:
    said = run(tmp_path, "--recipe", recipe, *example(name))
    assert ranks(said) == [(0, 2, "local0", 0), (1, 2, "local1", 1)], said
    assert re.search(r"^loss 0\.\d+ after step \d+$", said, re.MULTILINE), said


@pytest.mark.slow
def test_ddp_goes_on_where_it_was_below_a_torchrun_per_node(tmp_path: Path) -> None:
    said = run(tmp_path, *example("torch_ddp.py", "saved"))
    assert ranks(said) == [(0, 2, "local0", 0), (1, 2, "local1", 1)], said
    assert "goes on" not in said
    torchrun = [str(Path(sys.executable).with_name("torchrun")), str(EXAMPLES / "torch_ddp.py"), "saved"]
    said = run(tmp_path, "--recipe", "torchrun", "--nproc-per-node", "2", "--group-size", "4", "--", *torchrun)
    nodes = ["local0", "local0", "local1", "local1"]
    assert ranks(said) == [(rank, 4, node, rank) for rank, node in enumerate(nodes)], said
    assert said.count("goes on at step 30") == 4


@pytest.mark.slow
def test_lightning_takes_the_launch_for_torchelastic_and_goes_on_where_it_was(tmp_path: Path) -> None:
    for _ in range(2):
        said = run(tmp_path, "--recipe", "lightning", *example("lightning_trainer.py", "saved"))
        assert ranks(said) == [(0, 2, "local0", 0), (1, 2, "local1", 1)], said
        assert said.count("cluster environment: TorchElasticEnvironment") == 2
        assert "after step 30" in said
    assert len(list((tmp_path / "saved").glob("step-*"))) >= 1


def test_those_that_are_not_run_are_named() -> None:
    assert set(SCRIPTS) >= NOT_RUN
    assert "has not been run" in (EXAMPLES.parent / "docs" / "recipes.md").read_text()
