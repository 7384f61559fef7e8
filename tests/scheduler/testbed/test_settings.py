from __future__ import annotations

from pathlib import Path

from deeplink.scheduler.testbed import settings
from deeplink.scheduler.testbed.settings import SandboxSettings, User
from deeplink.scheduler.testbed.shape import Shape
from deeplink.scheduler.testbed.state import SandboxLayout

LAYOUT = SandboxLayout(Path("/srv/boxes/b"))
USER = User("mia", 64100, 64100, LAYOUT.homes / "mia")


def conf(wanted: SandboxSettings) -> dict[str, list[str]]:
    """Read slurm.conf as Slurm does: the first `=` ends the key."""
    found: dict[str, list[str]] = {}
    for line in settings.slurm_conf(wanted, LAYOUT, settings.namespaces(wanted.shape, LAYOUT)).splitlines():
        key, equals, value = line.partition("=")
        assert equals, line
        found.setdefault(key, []).append(value)
    return found


def test_every_node_has_its_address_and_gpus_and_the_partition_has_all() -> None:
    lines = conf(SandboxSettings(shape=Shape(cpus=3, gpus=5), user=USER))
    assert len(lines["NodeName"]) == 8
    assert (
        lines["NodeName"][2]
        == "n2 NodeHostname=n2 NodeAddr=10.77.0.12 Port=6818 CPUs=3 RealMemory=4000 Gres=gpu:5"
    )
    assert lines["PartitionName"][0].startswith("main Nodes=n[0-7] ")


def test_requeued_jobs_are_held_as_long_as_slurm_holds_them_by_default() -> None:
    lines = conf(SandboxSettings(shape=Shape(), user=USER))
    assert lines["AuthInfo"] == [f"socket={LAYOUT.munge_socket}"]
    assert lines["SlurmdTimeout"] == ["10"]
    assert lines["ReturnToService"] == ["2"]


def test_nodes_without_gpus_speak_of_none() -> None:
    wanted = SandboxSettings(shape=Shape(gpus=0), user=USER)
    lines = conf(wanted)
    assert "GresTypes" not in lines
    assert "Gres" not in lines["NodeName"][0]
    assert settings.gres_conf(wanted.shape, LAYOUT) == ""


def test_a_further_line_comes_last_so_that_it_wins() -> None:
    text = settings.slurm_conf(
        SandboxSettings(shape=Shape(), user=USER, extra=("KillWait=9",)),
        LAYOUT,
        settings.namespaces(Shape(), LAYOUT),
    )
    assert text.endswith("\nKillWait=9\n")


def test_what_is_said_to_differ_from_slurms_defaults_is_in_the_file() -> None:
    wanted = SandboxSettings(shape=Shape(), user=USER, slurmd_timeout=300)
    lines = conf(wanted)
    differing = {tuned.key: tuned for tuned in wanted.differing}
    assert "SlurmdTimeout" not in differing
    assert {key: [tuned.value] for key, tuned in differing.items()}.items() <= lines.items()


def test_the_topology_is_the_tree_of_the_shape() -> None:
    text = settings.topology_conf(Shape.parse("2x2x2", interleave=True))
    assert "SwitchName=leaf1 Nodes=n[1,5]" in text.splitlines()
    assert "SwitchName=spine1 Switches=leaf[2-3]" in text.splitlines()
    assert "SwitchName=core Switches=spine[0-1]" in text.splitlines()


def test_the_sandboxs_user_takes_the_place_of_any_of_the_same_name_or_number() -> None:
    host = "root:x:0:0::/root:/bin/sh\nmia:x:7:7::/home/mia:/bin/sh\nkim:x:64100:5::/home/kim:/bin/sh\n"
    lines = settings.passwd(host, USER).splitlines()
    assert lines == ["root:x:0:0::/root:/bin/sh", f"mia:x:64100:64100:DeepLink sandbox:{USER.home}:/bin/bash"]
    assert settings.group("root:x:0:\nusers:x:64100:\n", USER).splitlines() == ["root:x:0:", "mia:x:64100:"]


def test_every_machine_is_known_by_name() -> None:
    names = {line.split()[1]: line.split()[0] for line in settings.hosts(Shape.of(2)).splitlines()}
    assert names == {"localhost": "127.0.0.1", "ctl": "10.77.0.1", "n0": "10.77.0.10", "n1": "10.77.0.11"}


def test_every_second_node_tells_the_cores_of_its_gpus_and_each_node_is_told_of_once() -> None:
    lines = settings.gres_conf(Shape(nodes_per_leaf=2, gpus=3, cpus=8), LAYOUT).splitlines()
    nodes = [line.split()[0].removeprefix("NodeName=") for line in lines]
    assert nodes == ["n[0,2]", "n[1,3]"]
    assert ["Cores=0-7" in line for line in lines] == [False, True]
    assert all("dev/nvidia[0-2]" in line for line in lines)
    assert len(settings.gres_conf(Shape.of(1), LAYOUT).splitlines()) == 1
