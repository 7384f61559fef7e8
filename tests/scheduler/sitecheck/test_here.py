"""What this host tells of itself."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from deeplink.core.clock import SystemClock
from deeplink.core.config import Config
from deeplink.core.errors import DeepLinkError
from deeplink.rpc.tokens import write_token
from deeplink.scheduler.sitecheck import part as module
from deeplink.scheduler.sitecheck.part import NodePart, dangers, looked_at, sweep, this_host
from deeplink.scheduler.sitecheck.site_evidence import HostFacts, Measured, NodeProbePlan


def config(tmp_path: Path) -> Config:
    (tmp_path / "state").mkdir()
    return Config(store=tmp_path / "ssd" / "dl", state=tmp_path / "state", catalog=tmp_path, node="me")


def test_all_of_it_travels_as_json(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    host = this_host(replace(config(tmp_path), token_file=token), {"agent": (1, 2)})
    assert host.node == "me"
    assert host.versions["deeplink"]
    assert host.limits["nofile"][1] > 0
    assert "lets others in" in host.tokens["token_file"]
    assert "secret" not in json.dumps(asdict(host))
    assert HostFacts.of(json.loads(json.dumps(asdict(host)))) == host
    said = json.loads(json.dumps(asdict(host))) | {"uid": 7}
    said["folders"] = {key: one | {"owner": 7} for key, one in said["folders"].items()}
    assert HostFacts.of(said) == host, "another version says more, and which version it is has to be told"


@pytest.mark.parametrize("said", [None, 3, "x", [], {"other": 1}, {"node": "a", "folders": {"store": {}}}])
def test_what_another_version_says_is_refused(said: object) -> None:
    for kind in (HostFacts, Measured, NodeProbePlan):
        if not (kind is Measured and said == []):
            with pytest.raises(DeepLinkError, match="report cannot be read"):
                kind.of(said)


def test_a_folder_is_looked_at_where_it_would_be(tmp_path: Path) -> None:
    there = looked_at(tmp_path)
    assert (there.there, there.writable, there.problem) == (True, True, "")
    would_be = looked_at(tmp_path / "a" / "b")
    assert (would_be.there, would_be.base) == (False, str(tmp_path))
    (tmp_path / "file").touch()
    assert "is no folder" in looked_at(tmp_path / "file" / "below").problem or looked_at(tmp_path / "file").problem


def test_markers_of_two_nodes_tell_shared_from_private_and_are_gone_afterwards(tmp_path: Path) -> None:
    ours = config(tmp_path)
    apart = replace(ours, node="other", store=tmp_path / "ssd2" / "dl")
    (tmp_path / "ssd").mkdir()
    (tmp_path / "ssd2").mkdir()
    first, second = NodePart(ours, "run", SystemClock()), NodePart(apart, "run", SystemClock())
    with first.host("127.0.0.1") as one, second.host("127.0.0.1") as two:
        assert all(folder.marked for host in (one, two) for folder in host.folders.values())
        seen = first.measure(
            one, NodeProbePlan(peers={"other": ("127.0.0.1", two.listening["agent"])}, disk_bytes=1 << 20)
        )
    assert seen.markers == {"store": (), "state": ("other",), "catalog": ("other",)}
    assert set(seen.reached["other"].values()) == {""}
    assert seen.disk is not None
    assert seen.disk.written == 1 << 20
    assert Measured.of(json.loads(json.dumps(asdict(seen)))) == seen
    assert not list(tmp_path.rglob(".deeplink-doctor*"))


def test_folders_that_are_one_are_each_marked(tmp_path: Path) -> None:
    ours = Config(store=tmp_path / "a", state=tmp_path / "b", catalog=tmp_path / "c", node="me")
    with NodePart(ours, "run", SystemClock()).host("127.0.0.1") as host:
        assert all(folder.marked for folder in host.folders.values())


def test_what_killed_nodes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    ours = config(tmp_path)
    for name in (".deeplink-doctor-run-n1", ".deeplink-doctor-other-n1", "run"):
        (ours.state / name).touch()
    sweep(ours, "run")
    assert sorted(path.name for path in ours.state.iterdir()) == [".deeplink-doctor-other-n1", "run"]


def test_a_marker_is_never_put_through_what_lies_there_already(tmp_path: Path) -> None:
    ours = config(tmp_path)
    (ours.state / ".deeplink-doctor-run-state-me").symlink_to(tmp_path / "victim")
    with NodePart(ours, "run", SystemClock()).host("127.0.0.1") as host:
        assert not host.folders["state"].marked
    assert not (tmp_path / "victim").exists()


def test_a_pattern_stands_for_the_scripts_it_names(tmp_path: Path) -> None:
    for name in ("10-clean", "20-log"):
        (tmp_path / name).write_text("rm -rf /local/ssd\n")
    lines, unread = dangers([str(tmp_path / "*"), str(tmp_path / "none*")])
    assert [line.partition(":")[0] for line in lines] == [str(tmp_path / "10-clean"), str(tmp_path / "20-log")]
    assert unread == ()
    assert dangers(["/nowhere/*"])[1] == ("/nowhere/*",)


def test_lines_of_scripts_that_wipe_or_kill(tmp_path: Path) -> None:
    script = tmp_path / "epilog.sh"
    script.write_text(
        "#!/bin/sh\n# rm -rf /nothing\nrm -rf /local/ssd/*\nrm -f /tmp/one\n"
        'find /scratch -user "$U" -delete\npkill -u "$U"\necho done\n'
    )
    missing = str(tmp_path / "none")
    lines, unread = dangers([str(script), missing])
    assert [line.rpartition(": ")[2].split()[0] for line in lines] == ["rm", "find", "pkill"]
    assert lines[0].startswith(f"{script}:3: ")
    assert unread == (missing,)
    assert os.access(script, os.R_OK)


def test_a_node_asks_the_watchdog_as_its_agent_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That its port takes connections says nothing of who is heard."""
    token = tmp_path / "token"
    write_token(token, "secret")
    monkeypatch.setattr(module, "WATCH_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"localhost:{mute.getsockname()[1]}"
        ours = replace(config(tmp_path), watch=address, watch_token_file=token)
        part = NodePart(ours, "run", SystemClock())
        with part.host("127.0.0.1") as host:
            measured = part.measure(host, NodeProbePlan(services=(address,)))
    assert measured.services[address].startswith(("deadline exceeded", "unavailable"))
