"""A side's process, spoken to as the harness does, and the sides that need no peers' environment."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import xxhash
from typing_extensions import override

from benchmarks.cache import order
from benchmarks.cache.child import serve, side_named
from benchmarks.cache.pace import Pace
from benchmarks.cache.players import Player, UnmeasuredError
from benchmarks.cache.sides.base import Side
from benchmarks.cache.sides.plain import RawFiles

FILES = 300


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for number in range(FILES):
        path = tmp_path / "source" / f"{number % 3}" / f"{number:04d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"{number}".encode() * 50)
    return tmp_path / "source"


def digests(source: Path) -> list[int]:
    return [xxhash.xxh3_64_intdigest(path.read_bytes()) for path in sorted(source.rglob("*.bin"))]


@pytest.mark.parametrize(
    "name", ["plain.FlatMap", "plain.FlatAhead", "plain.Sqlite", "ours.Ours", "ours.OursViews"]
)
def test_every_side_reads_what_was_written_by_row_and_by_epoch(name: str, source: Path, tmp_path: Path) -> None:
    side = side_named(name)
    side.pack(source, tmp_path / "packed", ordered=True)
    side.open(source, tmp_path / "packed")
    of = digests(source)
    wanted = order.batches(3, FILES, 100)
    rows = [row for part in wanted for row in part]
    assert order.consume(side.read(wanted)) == (100, order.expected(of, rows))
    assert order.consume(side.epoch(4)) == (FILES, order.expected(of, range(FILES)))
    paths = sorted(source.rglob("*.bin"))
    assert order.locate(side.read(wanted)) == (100, sum(paths[row].stat().st_size for row in rows))
    side.close()


def test_an_order_is_the_same_in_every_process_and_a_prefix_of_the_longer_one() -> None:
    whole = [row for part in order.batches(5, 1000, 1000) for row in part]
    assert sorted(whole) == list(range(1000))
    assert order.batches(5, 1000, 300) == [whole[:256], whole[256:300]]
    assert order.batches(6, 1000, 300) != order.batches(5, 1000, 300)


def test_a_player_answers_with_time_digest_and_bytes(source: Path, tmp_path: Path) -> None:
    with Player("plain.RawFiles", tmp_path / "log") as player:
        player.ask("open", source=str(source), packed="")
        answer = player.ask("random", seed=1, samples=FILES, count=FILES, touch=True)
        assert (answer.samples, answer.digest) == (FILES, order.expected(digests(source), range(FILES)))
        assert answer.seconds > 0
        assert answer.rate == pytest.approx(FILES / answer.seconds)
        assert answer.by_calls >= sum(path.stat().st_size for path in source.rglob("*.bin"))
        paced = player.ask("paced", seed=1, samples=FILES, batch=32, passes=2)
        assert (paced.samples, paced.failed) == (2 * FILES, 0)


def test_what_a_side_cannot_do_is_said_and_the_process_goes_on(source: Path, tmp_path: Path) -> None:
    with Player("plain.Tar", tmp_path / "log") as player:
        with pytest.raises(UnmeasuredError, match="NotImplementedError"):
            player.ask("open", source=str(source), packed="")
        with pytest.raises(UnmeasuredError, match="_do_nonsense"):
            player.ask("nonsense")
        player.ask("pack", source=str(source), packed=str(tmp_path / "packed"), ordered=False)
        assert (tmp_path / "packed" / "all.tar").stat().st_size > 0


def test_a_side_that_dies_is_not_waited_for(source: Path, tmp_path: Path) -> None:
    with Player("plain.RawFiles", tmp_path / "log") as player:
        os.kill(player.pid, signal.SIGKILL)
        os.waitid(os.P_PID, player.pid, os.WEXITED | os.WNOWAIT)  # the pipe is broken from here on
        with pytest.raises(UnmeasuredError, match="its process ended"):
            player.ask("open", source=str(source), packed="")


def test_lines_in_lines_out() -> None:
    answers = io.StringIO()
    serve(RawFiles(), io.StringIO('{"do": "close"}\nnot json\n'), answers)
    first, second = map(json.loads, answers.getvalue().splitlines())
    assert first == {}
    assert second["error"].startswith("JSONDecodeError")


class Failing(Side):
    """Fails for odd rows."""

    name = kept = settings = "failing"

    @override
    def read(self, wanted: Sequence[Sequence[int]]) -> Iterator[Sequence[bytes | memoryview]]:
        for rows in wanted:
            if rows[0] % 2:
                raise OSError("no such sample")
            yield [b"x" for _ in rows]


def test_a_paced_run_counts_failures_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    pace = Pace(Failing(), 0.0)
    assert order.locate(pace.read([[0], [1], [2, 4], [3]])) == (3, 3)
    assert (pace.failed, pace.why) == (2, "OSError: no such sample")
    assert pace.longest_s > 0
    assert "no such sample" in capsys.readouterr().err
