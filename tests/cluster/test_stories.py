"""Stories of users, told by scripts with what a user has; each says where the samples of each epoch came from."""

from __future__ import annotations

import os
import pwd
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deeplink.demo.story import has_torch
from deeplink.scheduler.testbed.cluster import Sandbox
from deeplink.scheduler.testbed.shape import CTL, Shape
from tests.cluster.conftest import PATIENT
from tests.waiting import LIMIT_S, until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(6 * LIMIT_S),
    pytest.mark.skipif(not has_torch(), reason="its scripts read by deeplink.Dataset, which is torch's"),
]
STORIES = Path(__file__).parents[1] / "stories"
FILES = 1797
_PLACES = ("local", "peer", "home", "source")
_CAME = ", ".join(rf"{place} (\d+)" for place in _PLACES)
_EPOCH = re.compile(rf"^(\S+ task \d+) epoch (\d+): {_CAME}$", re.MULTILINE)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Sandbox]:
    sandbox = Sandbox.up(f"s-{os.getpid()}-{secrets.token_hex(3)}", Shape.of(4), PATIENT)
    yield sandbox
    sandbox.down()


def epochs_of(
    sandbox: Sandbox, story: str, env: dict[str, str] | None = None
) -> dict[tuple[str, int], list[tuple[int, int, int, int]]]:
    """Play a story; return what each epoch of each task said."""
    return told_epochs(played(sandbox, story, env))


def played(
    sandbox: Sandbox, story: str, env: dict[str, str] | None = None, *arguments: str, root: bool = False
) -> str:
    """Play a story in a home that is as a new user's, on wiped SSDs; return what it printed."""
    programs = (path.name for path in STORIES.glob("*.py"))
    as_new(sandbox, 'store = "/local/ssd/deeplink"\n', *programs, f"{story}.sh")
    argv = ["bash", "-eu", f"{story}.sh", *arguments]
    done = sandbox.run(CTL, argv, timeout_s=5 * LIMIT_S, env=env, root=root)
    assert done.code == 0, done.stdout + done.stderr
    sys.stdout.write(done.stdout)
    return done.stdout + done.stderr


def told_epochs(output: str) -> dict[tuple[str, int], list[tuple[int, int, int, int]]]:
    """Return what each epoch of each task said: samples of the node, of others, of the home, of the source."""
    found: dict[tuple[str, int], list[tuple[int, int, int, int]]] = {}
    for who, epoch, *came in _EPOCH.findall(output):
        local, peer, home, source = map(int, came)
        found.setdefault((who, int(epoch)), []).append((local, peer, home, source))
    assert found, output
    for said in found.values():
        assert sum(map(sum, said)) == FILES * len(said)
    return found


def as_new(sandbox: Sandbox, config: str, *scripts: str) -> None:
    """Make the home a new user's, with these settings and files, and wipe the SSDs."""
    for path in sandbox.home.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for node in sandbox.nodes:
        for path in sandbox.ssd(node).iterdir():
            shutil.rmtree(path)
    settings = sandbox.home / ".config" / "deeplink"
    settings.mkdir(parents=True)
    (settings / "config.toml").write_text(config)
    for name in scripts:
        shutil.copy(STORIES / name, sandbox.home / name)
    for path in (sandbox.home, *sandbox.home.rglob("*")):
        shutil.chown(path, sandbox.user.uid, sandbox.user.gid)


def sources_of(found: dict[tuple[str, int], list[tuple[int, int, int, int]]]) -> int:
    """Return how many samples came from the small files themselves."""
    return sum(source for said in found.values() for _, _, _, source in said)


@pytest.mark.parametrize(("story", "tasks"), [("one_node", 1), ("array", 8), ("tars", 1), ("parquet", 1)])
def test_jobs_of_one_node_never_read_the_source(cluster: Sandbox, story: str, tasks: int) -> None:
    found = epochs_of(cluster, story)
    assert len(found) == 3 * tasks
    assert not sources_of(found)
    for (who, epoch), said in found.items():
        for _, _, home, _ in said:
            assert home == 0 or epoch == 1, (who, epoch, found)


def test_without_a_home_plain_python_fills_the_store_of_its_node(cluster: Sandbox) -> None:
    found = epochs_of(cluster, "plain_srun")
    (second,), (third,) = found["n1 task 0", 2], found["n1 task 0", 3]
    assert (second[3], third[3]) == (0, 0)
    first, next_job = found["n1 task 0", 1]
    assert first[3] > 0
    assert next_job == (FILES, 0, 0, 0)


def test_a_job_reads_what_the_sites_standing_agents_hold(cluster: Sandbox) -> None:
    output = played(cluster, "standing_cache")
    jobs = {
        job: told_epochs(said)
        for job, said in re.findall(
            r"^((?:job|plain) on \S+)\n((?:(?!(?:job|plain) on).*\n)*)", output, re.MULTILINE
        )
    }
    assert set(jobs) == {"job on n0,n1", "job on n1,n2", "job on n3", "plain on n0", "plain on n3"}, output
    for job, found in jobs.items():
        assert not sources_of(found), output
        for node in job.split()[-1].split(","):
            first, *_, last = (said[0] for (who, _), said in sorted(found.items()) if who == f"{node} task 0")
            # What a standing agent of the node has is there from the start; else it is brought while epoch 1 runs.
            assert (first[1] > 0) is (node in {"n2", "n3"}), (job, output)
            assert last == (FILES, 0, 0, 0), (job, output)
    # No SSD has a shard twice.
    for node in ("n0", "n1", "n2", "n3"):
        own = list((cluster.ssd(node) / "deeplink").glob("*.mdb"))
        assert bool(own) is (node in {"n2", "n3"}), node


