from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeplink.core.config import Config, ConfigError
from deeplink.core.finding import Severity
from deeplink.scheduler.node.settings import (
    BUILT_IN,
    HealthSettings,
    Off,
    load_settings,
    parse_settings,
    parse_switch,
    read_switch,
    switch_paths,
)

PAGE = Path(__file__).parents[3] / "docs" / "health.md"


def test_a_file_says_what_it_says_and_leaves_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "health.toml"
    file.write_text(
        '[mount]\nmost = "drain"\npaths = ["/home"]\n[disk]\nslow_s = 1\n[site.x]\ncommand = ["a", "b"]\n'
    )
    settings = load_settings(file)
    assert (settings.mount.most, settings.mount.paths, settings.disk.slow_s) == (
        Severity.ERROR,
        ("/home",),
        1,
    )
    assert settings.site["x"].command == ("a", "b")
    assert settings.gpu == HealthSettings().gpu
    assert load_settings(None) == HealthSettings()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[dsik]\n", "dsik"),
        ("disk = 3\n", "disk"),
        ("[disk]\nslow = 1\n", "disk.slow"),
        ("[disk]\nslow_s = 'x'\n", "disk.slow_s"),
        ("[disk]\nslow_s = nan\n", "disk.slow_s"),
        ("[disk]\nbad = 0\n", "disk.bad"),
        ("[disk]\nbad = 1.5\n", "disk.bad"),
        ("[disk]\ninterval_s = 0\n", "disk.interval_s"),
        ("[disk]\noff = 1\n", "disk.off"),
        ("[disk]\nmost = 'unknown'\n", "disk.most"),
        ("[mount]\npaths = '/home'\n", "mount.paths"),
        ("[site.gpu]\ncommand = ['x']\n", "site.gpu"),
        ("[site.'a b']\ncommand = ['x']\n", "site.a b"),
        ("not toml", "(file)"),
    ],
)
def test_a_bad_setting_is_refused_by_file_and_key(tmp_path: Path, text: str, key: str) -> None:
    file = tmp_path / "health.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file)
    assert caught.value.key == key
    assert str(file) in str(caught.value)


def test_a_file_that_is_absent_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_settings(tmp_path / "absent.toml")


@given(
    st.dictionaries(st.sampled_from([*BUILT_IN, "site", "x"]), st.dictionaries(st.text(max_size=9), st.integers()))
)
def test_no_table_is_more_than_refused(tables: dict[str, Any]) -> None:
    try:
        parse_settings(tables, "f")
    except ConfigError:
        return


def test_the_example_of_the_page_is_one_that_is_read_and_shows_every_check_it_names() -> None:
    (example,) = [text for text in re.findall(r"```\n(.*?)```", PAGE.read_text(), re.DOTALL) if "[disk]" in text]
    settings = parse_settings(tomllib.loads(example), "docs/health.md")
    assert settings.site["burn"].most is Severity.WARNING
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))
    assert rows == set(BUILT_IN)


def test_an_empty_switch_turns_everything_off_and_names_turn_off_themselves(tmp_path: Path) -> None:
    assert "disk" in parse_switch("  \n# a note\n")
    assert "disk" not in parse_switch("gpu\nmount # these\n")
    assert "mount" in parse_switch("gpu\nmount # these\n")
    one, two = tmp_path / "one", tmp_path / "two"
    assert read_switch([one, two, one / "below"]) == Off()
    one.write_text("gpu")
    two.write_text("disk")
    assert read_switch([one, two]).names == {"gpu", "disk"}
    one.write_text("")
    assert "anything" in read_switch([one, two])


def test_the_switch_lies_beside_the_sites_configuration_and_in_the_state_folder(tmp_path: Path) -> None:
    paths = [str(path) for path in switch_paths(Config(state=tmp_path))]
    assert paths == ["/etc/deeplink/health-off", str(tmp_path / "health-off")]
    assert all(path in PAGE.read_text() for path in paths[:1])
