from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deeplink.rpc.tokens import TokenError, make_token, read_token, write_token
from tests.waiting import LIMIT_S

SOMEBODY = 4242
"""A user who is not root."""


def test_of_two_that_make_it_the_first_wins(tmp_path: Path) -> None:
    path = tmp_path / "token"
    make_token(path, "first")
    make_token(path, "second")
    assert read_token(path) == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_who_reads_a_dataset_does_not_import_grpc() -> None:
    """A process that has used grpcio cannot fork DataLoader workers that do: docs/decisions/0002."""
    code = "import sys, deeplink.cache.reader; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=LIMIT_S).returncode == 0


def test_a_token_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_token(path, "secret")
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token(path) == "secret"
    if os.geteuid() == 0:
        os.chown(path, SOMEBODY, -1)
        with pytest.raises(TokenError, match=f"belongs to user {SOMEBODY}"):
            read_token(path)
        return  # a file of root's may be a group's, too: the next test
    path.chmod(0o640)
    with pytest.raises(TokenError, match="mode 0640 lets others in"):
        read_token(path)


def test_root_may_hand_a_token_to_a_group_and_to_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    write_token(path, "secret")
    if os.geteuid() != 0:  # who makes no file of root's is told that it is one
        told = os.fstat
        monkeypatch.setattr(os, "fstat", lambda opened: os.stat_result((*told(opened)[:4], 0, *told(opened)[5:])))
    for mode in (0o600, 0o640, 0o440):
        path.chmod(mode)
        assert read_token(path) == "secret"
    for mode in (0o644, 0o660, 0o650, 0o641, 0o642, 0o604):
        path.chmod(mode)
        with pytest.raises(TokenError, match=f"mode {mode:04o} lets others in"):
            read_token(path)


@pytest.mark.parametrize("content", [None, "", "\n", b"\xff\xfe"])
def test_an_unusable_token_file_is_refused(tmp_path: Path, content: str | bytes | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.touch(mode=0o600)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(TokenError):
        read_token(path)
