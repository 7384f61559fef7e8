"""What ranks write: passed on to srun in order, kept in a file when none takes it; no rank waits for that."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deeplink.scheduler.launch import rank_output
from tests.waiting import LIMIT_S, until

SLOT = """
import os, subprocess, sys
from pathlib import Path
from deeplink.scheduler.launch import rank_output
folder = Path(sys.argv[1])
rank_output.STUCK_S = float(sys.argv[2])
relay = rank_output.OutputRelay(folder / "kept")
if sys.argv[3] == "keep":
    relay.keep()
rank = subprocess.Popen([sys.executable, "-c", sys.argv[4]])
code = rank.wait()
(folder / "exited").write_text(str(code))
relay.close()
print("the slot ends")
"""
LINES = 60_000  # of 12 bytes: ten pipes full


class Slot:
    """A process that relays what its rank writes."""

    def __init__(self, folder: Path, rank: str, *, stuck_s: float = 60.0, then: str = "") -> None:
        self.folder = folder
        argv = [sys.executable, "-c", SLOT, str(folder), str(stuck_s), then, rank]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.exited, self.kept = folder / "exited", folder / "kept"


@pytest.fixture
def slot(tmp_path: Path) -> Callable[..., Slot]:
    return lambda rank, **options: Slot(tmp_path, rank, **options)


WRITES = f"""
import sys
for number in range({LINES}):
    sys.stdout.write(f"{{number:011d}}\\n")
sys.stderr.write("done\\n")
"""
ALL = "".join(f"{number:011d}\n" for number in range(LINES))


def test_all_that_a_rank_writes_comes_in_order_and_then_what_the_slot_says(slot: Callable[..., Slot]) -> None:
    one = slot(WRITES)
    out, error = one.process.communicate(timeout=LIMIT_S)
    assert out.decode() == ALL + "the slot ends\n"
    assert error == b"done\n"
    assert not one.kept.exists()


def test_a_rank_does_not_wait_for_an_srun_that_takes_nothing_and_what_it_writes_is_kept(
    slot: Callable[..., Slot],
) -> None:
    one = slot(WRITES, stuck_s=0.2)
    until(one.exited.exists, LIMIT_S)
    assert one.process.stdout is not None
    until(one.kept.exists, LIMIT_S)
    out, _ = one.process.communicate(timeout=LIMIT_S)
    taken = out.decode().removesuffix("the slot ends\n")
    assert taken, "the pipe was full first"
    assert taken + one.kept.read_text() == ALL


def test_where_srun_is_gone_all_is_kept_at_once(slot: Callable[..., Slot]) -> None:
    one = slot(WRITES, then="keep")
    out, _ = one.process.communicate(timeout=LIMIT_S)
    assert out == b"the slot ends\n"
    assert sorted(one.kept.read_text().splitlines()) == sorted([*ALL.splitlines(), "done"])
    assert one.kept.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_holds_up_no_rank(slot: Callable[..., Slot]) -> None:
    one = slot(WRITES + "import os; os._exit(3)", then="keep")
    one.kept.mkdir()
    until(one.exited.exists, LIMIT_S)
    assert one.exited.read_text() == "3"
    one.process.communicate(timeout=LIMIT_S)


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_output, "MOST_KEPT", 10_000)
    read, write = os.pipe()
    relay = rank_output.OutputRelay(tmp_path / "kept", (write,))
    relay.keep()
    for _ in range(1000):
        os.write(write, b"x" * 100)
    relay.close()
    os.close(read)
    os.close(write)
    assert 10_000 <= (tmp_path / "kept").stat().st_size <= 10_000 + rank_output.CHUNK


def test_files_and_terminals_are_left_as_they_are(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        before = os.fstat(file.fileno())
        relay = rank_output.OutputRelay(tmp_path / "kept", (file.fileno(),))
        began = time.monotonic()
        relay.close()
        assert time.monotonic() - began < rank_output.CLOSE_S
        assert os.path.samestat(before, os.fstat(file.fileno()))


def test_the_next_launcher_copies_what_is_kept_of_all_nodes_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_output, "COPY_S", 0.01)
    kept = {node: rank_output.kept_by(tmp_path, node) for node in ("n0", "n1", "n2")}
    kept["n0"].write_text("of the launcher before\n")
    with (tmp_path / "out").open("ab") as out:
        collector = rank_output.OutputCollector(tmp_path, kept, out.fileno())
        with kept["n0"].open("a") as file:
            file.write("a\nhalf ")
        kept["n1"].write_text("b\n")
        until(lambda: sorted((tmp_path / "out").read_text().splitlines()) == ["a", "b"], LIMIT_S)
        with kept["n0"].open("a") as file:
            file.write("a line")
        collector.close()
    assert (tmp_path / "out").read_text().endswith("half a line")
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["a", "b", "half a line"]
