"""What is mounted into a container, and how it is entered; in a real one: tests/cluster/test_containers.py."""

from __future__ import annotations

import pytest

from deeplink.core.types import Attempt
from deeplink.scheduler.launch.backend import LaunchError
from deeplink.scheduler.launch.container import Container, chosen_runtime, entering, needed, pyxis_options
from deeplink.scheduler.launch.environment import Launch, NodeFacts

ENV = {
    "DEEPLINK_TOKEN_FILE": "/tmp/deeplink-1/token",
    "DEEPLINK_STORE": "/local/ssd",
    "DEEPLINK_CATALOG": "/shared/catalog",
    "DEEPLINK_HOSTFILE": "/home/ada/jobs/7/hostfile.7.0.0",
}


def entered(container: Container, *, absent: str = "") -> list[str]:
    return entering(container, ["python", "a b"], ENV, here="/home/ada", exists=lambda path: path != absent)


def test_a_rank_needs_its_token_its_store_its_catalog_and_its_host_file() -> None:
    assert needed(ENV) == ("/tmp/deeplink-1", "/local/ssd", "/shared/catalog", "/home/ada/jobs/7")
    assert needed({}) == ()


def test_a_rank_needs_the_files_with_members_where_no_folder_has_them_already() -> None:
    beside = {"DEEPLINK_HOSTFILE": "/jobs/7/hostfile.7.0.0", "DEEPLINK_MEMBERS": "@/jobs/7/launch.0.members"}
    assert needed({**beside, "DEEPLINK_SITE_MEMBERS": "@/jobs/7/members.0"}) == ("/jobs/7",)
    assert needed({**beside, "DEEPLINK_SITE_MEMBERS": "@/etc/members"}) == ("/jobs/7", "/etc/members")
    assert needed({**beside, "DEEPLINK_SITE_MEMBERS": "n0=h:1"}) == ("/jobs/7",)


@pytest.mark.parametrize("runtime", ["apptainer", "singularity"])
def test_apptainer_is_entered_with_all_of_it_where_the_rank_was_started(runtime: str) -> None:
    assert entered(Container(runtime, "pytorch.sif", ("/data:/mnt",), ("--nv",))) == [
        *(runtime, "exec", "--nv"),
        *("--bind", "/tmp/deeplink-1:/tmp/deeplink-1"),
        *("--bind", "/local/ssd:/local/ssd"),
        *("--bind", "/shared/catalog:/shared/catalog"),
        *("--bind", "/home/ada/jobs/7:/home/ada/jobs/7"),
        *("--bind", "/home/ada:/home/ada"),
        *("--bind", "/data:/mnt"),
        *("--pwd", "/home/ada", "pytorch.sif", "python", "a b"),
    ]


def test_charliecloud_is_entered_so() -> None:
    words = entered(Container("charliecloud", "/images/pytorch"), absent="/local/ssd")
    assert words[0] == "ch-run"
    assert "--bind=/tmp/deeplink-1:/tmp/deeplink-1" in words
    assert not any("/local/ssd" in word for word in words), "what is not there cannot be mounted"
    assert words[words.index("--cd=/home/ada") :] == ["--cd=/home/ada", "/images/pytorch", "--", "python", "a b"]


def test_pyxis_mounts_what_holds_the_folders_of_all_nodes() -> None:
    nodes = [
        NodeFacts(node=name, address="h:1", token_file=f"/tmp/deeplink-1-{name}/token", store="/local/ssd")
        for name in ("n0", "n1")
    ]
    env = {name: ENV[name] for name in ("DEEPLINK_CATALOG", "DEEPLINK_HOSTFILE")}
    assert pyxis_options(
        Container("pyxis", "nvcr.io#nvidia/pytorch", ("/data",), ("--no-container-mount-home",)),
        nodes,
        {**env, "DEEPLINK_WATCH_TOKEN_FILE": "/absent"},
        exists=lambda path: path != "/absent",
    ) == [
        "--container-image=nvcr.io#nvidia/pytorch",
        "--container-mounts="
        + ",".join(
            f"{path}:{path}" for path in ("/tmp", "/local/ssd", "/shared/catalog", "/home/ada/jobs/7", "/data")
        ),
        "--no-container-mount-home",
    ]


@pytest.mark.parametrize("mount", ["data", "/a,b", "/a:b", "/a:/b:ro", ""])
def test_what_cannot_be_written_as_a_mount_is_refused(mount: str) -> None:
    with pytest.raises(LaunchError):
        entered(Container("apptainer", "image", (mount,)))


@pytest.mark.parametrize("here", ["/a,b", "/a:/b"])
def test_a_folder_that_reads_like_two_is_refused_and_not_mounted_over_another(here: str) -> None:
    with pytest.raises(LaunchError):
        entering(Container("apptainer", "image"), ["true"], {}, here=here, exists=lambda _: True)


def test_a_rank_that_starts_in_the_root_does_not_hide_the_image() -> None:
    words = entering(Container("apptainer", "image"), ["true"], {}, here="/", exists=lambda _: True)
    assert words == ["apptainer", "exec", "--pwd", "/", "image", "true"]


def test_the_runtime_is_the_one_asked_for_or_the_first_installed() -> None:
    assert chosen_runtime("pyxis", lambda _: None) == "pyxis"
    assert chosen_runtime(None, {"ch-run": "/usr/bin/ch-run"}.get) == "charliecloud"
    with pytest.raises(LaunchError):
        chosen_runtime(None, lambda _: None)


def test_a_launch_travels_with_its_container() -> None:
    container = Container("apptainer", "image", ("/a", "/b:/c"), ("--nv",))
    launch = Launch(
        attempt=Attempt(1, 0, 0),
        nodes=(NodeFacts(node="n0", address="h:1"),),
        spares=(),
        ranks=(1,),
        master_port=1,
        passed_on={},
        container=container,
    )
    assert Launch.unpacked(launch.packed()).container == container
