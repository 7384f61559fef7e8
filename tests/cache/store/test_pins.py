"""Pins: a state machine over several holders, with what they need as the model; and files that are no pins."""

from __future__ import annotations

import errno
import json
import logging
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from typing_extensions import override

from deeplink.cache.format.index import Index
from deeplink.cache.store.pins import TTL_S, Pin, Pinned, demand, read_pins
from deeplink.core.clock import ManualClock
from deeplink.core.process_identity import ProcessIdentity
from deeplink.core.types import ShardId
from tests.deeplink.checkpoints.faults import refusing
from tests.effort import examples

SHARDS = [ShardId(f"{number:040x}") for number in range(6)]


@dataclass
class _Entry:
    id: ShardId


@dataclass
class _Version:
    """As much of an index as a pin looks at."""

    version: str = "a" * 40
    shards: list[_Entry] = field(default_factory=lambda: [_Entry(shard) for shard in SHARDS])


def pinned(root: Path, clock: ManualClock, holder: str, ttl_s: float, leader: str = "") -> Pin:
    return Pin(root, cast("Index", _Version()), clock, holder=holder, leader=leader, ttl_s=ttl_s)


@dataclass
class _Model:
    shards: list[ShardId]
    needed: int
    expires: float
    ttl_s: float
    renewed: float


class Pinning(RuleBasedStateMachine):
    holders: Bundle[str] = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="pins-"))
        self.clock = ManualClock()
        self.pins: dict[str, Pin] = {}
        self.model: dict[str, _Model] = {}

    @override
    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @rule(target=holders, ttl_s=st.sampled_from([10.0, 100.0]))
    def pin(self, ttl_s: float) -> str:
        holder = f"h{len(self.pins)}"
        self.pins[holder] = pinned(self.root, self.clock, holder, ttl_s)
        now = self.clock.now
        self.model[holder] = _Model(list(SHARDS), len(SHARDS), now + ttl_s, ttl_s, now)
        return holder

    @rule(holder=holders, order=st.permutations(SHARDS), data=st.data())
    def announce(self, holder: str, order: list[ShardId], data: st.DataObject) -> None:
        chosen = order[: data.draw(st.integers(0, len(order)))]
        needed = data.draw(st.integers(0, len(chosen)))
        self.pins[holder].announce(chosen, needed)
        one = self.model[holder]
        one.shards, one.needed, one.expires = chosen, needed, self.clock.now + one.ttl_s

    @rule(holder=holders)
    def renew(self, holder: str) -> None:
        self.pins[holder].renew()
        one, now = self.model[holder], self.clock.now
        if now - one.renewed >= one.ttl_s / 20:
            one.renewed, one.expires = now, now + one.ttl_s

    @rule(holder=consumes(holders))
    def release(self, holder: str) -> None:
        self.pins[holder].release()
        del self.model[holder]

    @rule(seconds=st.sampled_from([0.2, 4.0, 30.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.clock.sleep(seconds)

    @invariant()
    def what_is_needed_is_what_live_holders_need(self) -> None:
        live = {holder: one for holder, one in self.model.items() if one.expires > self.clock.now + 1e-3}
        found = read_pins(self.root, self.clock.unix())
        assert {pin.holder for pin in found} == set(live)
        wanted = demand(found)
        assert wanted.needed == {shard for one in live.values() for shard in one.shards[: one.needed]}
        for shard in SHARDS:
            places = [one.shards.index(shard) for one in live.values() if shard in one.shards]
            assert wanted.next_use.get(shard) == (min(places) if places else None)


TestPinning = Pinning.TestCase
TestPinning.settings = settings(max_examples=examples(40), stateful_step_count=20)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        json.dumps({"version": "v", "ttl_s": 5, "needed": 1}),
        json.dumps({"version": "v", "ttl_s": 5, "needed": 1, "shards": ["../x"], "process": [1, 2, "x"]}),
        json.dumps({"version": "v", "ttl_s": "x", "needed": 1, "shards": [], "process": [1, 2, "x"]}),
        json.dumps({"version": "v", "ttl_s": 5, "needed": 1, "shards": [], "process": 7}),
    ],
)
def test_a_file_that_is_no_pin_pins_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / ".pins").mkdir()
    (tmp_path / ".pins" / "x.json").write_text(text)
    assert read_pins(tmp_path, 0.0) == []


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_a_pin_that_cannot_be_read_needs_every_shard_until_any_lease_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    clock = ManualClock()
    caplog.set_level(logging.INFO)
    trainer = pinned(tmp_path, clock, "trainer", 60.0)
    trainer.announce(SHARDS, 2)
    other = pinned(tmp_path, clock, "other", 1e6)
    other.announce(SHARDS, 1)
    path = tmp_path / ".pins" / "trainer.json"
    with refusing(lambda event, opened: event == "open" and opened == str(path), code=code):
        clock.sleep(TTL_S - 1)
        assert all(demand(read_pins(tmp_path, clock.unix())).needs(shard) for shard in SHARDS)
        assert str(path) in caplog.text
        assert path.exists()
        clock.sleep(2)
        found = demand(read_pins(tmp_path, clock.unix()))
    assert [shard for shard in SHARDS if found.needs(shard)] == SHARDS[:1]
    assert not path.exists()
    assert f"pin {path} is forgotten" in caplog.text
    trainer.release()
    other.release()


