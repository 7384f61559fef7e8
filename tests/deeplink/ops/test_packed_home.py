"""Where a pack keeps the shards besides, by rule and by name; what is removed from there, and what stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from deeplink.cache.catalog import Catalog
from deeplink.cache.errors import HomeError, IndexFormatError
from deeplink.cache.pack.parts import Part
from deeplink.cache.packer import pack
from deeplink.cache.source.home import home_beside, open_home
from deeplink.core import store_place
from deeplink.core.config import Config
from deeplink.fs.library import DatasetPath
from deeplink.ops.inventory import orphans, remove_at_home, shards_to_drop
from deeplink.ops.packing import HomeChoice, chosen_home
from tests.cache.agents import config_below, small_files, write_tree


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return config_below(tmp_path)


def with_settings(config: Config, **settings: str) -> Config:
    from dataclasses import replace

    return replace(config, **settings)  # type: ignore[arg-type]


def test_a_catalog_of_this_node_alone_has_no_home(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not chosen_home(config).url
    local = with_settings(config, members="n0=127.0.0.1:7411,n1=[::1]:7411")
    assert not chosen_home(local).url
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert not chosen_home(local).url
    assert not chosen_home(config, local=2).url
    assert not chosen_home(config, here=True).url


def test_a_catalog_that_nodes_share_has_one_beside_it(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = f"{config.catalog}.home"
    assert chosen_home(with_settings(config, members="n0=10.0.0.1:7411")).url == beside
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert chosen_home(config).url == beside
    monkeypatch.delenv("SLURM_JOB_ID")
    table = [("/", "ext4"), (str(config.catalog.parent), "lustre")]
    kind = store_place.file_system(config.catalog, table)
    monkeypatch.setattr("deeplink.ops.packing.file_system", lambda _: kind)
    found = chosen_home(config)
    assert (found.url, found.named) == (beside, False)
    assert "lustre" in found.why


@pytest.mark.parametrize(
    ("given", "setting", "url"),
    [
        ("", "none", ""),
        ("none", "/shared/packed", ""),
        ("", "/shared/packed", "/shared/packed"),
        ("s3://bucket/packed", "none", "s3://bucket/packed"),
        ("", "$SHARED/packed", "/big/packed"),
    ],
)
def test_what_is_named_counts_more_than_the_rule(
    config: Config, monkeypatch: pytest.MonkeyPatch, given: str, setting: str, url: str
) -> None:
    monkeypatch.setenv("SHARED", "/big")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    found = chosen_home(with_settings(config, home=setting), given)
    assert (found.url, found.named) == (url, True)


def test_a_home_of_the_rule_that_cannot_be_written_to_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    catalog = tmp_path / "file" / "catalog"
    found = HomeChoice(home_beside(catalog), "the nodes of jobs read the catalog").made(catalog)
    assert not found.url
    assert "Not a directory" in found.why
    named = HomeChoice(str(tmp_path / "file"), "as the command says", named=True)
    assert named.made(catalog) == named  # it is tried before anything is packed, and refused


def test_only_shards_that_no_version_has_any_more_leave_the_catalogs_own_home(
    config: Config, tmp_path: Path
) -> None:
    source, other = tmp_path / "source", tmp_path / "other"
    write_tree(source, small_files(40))
    write_tree(other, small_files(40))
    url, catalog = home_beside(config.catalog), Catalog(config.catalog)
    first = pack(str(source), "digits", config=config, home=url)
    pack(str(other), "same", config=config, home=url)  # the same shards under another name
    (source / "zebra").write_bytes(b"new")
    second = pack(str(source), "digits", config=config, home=url, append=True)
    home = open_home(url)
    assert orphans(catalog, "digits", first.version) == (url, [])
    (new,) = set(second.placed) - set(first.placed)
    assert orphans(catalog, "digits", second.version) == (url, [new])
    size = {entry.id: entry.bytes for entry in catalog.open("digits", second.version).shards}
    remove_at_home(url, "digits", second.version, [new])
    assert home.lacking(list(size.items())) == [new]
    elsewhere = pack(str(source), "digits", config=config, home=str(tmp_path / "elsewhere"))
    assert orphans(catalog, "digits", elsewhere.version) == ("", [])
    with pytest.raises(HomeError):
        remove_at_home(str(source / "zebra"), "digits", second.version, [new])


def test_what_a_part_has_that_waits_to_be_merged_stays(config: Config, tmp_path: Path) -> None:
    source, other = tmp_path / "source", tmp_path / "other"
    write_tree(source, small_files(40))
    write_tree(other, small_files(40))
    url, catalog = home_beside(config.catalog), Catalog(config.catalog)
    version = pack(str(source), "digits", config=config, home=url).version
    pack(str(other), "again", config=config, home=url, part=Part(1, 1))  # the same shards, of no version yet
    assert catalog.names(lost=True) == ["digits"]
    assert orphans(catalog, "digits", version) == (url, [])
    assert shards_to_drop(catalog, DatasetPath("digits"), force=False) == ([], {"again": 2})
    (index,) = (config.catalog / "again" / ".parts").glob("*.arrow")
    index.write_bytes(index.read_bytes()[:100])
    with pytest.raises(IndexFormatError, match="part that cannot be read"):
        orphans(catalog, "digits", version)
