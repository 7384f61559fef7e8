"""Lines of the log: for people, for the journal with their priority, as JSON; one each, whatever they quote."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deeplink.cli.output import JournalFormatter, JsonFormatter, LineFormatter, to_journal
from tests.waiting import LIMIT_S

SCRIPT = """
import logging
from deeplink.cli.output import log_to_stderr
log_to_stderr(1, as_json={as_json})
logging.getLogger("deeplink.x").warning("a %s", "b\\nc")
try:
    raise ValueError("no\\ngood")
except ValueError:
    logging.getLogger("deeplink.x").exception("went wrong")
"""


def record(level: int, text: str) -> logging.LogRecord:
    return logging.LogRecord("deeplink.x", level, __file__, 1, text, None, None)


@pytest.mark.parametrize(
    ("level", "start"),
    [(logging.DEBUG, "<7>"), (logging.INFO, "<6>"), (logging.WARNING, "<4>"), (logging.ERROR, "<3>")],
)
def test_a_line_for_the_journal_begins_with_its_priority(level: int, start: str) -> None:
    assert JournalFormatter("%(message)s").format(record(level, "x")) == f"{start}x"


def test_one_message_is_one_line_and_no_line_can_pose_as_another() -> None:
    said = record(logging.INFO, "x\n<0>forged")
    assert "\n" not in LineFormatter("%(message)s").format(said)
    assert JournalFormatter("%(message)s").format(said).count("\n") == 0
    assert json.loads(JsonFormatter().format(said))["message"] == "x\n<0>forged"


def test_only_what_systemd_reads_is_marked(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        found = os.fstat(file.fileno())
        ours = f"{found.st_dev}:{found.st_ino}"
        assert to_journal(file.fileno(), {"JOURNAL_STREAM": ours})
        for other in ("", "1:2", f"{found.st_dev}:", "x"):
            assert not to_journal(file.fileno(), {"JOURNAL_STREAM": other})
    assert not to_journal(-1, {"JOURNAL_STREAM": ours})


def lines(tmp_path: Path, *, as_json: bool, journal: bool) -> list[str]:
    with (tmp_path / "log").open("w+") as file:
        found = os.fstat(file.fileno())
        env = {**os.environ, "JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}" if journal else ""}
        argv = [sys.executable, "-c", SCRIPT.format(as_json=as_json)]
        subprocess.run(argv, stderr=file, env=env, timeout=LIMIT_S, check=True)
    return (tmp_path / "log").read_text().splitlines()


def test_a_daemon_under_systemd_marks_every_line_also_of_a_traceback(tmp_path: Path) -> None:
    found = lines(tmp_path, as_json=False, journal=True)
    assert found[0] == "<4>WARNING deeplink.x: a b\\nc"
    assert found[1] == "<3>ERROR deeplink.x: went wrong"
    assert all(line.startswith("<3>") for line in found[2:])
    assert len(found) > 3


def test_json_is_one_object_a_line(tmp_path: Path) -> None:
    first, second = map(json.loads, lines(tmp_path, as_json=True, journal=False))
    assert (first["level"], first["logger"], first["message"]) == ("warning", "deeplink.x", "a b\nc")
    assert "ValueError" in second["exception"]
