"""Start and end of a daemon: names, addresses, tokens, folders, word to systemd."""

from __future__ import annotations

import os
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deeplink.core.errors import DeepLinkError
from deeplink.rpc import daemon
from deeplink.rpc.daemon import (
    is_loopback,
    member_name,
    notify_systemd,
    read_token_line,
    runtime_folder,
    split_bind,
    standing_token,
)
from deeplink.rpc.tokens import TokenError
from tests.waiting import LIMIT_S


@pytest.mark.parametrize(
    ("bind", "expected"),
    [("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:7411", ("::1", 7411)), ("n0:65535", ("n0", 65535))],
)
def test_an_address_is_host_and_port(bind: str, expected: tuple[str, int]) -> None:
    assert split_bind(bind) == expected


@pytest.mark.parametrize("bind", ["", "7411", ":7411", "n0:", "n0:x", "n0:-1", "n0:65536", "n0:٣"])
def test_what_is_no_address_is_refused(bind: str) -> None:
    with pytest.raises(DeepLinkError, match="HOST:PORT"):
        split_bind(bind)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "n0", "localhost.example.org"])
def test_whatever_is_not_surely_loopback_counts_as_wide(host: str) -> None:
    assert not is_loopback(host)


def test_a_members_name_is_the_one_given_or_slurms_or_the_hosts() -> None:
    assert member_name("a1", {"SLURMD_NODENAME": "n3"}) == "a1"
    assert member_name("", {"SLURMD_NODENAME": "n3"}) == "n3"
    assert member_name("", {}) == socket.gethostname()


@pytest.mark.parametrize("name", ["a=b", "a,b", "a b", "-a", "../a", "a:1"])
def test_a_name_that_a_list_of_members_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(DeepLinkError):
        member_name(name, {})


def said(data: bytes, *, end: bool = False) -> str:
    reader, writer = os.pipe()
    try:
        os.write(writer, data)
        if end:
            os.close(writer)
        return read_token_line(reader)
    finally:
        os.close(reader)
        if not end:
            os.close(writer)


def test_the_token_is_the_first_line_and_the_end_of_input_is_not_waited_for() -> None:
    assert said(b"secret\nmore\n") == "secret"
    assert said(b"secret", end=True) == "secret"


@pytest.mark.parametrize(
    ("data", "problem"),
    [(b"\n", "empty"), (b"", "empty"), (b"x" * 1025, "longer"), ("gehe\u00efm\n".encode(), "ASCII")],
)
def test_an_input_without_a_token_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(TokenError, match=problem):
        said(data, end=True)


def test_a_token_that_never_comes_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "TOKEN_WAIT_S", 0.05)
    with pytest.raises(TokenError, match="nothing came"):
        said(b"half a li")


def test_two_daemons_that_start_at_once_agree_on_a_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    together = threading.Barrier(8)

    def start(_number: int) -> str:
        together.wait(LIMIT_S)
        return standing_token(path, path)[0]

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(start, range(8)))) == 1
    assert [found.name for found in tmp_path.iterdir()] == ["token"]


def test_a_standing_token_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "made" / "token"
    token = standing_token(None, path)
    assert token[1] == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert standing_token(path, tmp_path) == token
    path.chmod(0o644)
    with pytest.raises(TokenError):
        standing_token(path, tmp_path)


def test_a_token_file_that_was_asked_for_is_made_and_its_folder_is_not(tmp_path: Path) -> None:
    assert standing_token(tmp_path / "token", tmp_path)[1].is_file()
    with pytest.raises(DeepLinkError, match="No such file") as caught:
        standing_token(tmp_path / "misspelt" / "token", tmp_path)
    assert "folder" in caught.value.remedy
    assert not (tmp_path / "misspelt").exists()


def test_the_runtime_folder_is_private_and_gone_at_the_end(tmp_path: Path) -> None:
    base = tmp_path / "run"
    base.mkdir(mode=0o700)
    with runtime_folder("n0", {"XDG_RUNTIME_DIR": str(base), "SLURM_JOB_ID": "7"}) as folder:
        assert folder.parent == base
        assert folder.name.startswith(f"deeplink-{os.getuid()}-7-n0-")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "token").write_text("x")
    assert list(base.iterdir()) == []


def test_a_runtime_dir_of_another_machine_or_open_to_others_is_not_used(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    for named in (tmp_path / "absent", shared):
        with runtime_folder("n0", {"XDG_RUNTIME_DIR": str(named)}) as folder:
            assert folder.parent == Path("/tmp")


def test_systemd_is_told_where_it_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify_systemd("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify_systemd("READY=1")
        assert listener.recv(100) == b"READY=1"
    notify_systemd("STOPPING=1")  # nobody listens: no reason to fail


def test_the_folder_of_a_daemon_before_is_taken_again_only_if_it_is_ours_alone(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    tmp_path.chmod(0o700)
    before, open_to_all, elsewhere = tmp_path / "before", tmp_path / "open", tmp_path / "link"
    with runtime_folder("n0", env, again=before) as folder:
        assert folder == before, "made where a reboot has removed it"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not before.exists()
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    elsewhere.symlink_to(open_to_all)
    for other in (open_to_all, elsewhere, tmp_path / "no" / "such"):
        with runtime_folder("n0", env, again=other) as folder:
            assert folder.parent == tmp_path
            assert folder.name.startswith("deeplink-")
