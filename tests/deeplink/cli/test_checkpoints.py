"""`deeplink checkpoints`: what it says of a folder, and what it removes."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from deeplink.checkpoints import Checkpoints
from deeplink.checkpoints.claims import Claims, Retention, entries, surplus
from deeplink.checkpoints.inspection import plan_pruning
from deeplink.cli import cli
from deeplink.core.clock import ManualClock
from deeplink.core.errors import DeepLinkError
from deeplink.core.types import Attempt
from tests.deeplink.checkpoints.faults import refusing


@pytest.fixture(autouse=True)
def outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPLINK_ATTEMPT", raising=False)


def deeplink(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["checkpoints", *map(str, words)])


def verify(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["checkpoints", "verify", *map(str, words)], standalone_mode=False)


def save(checkpoints: Checkpoints, step: int) -> None:
    with checkpoints.save(step=step) as draft:
        checkpoints._clock.sleep(2)
        (draft / "state.bin").write_bytes(b"state" * step)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 10, 20 and 30 of one attempt, 30 torn; 40 of the next; one by a fenced rank."""
    clock = ManualClock()
    first = Checkpoints(tmp_path, attempt=Attempt(5, 0, 0), clock=clock, keep=9)
    for step in (10, 20, 30):
        save(first, step)
    clock.sleep(3_600)
    save(Checkpoints(tmp_path, attempt=Attempt(5, 0, 1), clock=clock, keep=9), 40)
    (tmp_path / "step-0000000030.a1" / "state.bin").write_bytes(b"torn")
    (tmp_path / "step-0000000020.a1").rename(tmp_path / "step-0000000050.a1")  # as a late zombie would
    return tmp_path


def listed(done: Result) -> dict[str, Any]:
    assert done.exit_code == 0, done.output
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_ls_says_what_counts_and_what_does_not(folder: Path) -> None:
    facts = listed(deeplink("ls", folder, "--json", "--mtbf", "6"))
    assert facts["attempt"] == "5.0.1"
    told = {one["step"]: (one["state"], one["latest"], one["attempt"]) for one in facts["checkpoints"]}
    assert told == {
        40: ("whole", True, "5.0.1"),
        50: ("fenced", False, "5.0.0"),
        30: ("damaged", False, "5.0.0"),
        10: ("whole", False, "5.0.0"),
    }
    assert facts["advice"]["mtbf_s"] == 6 * 3_600
    assert facts["advice"]["stall_s"] == 2.0
    said = deeplink("ls", folder).output
    assert "step-0000000040.a2" in said
    assert "whole, latest" in said
    assert "damaged: state.bin has 4 bytes, saved were 150" in said
    assert "save every" in said
    assert "(1 restart in " in said
    by_nodes = listed(deeplink("ls", folder, "--json", "--nodes", "2048"))["advice"]
    assert by_nodes["mtbf_s"] == pytest.approx(6_490, rel=0.01)


def test_ls_of_nothing_and_of_no_folder(tmp_path: Path) -> None:
    said = deeplink("ls", tmp_path)
    assert said.exit_code == 0
    assert "no checkpoints" in said.output
    assert "no advice how often to save: no checkpoint there says what it cost" in said.output
    missing = deeplink("ls", tmp_path / "absent")
    assert isinstance(missing.exception, DeepLinkError)
    assert deeplink("ls", tmp_path, "--mtbf", "1", "--nodes", "1").exit_code == 2


@pytest.mark.parametrize("verb", ["ls", "verify", "prune"])
def test_a_folder_whose_claims_cannot_be_listed_is_reported_with_what_to_do(folder: Path, verb: str) -> None:
    (folder / "claims").rename(folder / "moved")
    (folder / "claims").write_text("no folder")
    done = deeplink(verb, folder)
    assert (done.exit_code, type(done.exception)) == (1, DeepLinkError), done.output
    assert f"cannot {verb.replace('ls', 'list')} {folder}" in str(done.exception)


def test_looking_claims_nothing(folder: Path) -> None:
    before = Claims(folder).numbers()
    deeplink("ls", folder)
    deeplink("verify", folder)
    assert Claims(folder).numbers() == before


def test_verify_reads_all_and_names_what_is_wrong(folder: Path) -> None:
    state = folder / "step-0000000010.a1" / "state.bin"
    right = verify(folder, "step-0000000040.a2", "step-0000000010.a1")
    assert right.return_value == 0
    state.write_bytes(b"stat!" * 10)  # as many bytes, others
    wrong = verify(folder, "--json")
    assert wrong.return_value == 1
    facts = json.loads(wrong.stdout)
    assert not facts["right"]
    reasons = {one["step"]: one["reason"] for one in facts["checkpoints"]}
    assert reasons[10] == "state.bin was altered: its checksum differs"
    assert reasons[40] == ""
    unknown = deeplink("verify", folder, "step-1")
    assert isinstance(unknown.exception, DeepLinkError)


