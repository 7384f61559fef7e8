"""Unpacking packages: real ones (made here), real dpkg; apt itself is played by small scripts, so no network."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from deeplink.scheduler.testbed import programs
from deeplink.scheduler.testbed.errors import SlurmMissingError

CONTENTS = {
    "slurmctld": "usr/sbin/slurmctld-wlm",
    "slurmd": "usr/sbin/slurmd-wlm",
    "slurm-client": "usr/bin/sinfo",
    "munge": "usr/sbin/munged",
    "slurm-wlm-basic-plugins": "usr/lib/x86_64-linux-gnu/slurm-wlm/auth.so",
    "libneeded1": "usr/lib/x86_64-linux-gnu/libneeded.so.1",
}
APT_GET = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
*--simulate*) printf 'Inst libneeded1 (1 x)\\nInst libhere1 (1 x)\\nConf libneeded1 (1 x)\\n' ;;
download*) shift; for package; do cp {debs}/"$package".deb . || exit 100; done ;;
esac
"""
APT_CACHE = "#!/bin/sh\nprintf 'Package: slurmd\\nVersion: 1:22.05.8-4\\n'\n"
DPKG_QUERY = "#!/bin/sh\nprintf 'libhere1 installed\\nlibneeded1 config-files\\n'\n"


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def package(debs: Path, name: str, file: str) -> None:
    tree = debs / "tree"
    (tree / file).parent.mkdir(parents=True)
    script(tree / file, "#!/bin/sh\n")
    if name == "slurmd":
        script(tree / "usr/sbin/slurmstepd-wlm", "#!/bin/sh\n")
    (tree / "DEBIAN").mkdir()
    control = f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: x <x@x>\nDescription: x\n"
    (tree / "DEBIAN" / "control").write_text(control)
    subprocess.run(["dpkg-deb", "--build", tree, debs / f"{name}.deb"], check=True, capture_output=True)
    shutil.rmtree(tree)


@pytest.fixture
def apt_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that lists what apt-get was asked for."""
    debs, folder, log = tmp_path / "debs", tmp_path / "bin", tmp_path / "log"
    debs.mkdir()
    folder.mkdir()
    for name, file in CONTENTS.items():
        package(debs, name, file)
    script(folder / "apt-get", APT_GET.format(log=log, debs=debs))
    script(folder / "apt-cache", APT_CACHE)
    script(folder / "dpkg-query", DPKG_QUERY)
    monkeypatch.setenv("PATH", f"{folder}:{programs.SYSTEM_PATH}")
    return log


@pytest.mark.slow
def test_packages_and_what_they_need_beyond_the_installed_are_unpacked_once(tmp_path: Path, apt_log: Path) -> None:
    cache = tmp_path / "cache"
    found = programs.unpacked(cache)
    usr = cache / "1_22.05.8-4" / "usr"
    assert Path(found.slurmctld) == usr / "sbin" / "slurmctld-wlm"
    assert Path(found.slurmstepd) == usr / "sbin" / "slurmstepd-wlm"
    assert found.plugins == usr / "lib" / "x86_64-linux-gnu" / "slurm-wlm"
    assert found.path.startswith(f"{usr}/bin:{usr}/sbin:")
    assert found.env["LD_LIBRARY_PATH"].endswith(f"{usr}/lib/x86_64-linux-gnu")
    assert (usr / "lib" / "x86_64-linux-gnu" / "libneeded.so.1").exists()
    [download] = [line for line in apt_log.read_text().splitlines() if line.startswith("download")]
    assert set(download.split()[1:]) == set(CONTENTS)
    apt_log.unlink()
    assert programs.unpacked(cache) == found
    assert not apt_log.exists()
    assert [path.name for path in cache.iterdir()] == ["1_22.05.8-4"]


@pytest.mark.slow
def test_a_download_that_fails_leaves_nothing_and_says_what_to_type(tmp_path: Path, apt_log: Path) -> None:
    (tmp_path / "debs" / "munge.deb").unlink()
    with pytest.raises(SlurmMissingError) as failed:
        programs.unpacked(tmp_path / "cache")
    assert "apt-get update" in failed.value.remedy
    assert "munge.deb" in failed.value.remedy
    assert list((tmp_path / "cache").iterdir()) == []


def test_packages_lie_in_the_users_cache() -> None:
    assert programs.cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/deeplink/slurm")
