"""What starts often or on small machines must not pay for what it does not use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.waiting import LIMIT_S

HEAVY = ("torch", "grpc", "pyarrow", "rich", "numpy", "sklearn")


HELP = """
from click.testing import CliRunner
from deeplink.cli import cli
assert CliRunner().invoke(cli, {}).exit_code == 0
"""


@pytest.mark.parametrize(
    "code",
    [
        "import deeplink",
        "import deeplink; dir(deeplink); deeplink.DeepLinkError; deeplink.__version__",
        "import deeplink.cli.sbatch",
        HELP.format(["--help"]),
        HELP.format(["sbatch", "--help"]),
    ],
    ids=["import deeplink", "its light names", "cli.sbatch", "--help", "sbatch --help"],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    check = f"{code}\nimport sys\nprint(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_an_agent_starts_without_what_only_some_of_its_calls_need() -> None:
    check = "import sys, deeplink.agent.agent\nprint(*sorted({'torch', 'pyarrow', 'fsspec'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout.split() == []


def test_the_check_would_see_a_heavy_import() -> None:
    check = f"import numpy, sys\nprint(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout.split() == ["numpy"]