def test_what_the_storage_refuses_is_unreadable_and_not_damaged(folder: Path) -> None:
    with refusing(lambda _event, path: "/step-0000000040" in path, code=errno.EIO):
        said = deeplink("verify", folder)
        assert "unreadable: [Errno 5] Input/output error" in said.output
        assert said.output.count("damaged") == 1, "the torn one"
        assert verify(folder).return_value == 1
        assert "latest" not in deeplink("ls", folder).output, "what a job goes on from is not known"
        refused = deeplink("prune", folder, "--keep", "1")
    assert str(refused.exception).startswith(f"cannot prune {folder}: ")
    assert "step-0000000010.a1" in names(folder)


def test_verify_of_an_empty_folder_finds_nothing_to_trust(tmp_path: Path) -> None:
    assert verify(tmp_path).return_value == 1


def names(folder: Path) -> set[str]:
    return {entry.name for entry in entries(folder)}


def test_prune_says_first_and_then_removes_the_same(folder: Path) -> None:
    (folder / ".draft-step-0000000060.a1-00ff").mkdir()
    before = names(folder)
    would = listed(deeplink("prune", folder, "--keep", "1", "--dry-run", "--json"))
    assert names(folder) == before
    done = listed(deeplink("prune", folder, "--keep", "1", "--json"))
    assert {**would, "dry_run": False} == done
    assert names(folder) == {"step-0000000040.a2"}
    assert done["drafts"] == [".draft-step-0000000060.a1-00ff"]
    assert not list(folder.glob(".draft-step*"))
    assert "removed 0 checkpoints" in deeplink("prune", folder).output


def test_prune_keeps_multiples(folder: Path) -> None:
    listed(deeplink("prune", folder, "--keep", "1", "--every", "10", "--json"))
    assert names(folder) == {"step-0000000040.a2", "step-0000000010.a1"}


def test_the_newest_that_is_whole_to_its_last_byte_stays(folder: Path) -> None:
    # Its size is right and its contents are not: the rule alone would keep it and drop the only whole one.
    (folder / "step-0000000040.a2" / "state.bin").write_bytes(b"x" * 200)
    said = deeplink("prune", folder, "--keep", "1")
    assert "set step-0000000040.a2 aside: it is damaged" in said.output
    assert {"step-0000000010.a1"} <= names(folder)
    assert "step-0000000040.a2" not in names(folder)
    assert ".damaged-step-0000000040.a2" in deeplink("ls", folder).output


def test_what_the_rule_keeps(tmp_path: Path) -> None:
    with Checkpoints(
        tmp_path, attempt=Attempt(1, 0, 0), keep=2, keep_every=30, clock=ManualClock()
    ) as checkpoints:
        for step in range(10, 101, 10):
            save(checkpoints, step)
    assert sorted(entry.step for entry in entries(tmp_path)) == [30, 60, 90, 100]
    claim = Claims(tmp_path).all()[-1]
    found = surplus(tmp_path, claim, Retention(keep=1), "step-0000000100.a1")
    assert found.superseded == tuple(f"step-00000000{step}.a1" for step in (90, 60, 30))
    assert surplus(tmp_path, claim, Retention(keep=1), "step-0000000060.a1").superseded == ("step-0000000030.a1",)
    assert surplus(tmp_path, claim, Retention(keep=1), "").superseded == (), "nothing is proved"
    assert plan_pruning(tmp_path, Retention(keep=9)).names == ()
    for wrong in ((0, 0), (1, -1)):
        with pytest.raises(ValueError, match="keep must be"):
            Retention(*wrong)


def test_what_is_kept_for_good_and_cannot_be_looked_at_now_is_not_taken_for_damaged(tmp_path: Path) -> None:
    with Checkpoints(
        tmp_path, attempt=Attempt(1, 0, 0), keep=1, keep_every=10, clock=ManualClock()
    ) as checkpoints:
        for step in (10, 20, 30):
            save(checkpoints, step)
        unreadable, torn = (tmp_path / f"step-00000000{step}.a1" / "manifest.json" for step in (10, 20))
        unreadable.unlink()
        unreadable.symlink_to("manifest.json")  # to itself: an error of the file system, as EIO is
        torn.write_text("{")
        save(checkpoints, 40)
    assert sorted(entry.step for entry in entries(tmp_path)) == [10, 30, 40]
