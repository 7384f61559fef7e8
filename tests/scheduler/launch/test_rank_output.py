"""What ranks write: passed on to srun in order, kept in a file when none takes it; no rank waits for that."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deeplink.scheduler.launch import rank_output
from tests.waiting import LIMIT_S, until

SLOT = """
import os, subprocess, sys
from pathlib import Path
from deeplink.scheduler.launch import rank_output
folder = Path(sys.argv[1])
rank_output.STUCK_S, rank_output.SEAL_S = float(sys.argv[2]), 0.05
relay = rank_output.OutputRelay(folder / "kept", "n0")
if sys.argv[3] == "keep":
    relay.keep()
rank = subprocess.Popen([sys.executable, "-c", sys.argv[4], *sys.argv[5:]])
code = rank.wait()
(folder / "exited").write_text(str(code))
relay.close()
print("the slot ends")
"""
LINES = 60_000  # of 12 bytes: ten pipes full


class Slot:
    """A process that relays what its rank writes."""

    def __init__(self, folder: Path, rank: str, *words: str, stuck_s: float = 60.0, then: str = "") -> None:
        self.folder = folder
        argv = [sys.executable, "-c", SLOT, str(folder), str(stuck_s), then, rank, *words]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.exited, self.kept = folder / "exited", folder / "kept"

    def kept_of(self, descriptor: int = 1) -> bytes:
        """What is kept of a stream, in its order."""
        files = sorted(one for one in self.kept.iterdir() if one.name.split(".")[3] == str(descriptor))
        return b"".join(one.read_bytes() for one in files)


@pytest.fixture
def slot(tmp_path: Path) -> Callable[..., Slot]:
    return lambda rank, *words, **options: Slot(tmp_path, rank, *words, **options)


@pytest.fixture
def collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collected]:
    monkeypatch.setattr(rank_output, "COPY_S", 0.01)
    one = Collected(tmp_path)
    yield one
    one.close()


class Collected:
    """The job's output, into which what is kept in a folder is copied."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "out"
        self._file = self._path.open("ab")
        self._collector: rank_output.OutputCollector | None = None
        self._folder = folder / "kept"

    def begin(self) -> None:
        self._collector = rank_output.OutputCollector(self._folder, self._file.fileno())

    def close(self) -> None:
        if self._collector is not None:
            self._collector.close()
        self._file.close()

    @property
    def content(self) -> bytes:
        return self._path.read_bytes()


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
    slot: Callable[..., Slot], collected: Collected
) -> None:
    one = slot(WRITES, stuck_s=0.2)
    until(one.exited.exists, LIMIT_S)
    assert one.process.stdout is not None
    out, _ = one.process.communicate(timeout=LIMIT_S)
    taken = out.removesuffix(b"the slot ends\n")
    assert taken, "the pipe was full first"
    assert taken + one.kept_of() == ALL.encode()
    collected.begin()
    until(lambda: not any(one.kept.iterdir()), LIMIT_S)
    assert taken + collected.content == ALL.encode(), "the launcher that lives copies it"


WRITES_MORE = (
    WRITES
    + """
import time
from pathlib import Path
sys.stdout.flush()
print("much later", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
print("last", flush=True)
"""
)


def test_once_what_was_kept_is_copied_srun_gets_what_follows_and_not_before(
    slot: Callable[..., Slot], collected: Collected, tmp_path: Path
) -> None:
    one = slot(WRITES_MORE, str(tmp_path / "go"), stuck_s=0.2)
    assert one.process.stdout is not None
    until(lambda: one.kept.exists() and one.kept_of().endswith(b"much later\n"), LIMIT_S)
    taken: list[bytes] = []
    reader = threading.Thread(target=lambda: taken.append(one.process.communicate(timeout=LIMIT_S)[0]))
    reader.start()
    until(lambda: any(path.suffix != ".part" for path in one.kept.iterdir()), LIMIT_S)
    collected.begin()
    until(lambda: collected.content.endswith(b"much later\n") and not any(one.kept.iterdir()), LIMIT_S)
    time.sleep(0.3)  # the relay looks again
    (tmp_path / "go").touch()
    reader.join(LIMIT_S)
    assert taken[0].endswith(b"\nlast\nthe slot ends\n") or taken[0].endswith(b"last\nthe slot ends\n")
    first = taken[0].removesuffix(b"last\nthe slot ends\n")
    assert first + collected.content == ALL.encode() + b"much later\n"


def test_where_srun_is_gone_all_is_kept_at_once(slot: Callable[..., Slot]) -> None:
    one = slot(WRITES, then="keep")
    out, _ = one.process.communicate(timeout=LIMIT_S)
    assert out == b"the slot ends\n"
    assert one.kept_of(1) == ALL.encode()
    assert one.kept_of(2) == b"done\n"
    assert {file.stat().st_mode & 0o777 for file in one.kept.iterdir()} == {0o600}
    assert one.kept.stat().st_mode & 0o777 == 0o700