def test_the_pin_of_a_process_that_was_killed_is_gone_at_once(tmp_path: Path) -> None:
    code = """
import os, pathlib, signal, sys
from tests.cache.store.test_pins import pinned
from deeplink.core.clock import ManualClock
kept = pinned(pathlib.Path(sys.argv[1]), ManualClock(), "killed", 1e6)
os.kill(os.getpid(), signal.SIGKILL)
"""
    clock = ManualClock()
    own = pinned(tmp_path, clock, "own", 1e6)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == -9
    assert sorted(path.stem for path in (tmp_path / ".pins").iterdir()) == ["killed", "own"]
    assert [pin.holder for pin in read_pins(tmp_path, clock.unix())] == ["own"]
    assert [path.stem for path in (tmp_path / ".pins").iterdir()] == ["own"]
    own.release()
    assert read_pins(tmp_path, clock.unix()) == []


@pytest.mark.parametrize("said", [OSError(24, "Too many open files"), b"", b"12 (caf\xc3) S 1"])
def test_a_holder_that_cannot_be_looked_for_is_not_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: OSError | bytes
) -> None:
    clock = ManualClock()
    own = pinned(tmp_path, clock, "own", 1e6)
    read = Path.read_bytes

    def look(path: Path) -> bytes:
        if path.parts[:2] != ("/", "proc"):
            return read(path)
        if isinstance(said, OSError):
            raise said
        return said

    monkeypatch.setattr(Path, "read_bytes", look)
    assert [pin.holder for pin in read_pins(tmp_path, clock.unix())] == ["own"]
    own.release()


def test_a_worker_holds_by_its_trainers_pin_and_by_its_own_only_while_there_is_none(tmp_path: Path) -> None:
    clock = ManualClock()

    def needed() -> dict[str, int]:
        return {pin.holder: pin.needed for pin in read_pins(tmp_path, clock.unix())}

    trainer = pinned(tmp_path, clock, "trainer", 100.0)
    trainer.announce(SHARDS, 2)
    worker = pinned(tmp_path, clock, "worker", 100.0, leader="trainer")
    for _ in range(10):  # the trainer reads nothing itself: the worker's reads renew its pin
        clock.sleep(50.0)
        worker.renew()
        assert needed() == {"trainer": 2}
    clock.sleep(101.0)
    assert needed() == {}
    worker.renew()
    assert needed() == {"worker": len(SHARDS)}
    trainer.announce(SHARDS, 1)
    clock.sleep(50.0)
    worker.renew()
    assert needed() == {"trainer": 1}
    trainer.release()
    clock.sleep(50.0)
    worker.renew()
    assert needed() == {"worker": len(SHARDS)}
    worker.release()
    assert needed() == {}


def test_a_worker_that_announces_speaks_for_itself(tmp_path: Path) -> None:
    clock = ManualClock()
    trainer = pinned(tmp_path, clock, "trainer", 100.0)
    worker = pinned(tmp_path, clock, "worker", 100.0, leader="trainer")
    worker.announce(SHARDS, 3)
    clock.sleep(50.0)
    worker.renew()
    assert {pin.holder: pin.needed for pin in read_pins(tmp_path, clock.unix())} == {
        trainer.holder: len(SHARDS),
        worker.holder: 3,
    }


def test_a_store_that_takes_no_writes_is_read_without_a_pin(tmp_path: Path) -> None:
    pin = pinned(tmp_path / "not" / "there", ManualClock(), "h", 10.0)
    pin.renew()
    pin.announce(SHARDS, 1)
    pin.release()
    assert not (tmp_path / "not").exists()


def test_what_cannot_be_needed_is_refused(tmp_path: Path) -> None:
    pin = pinned(tmp_path, ManualClock(), "h", 10.0)
    with pytest.raises(ValueError, match="cannot be needed"):
        pin.announce(SHARDS, len(SHARDS) + 1)
    with pytest.raises(ValueError, match="holder's name"):
        pinned(tmp_path, ManualClock(), "../h", 10.0)
    with pytest.raises(ValueError, match="holder's name"):
        pinned(tmp_path, ManualClock(), "h", 10.0, leader="../h")


def test_the_nearest_use_and_anybodys_need_count() -> None:
    a, b, c, *_ = SHARDS

    def one(shards: tuple[ShardId, ...], needed: int) -> Pinned:
        return Pinned(
            holder="h",
            version="v",
            shards=shards,
            needed=needed,
            expires_unix=1.0,
            process=ProcessIdentity(0, 0, ""),
        )

    found = demand([one((a, b, c), 1), one((c, a), 0)])
    assert found.needed == {a}
    assert [found.needs(shard) for shard in (a, b, c)] == [True, False, False]
    assert found.next_use == {a: 0, b: 1, c: 0}


def test_a_pin_goes_with_whoever_forgot_to_release_it_and_not_with_a_forked_child(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from tests.cache.store.test_pins import ManualClock, pinned
kept = pinned(Path(sys.argv[1]), ManualClock(), "ends", 100.0)
child = os.fork()
if not child:
    sys.exit(0)
os.waitpid(child, 0)
assert [path.stem for path in (Path(sys.argv[1]) / ".pins").iterdir()] == ["ends"]
"""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], check=True, cwd=Path(__file__).parents[3]
    )
    assert not list((tmp_path / ".pins").iterdir())


def test_what_was_said_before_is_not_written_again(tmp_path: Path) -> None:
    pin = pinned(tmp_path, ManualClock(), "h", 100.0)
    path = tmp_path / ".pins" / "h.json"
    pin.announce(SHARDS, 2)
    written = path.stat().st_ino
    pin.announce(SHARDS, 2)
    assert path.stat().st_ino == written
    pin.announce(SHARDS, 1)
    assert path.stat().st_ino != written
