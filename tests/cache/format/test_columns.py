"""Arrow columns made of memory: the same as pyarrow makes of objects, without asking pandas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.cache.format.index_format import fixed, numbers, strings

REPOSITORY = Path(__file__).parents[3]


# `pa.array` imports pandas when it is first called: longer than hypothesis waits.
@given(values=st.lists(st.integers(0, 2**32 - 1)), step=st.integers(1, 3))
def test_numbers_are_what_they_were(values: list[int], step: int) -> None:
    expected = pa.array(values[::step], pa.uint64())
    held = np.array(values, np.uint32)[::step]
    assert numbers(held, pa.uint64()) == expected
    assert numbers(held.astype(np.uint64), pa.uint64()) == expected
    assert numbers((value for value in values[::step]), pa.uint64()) == expected


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.int32])
def test_numbers_that_may_not_fit_are_refused(kind: type[np.integer]) -> None:
    with pytest.raises(TypeError, match="safe"):
        numbers(np.array([1], kind), pa.uint32())


@given(values=st.lists(st.text(max_size=5)))
def test_texts_and_bytes_are_what_they_were(values: list[str]) -> None:
    raw = [value.encode() for value in values]
    assert strings(raw, pa.large_string()) == pa.array(values, pa.large_string())
    assert strings(raw, pa.large_binary()) == pa.array(raw, pa.large_binary())
    digests = [value[:3].ljust(3, b"x") for value in raw]
    assert fixed(digests, 3) == pa.array(digests, pa.binary(3))


def test_bytes_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="of 3 bytes"):
        fixed([b"abc", b"ab", b"abcd"], 3)


def test_packing_appending_rebuilding_and_reading_do_without_pandas(tmp_path: Path) -> None:
    code = """
import importlib.util, pathlib, sys
from deeplink.cli import cli
from tests.cache.agents import write_tree
root = pathlib.Path(sys.argv[1])
source = write_tree(root / "tree", {"b": b"1", "a/c": b"2"})
cli.main(f"pack {source} pets".split(), standalone_mode=False)
write_tree(source, {"a/d": b"3"})
for words in (f"pack --append {source} pets", "index rebuild pets", "ls -l pets", "cat pets/a/d"):
    cli.main(words.split(), standalone_mode=False)
assert importlib.util.find_spec("pandas") is not None
assert "pandas" not in sys.modules
"""
    env = {f"DEEPLINK_{name}": str(tmp_path / name) for name in ("CATALOG", "STORE", "STATE")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**env, "DEEPLINK_CONFIG": "/dev/null", "PATH": "/usr/bin:/bin"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