BINARY = "import os, sys; sys.stdout.buffer.write(bytes(range(256)) * 40_000); sys.stdout.buffer.flush()"


@pytest.mark.parametrize("then", ["", "keep"])
def test_bytes_that_are_no_text_and_a_line_of_megabytes_come_as_they_are(
    slot: Callable[..., Slot], then: str
) -> None:
    one = slot(BINARY.replace("range(256)", "one for one in range(256) if one != 10"), then=then)
    out, _ = one.process.communicate(timeout=LIMIT_S)
    whole = bytes(number for number in range(256) if number != 10) * 40_000
    assert out.removesuffix(b"the slot ends\n") + (one.kept_of() if then else b"") == whole


def test_a_folder_that_cannot_be_written_holds_up_no_rank(slot: Callable[..., Slot], tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    one = slot(WRITES + "import os; os._exit(3)", then="keep")
    until(one.exited.exists, LIMIT_S)
    assert one.exited.read_text() == "3"
    one.process.communicate(timeout=LIMIT_S)


def test_what_is_kept_is_bounded_and_that_is_said_once_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_output, "MOST_KEPT", 10_000)
    kept = rank_output.KeptStream(tmp_path / "kept", "n0.1.1")
    for _ in range(200):
        kept.add(b"x" * 99 + b"\n")
    kept.seal()
    (whole,) = (tmp_path / "kept").iterdir()
    assert whole.read_bytes().count(b"x\n") == 100
    assert whole.read_bytes().count(b"what comes now is lost\n") == 1
    whole.unlink()  # copied
    kept.look()
    assert kept.is_empty
    kept.add(b"there is room again\n")
    kept.seal()
    (whole,) = (tmp_path / "kept").iterdir()
    assert whole.read_bytes() == b"there is room again\n"


def test_one_file_that_is_taken_away_costs_no_other(tmp_path: Path) -> None:
    kept = rank_output.KeptStream(tmp_path / "kept", "n0.1.1")
    kept.add(b"lost\n")
    (part,) = (tmp_path / "kept").iterdir()
    part.unlink()
    with pytest.raises(FileNotFoundError):
        kept.seal()
    assert kept.is_empty, "nobody would ever copy it"
    kept.add(b"kept\n")
    kept.seal()
    (whole,) = (tmp_path / "kept").iterdir()
    assert whole.read_bytes() == b"kept\n"


def test_what_an_srun_has_not_taken_when_its_slot_ends_is_kept(slot: Callable[..., Slot]) -> None:
    written = b"x" * 99 + b"\n"
    one = slot("import os; os.write(1, (b'x' * 99 + b'\\n') * 1200)")  # more than one pipe, less than two
    one.process.wait(LIMIT_S)
    out, _ = one.process.communicate(timeout=LIMIT_S)
    assert out + one.kept_of() == written * 1200


def test_files_and_terminals_are_left_as_they_are(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        before = os.fstat(file.fileno())
        relay = rank_output.OutputRelay(tmp_path / "kept", "n0", (file.fileno(),))
        began = time.monotonic()
        relay.close()
        assert time.monotonic() - began < rank_output.CLOSE_S
        assert os.path.samestat(before, os.fstat(file.fileno()))


def test_the_launcher_copies_what_is_kept_of_all_nodes_and_removes_it(
    tmp_path: Path, collected: Collected
) -> None:
    kept = tmp_path / "kept"
    collected.begin()
    kept.mkdir()
    for name, said in (("n0.1.1.00000001", b"b\n"), ("n0.1.1.00000000", b"a\n"), ("n1.1.1.00000000", b"c\n")):
        (tmp_path / name).write_bytes(said)
        (tmp_path / name).rename(kept / name)
        until(lambda: not any(kept.iterdir()), LIMIT_S)
    (kept / "n1.1.1.00000001.part").write_bytes(b"half a line")
    (kept / "n1.1.1.00000000").write_bytes(b"d\n")
    until(lambda: collected.content == b"b\na\nc\nd\n", LIMIT_S)
    collected.close()
    assert collected.content == b"b\na\nc\nd\nhalf a line", "of a slot that was killed: at the end"
    assert not kept.exists()


def test_what_a_launcher_did_not_copy_the_next_one_does_from_the_beginning(
    tmp_path: Path, collected: Collected
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    for number in range(3):
        (kept / f"n0.1.1.0000000{number}").write_text(f"{number}\n")
    collected.begin()
    collected.close()
    assert collected.content == b"0\n1\n2\n"