@pytest.mark.parametrize("story", ["wiped_ssd", "never_seen"])
def test_after_one_pack_nobody_reads_the_source(cluster: Sandbox, story: str) -> None:
    found = epochs_of(cluster, story)
    assert not sources_of(found)
    first = [said[-1] for (_, epoch), said in found.items() if epoch == 1]
    assert sum(home for _, _, home, _ in first) > 0
    # By then the nodes have filled their SSDs: the first owner of a shard at once, another one after some seconds.
    assert all(home == 0 for (_, epoch), said in found.items() if epoch == 3 for _, _, home, _ in said), found


def test_an_array_of_packers_lists_the_source_once(cluster: Sandbox) -> None:
    output = played(cluster, "packed_in_parts")
    assert re.findall(r"digits, part (\d) of 4", output) == ["1", "2", "3", "4"], output
    assert "listings: 1\n" in output
    assert "of 4 parts" in output
    assert "left: 0\n" in output
    assert not sources_of(told_epochs(output)), output


def test_a_bucket_is_read_once(cluster: Sandbox) -> None:
    env = {"PYTHONPATH": f"{sys.prefix}/s3"}  # what S3's driver needs is not of the versions that other tests have
    server = cluster.spawn(CTL, [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", "5000"], env=env)
    try:
        until(lambda: cluster.run(CTL, ["bash", "-c", "exec 3<>/dev/tcp/ctl/5000"]).code == 0)
        found = epochs_of(cluster, "s3", env)
    finally:
        server.kill()
        server.wait(LIMIT_S)
    assert not sources_of(found)
    assert {who for who, _ in found} == {"n1 task 0", "n2 task 0"}
    assert sum(said[0][2] for (_, epoch), said in found.items() if epoch == 1) > 0  # from the packed home


def test_an_unchanged_script_reads_its_folder_from_the_cache(cluster: Sandbox) -> None:
    output = played(cluster, "imagefolder")
    found = told_epochs(output)
    assert sorted(found) == [("n1 task 0", 1), ("n1 task 0", 2), ("n1 task 0", 3)]
    assert not sources_of(found), output
    assert [found["n1 task 0", epoch][0][2] for epoch in (2, 3)] == [0, 0], output
    # Every epoch had the same pixels, also that of the workers, for whom the files themselves were locked.
    digests = re.findall(rf"epoch \d: {FILES} images, ([0-9a-f]{{16}})$", output, re.MULTILINE)
    assert len(digests) == 4, output
    assert len(set(digests)) == 1
    assert "with workers: epoch 1" in output


def test_another_user_reads_what_the_source_lets_him_and_no_more(cluster: Sandbox) -> None:
    other = next(one for one in pwd.getpwall() if 0 < one.pw_uid < 1000 and one.pw_uid != cluster.user.uid)
    output = played(cluster, "two_users", None, cluster.user.name, other.pw_name, root=True)
    found = told_epochs(output)
    assert not sources_of(found), output
    # The agent brings what its node lacks while the first epochs run.
    assert found["n1 task 0", 6] == [(FILES, 0, 0, 0)], output
    # Where there is no agent those of other nodes serve whom MUNGE names, and the reader fills its own store.
    assert found["n3 task 0", 1][0][1] > 0, output
    assert not any(home for (who, _), said in found.items() if who == "n3 task 0" for _, _, home, _ in said), (
        output
    )
    assert found["n3 task 0", 6] == [(FILES, 0, 0, 0)], output
    assert "are not asked" not in output
    assert output.count("do not let this user read it") >= 2
    refused = re.findall(r"^refused: SampleForbiddenError .*Permission denied", output, re.MULTILINE)
    assert len(refused) == 2, output
    # In a job of the second user the standing agent looks after n1, and his own after n3.
    assert found["n1 task 0", 4] == found["n3 task 0", 4] == [(FILES, 0, 0, 0)] * 2, output
    assert not list(cluster.ssd("n1").glob(f"store-{other.pw_name}/*.mdb"))


def test_without_settings_shards_go_to_the_nodes_own_disks(cluster: Sandbox) -> None:
    as_new(cluster, "")
    script = "deeplink demo --write-digits digits && salloc -N2 -w n0,n1 deeplink pack digits digits"
    done = cluster.run(CTL, ["bash", "-c", script], timeout_s=LIMIT_S)
    assert done.code == 0, done.stdout + done.stderr
    name = f"deeplink-{cluster.user.uid}"
    assert f"store /local/ssd/{name} (in a Slurm job, the first folder on a local disk" in done.stdout
    assert "on n0, n1" in done.stdout
    for node in ("n0", "n1"):
        assert list((cluster.ssd(node) / name).glob("*.mdb"))


def test_a_store_that_two_nodes_share_is_refused_with_the_line_to_write(cluster: Sandbox) -> None:
    as_new(cluster, 'store = "~/store"\n')
    script = "deeplink demo --write-digits digits && salloc -N2 -w n0,n1 deeplink pack digits digits"
    done = cluster.run(CTL, ["bash", "-c", script], timeout_s=LIMIT_S)
    assert done.code != 0
    assert "share it, and a store is one node's own" in done.stderr
    assert 'store = "/local/' in done.stderr
    assert not list((cluster.home / "store").glob("*.mdb"))
