"""Links that really go down, in a network namespace; ports and counters as files laid out like the kernel's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.core.clock import ManualClock
from deeplink.core.finding import Severity
from deeplink.scheduler.node.check_result import Look
from deeplink.scheduler.node.network_check import NetworkCheck, read_interfaces
from deeplink.scheduler.node.reading import HighWaterMarks
from deeplink.scheduler.node.settings import NetworkSettings
from tests.waiting import LIMIT_S, until

IN_NAMESPACE = """
import json, sys
from pathlib import Path
from deeplink.core.clock import SystemClock
from deeplink.scheduler.node.network_check import NetworkCheck
from deeplink.scheduler.node.reading import HighWaterMarks
from deeplink.scheduler.node.settings import NetworkSettings
settings = NetworkSettings(interfaces=("fast0",))
check = NetworkCheck(settings, SystemClock(), HighWaterMarks(), net=Path(sys.argv[1]))
for _ in sys.stdin:
    print(json.dumps({one.subject: one.problem for one in check.look().complaints}), flush=True)
"""


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A shell in a network namespace of its own, with that namespace's /sys."""
    sys_folder = tmp_path / "sys"
    sys_folder.mkdir()
    shell = subprocess.Popen(
        ["unshare", "--net", "--mount", "sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    tell(
        shell,
        f"mount -t sysfs none {sys_folder}",
        "ip link add fast0 type veth peer name peer0",
        "ip link set fast0 up",
        "ip link set peer0 up",
    )
    yield shell
    shell.communicate(timeout=LIMIT_S)


def tell(shell: subprocess.Popen[str], *lines: str) -> None:
    assert shell.stdin is not None
    assert shell.stdout is not None
    shell.stdin.write("\n".join([*lines, "echo done", ""]))
    shell.stdin.flush()
    assert shell.stdout.readline() == "done\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_the_link_that_goes_down_is_told_and_comes_back(namespace: subprocess.Popen[str], tmp_path: Path) -> None:
    inside = ["nsenter", f"--target={namespace.pid}", "--net", "--mount"]
    command = [*inside, sys.executable, "-c", IN_NAMESPACE, str(tmp_path / "sys" / "class" / "net")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as check:
        assert check.stdin is not None
        assert check.stdout is not None

        def look() -> dict[str, str]:
            assert check.stdin is not None
            assert check.stdout is not None
            check.stdin.write("\n")
            check.stdin.flush()
            found: dict[str, str] = json.loads(check.stdout.readline())
            return found

        assert look() == {}
        tell(namespace, "ip link set peer0 down")  # the kernel tells the other end a little later
        until(lambda: look().get("fast0") == "fast0 is lowerlayerdown")
        tell(namespace, "ip link set peer0 up")
        until(lambda: "fast0" not in look())
        assert "went down or came up" in look()["fast0 flaps"]
        tell(namespace, "ip link delete fast0")
        assert look()["fast0"] == "fast0 is gone"
        check.stdin.close()


def lay_out(folder: Path, name: str, **facts: object) -> None:
    """Write an interface as the kernel shows it."""
    own = folder / name
    (own / "statistics").mkdir(parents=True, exist_ok=True)
    (own / "device").mkdir(exist_ok=True)
    for key, value in {"operstate": "up", "speed": 100_000, "carrier_changes": 1, **facts}.items():
        place = own / "statistics" if key.endswith("_errors") else own
        (place / key).write_text(f"{value}\n")


def lay_out_port(folder: Path, name: str, **facts: object) -> None:
    device, _, port = name.partition("/")
    own = folder / device / "ports" / port
    (own / "counters").mkdir(parents=True, exist_ok=True)
    given = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", **facts}
    for key, value in given.items():
        place = own if key in {"state", "phys_state", "rate"} else own / "counters"
        (place / key).write_text(f"{value}\n")


class Node:
    """A node whose links are files."""

    def __init__(self, root: Path, **settings: object) -> None:
        self.net, self.infiniband, self.clock = root / "net", root / "infiniband", ManualClock()
        self.net.mkdir(exist_ok=True)
        self.check = NetworkCheck(
            NetworkSettings(**settings),  # type: ignore[arg-type]
            self.clock,
            HighWaterMarks(root / "seen.json"),
            self.net,
            self.infiniband,
            root / "route",
        )

    def look(self) -> dict[str, Severity]:
        self.clock.sleep(15)
        look: Look = self.check.look()
        return {one.subject: one.severity for one in look.complaints}


def test_a_link_that_is_slower_than_it_was_is_told(tmp_path: Path) -> None:
    node = Node(tmp_path)
    lay_out(node.net, "eth0")
    assert node.look() == {}
    lay_out(node.net, "eth0", speed=10_000)
    assert node.look() == {"eth0 speed": Severity.WARNING}


def test_what_was_up_is_missed_also_by_an_agent_that_is_started_anew(tmp_path: Path) -> None:
    first = Node(tmp_path)
    lay_out(first.net, "eth0")
    first.look()
    lay_out(first.net, "eth0", operstate="down", speed=-1)
    assert Node(tmp_path).look() == {"eth0": Severity.ERROR}


def test_a_link_that_never_was_up_is_nobodys(tmp_path: Path) -> None:
    node = Node(tmp_path)
    lay_out(node.net, "eth1", operstate="down", speed=-1)
    assert node.look() == {}
    assert Node(tmp_path, interfaces=("eth1",)).look() == {"eth1": Severity.ERROR}


def test_a_link_that_goes_up_and_down_is_told_for_a_while(tmp_path: Path) -> None:
    node = Node(tmp_path)
    lay_out(node.net, "eth0")
    node.look()
    lay_out(node.net, "eth0", carrier_changes=5)
    assert node.look() == {"eth0 flaps": Severity.NOTE}
    assert node.look() == {"eth0 flaps": Severity.NOTE}
    node.clock.sleep(600)
    assert node.look() == {}


def test_errors_are_told_while_they_rise(tmp_path: Path) -> None:
    node = Node(tmp_path)
    lay_out(node.net, "eth0", rx_errors=5_000_000)
    assert node.look() == {}, "those of before are not ours"
    lay_out(node.net, "eth0", rx_errors=5_000_009)
    assert node.look() == {}
    lay_out(node.net, "eth0", rx_errors=5_000_100)
    assert node.look() == {"eth0 errors": Severity.NOTE}
    lay_out(node.net, "eth0", rx_errors=6_000_000)
    assert node.look() == {"eth0 errors": Severity.WARNING}
    assert node.look() == {}


def test_ports_of_infiniband(tmp_path: Path) -> None:
    node = Node(tmp_path, skip=("mlx5_9/1",))
    lay_out_port(node.infiniband, "mlx5_0/1", symbol_error=3, link_downed=0)
    lay_out_port(node.infiniband, "mlx5_1/1", state="1: DOWN", phys_state="2: Polling")
    lay_out_port(node.infiniband, "mlx5_9/1")
    assert node.look() == {}
    lay_out_port(node.infiniband, "mlx5_9/1", state="1: DOWN")
    lay_out_port(node.infiniband, "mlx5_0/1", symbol_error=300, link_downed=1, rate="200 Gb/sec (4X HDR)")
    assert node.look() == {
        "mlx5_0/1 rate": Severity.WARNING,
        "mlx5_0/1 symbol_error": Severity.NOTE,
        "mlx5_0/1 link_downed": Severity.WARNING,
    }
    lay_out_port(node.infiniband, "mlx5_0/1", state="1: DOWN", phys_state="3: Disabled")
    node.clock.sleep(600)
    assert node.look() == {"mlx5_0/1": Severity.ERROR}


def test_links_that_cannot_be_looked_at_are_unknown_and_not_gone(tmp_path: Path) -> None:
    node = Node(tmp_path)
    lay_out(node.net, "eth0")
    lay_out_port(node.infiniband, "mlx5_0/1")
    assert node.look() == {}
    (node.infiniband / "mlx5_0" / "ports" / "1" / "state").unlink()
    assert node.look() == {}
    node.net.rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="net"):  # a check that raises is unknown
        node.look()


def test_this_machines_interfaces_are_read() -> None:
    found = read_interfaces(Path("/sys/class/net"), "", ("nonsuch9",))
    assert found["nonsuch9"].state == ""
    assert "lo" not in found
