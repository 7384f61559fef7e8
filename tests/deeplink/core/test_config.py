from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from deeplink.core.config import Config, ConfigError, load_config, misspelt


def test_defaults_hold_without_files_and_variables(tmp_path: Path) -> None:
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    assert load_config({"DEEPLINK_CONFIG": str(empty)}).replicas == Config().replicas


def test_the_environment_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('store = "/ssd/a"\nreplicas = 3\n')
    config = load_config({"DEEPLINK_CONFIG": str(file), "DEEPLINK_STORE": "/ssd/b"})
    assert (config.store, config.replicas) == (Path("/ssd/b"), 3)


@pytest.mark.parametrize(("said", "meant"), [("1", True), ("TRUE", True), ("no", False)])
def test_a_switch_is_true_or_false(said: str, meant: bool) -> None:
    assert (
        load_config({"DEEPLINK_CONFIG": "/dev/null", "DEEPLINK_CHECK_EVERY_READ": said}).check_every_read is meant
    )


def test_paths_expand_home_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("WHERE", "ssd")
    file = tmp_path / "c.toml"
    file.write_text('store = "/local/$WHERE/x"\ncatalog = "~/cat"\nshard_bytes = 1e9\n')
    config = load_config({"DEEPLINK_CONFIG": str(file)})
    assert config.store == Path("/local/ssd/x")
    assert config.shard_bytes == 10**9
    assert config.catalog == Path("/home/someone/cat")
    assert config.state == Path("/home/someone/.local/state/deeplink")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("stoer = '/x'", "stoer"),
        ("replicas = 0", "replicas"),
        ("replicas = 'two'", "replicas"),
        ("replicas = 2.7", "replicas"),
        ("replicas = true", "replicas"),
        ("store = '~nobody-of-this-name/x'", "store"),
        ("store = 7", "store"),
        ("store = ''", "store"),
        ("watch = 1", "watch"),
        ("check_every_read = 'perhaps'", "check_every_read"),
        ("not toml", "(file)"),
    ],
)
def test_a_bad_setting_is_refused_by_file_and_key(tmp_path: Path, text: str, key: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config({"DEEPLINK_CONFIG": str(file)})
    assert caught.value.key == key
    assert str(file) in str(caught.value)


def test_a_named_file_that_is_absent_is_an_error(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.toml")
    with pytest.raises(ConfigError) as caught:
        load_config({"DEEPLINK_CONFIG": absent})
    assert str(caught.value) == f"{absent}: No such file or directory"
    assert "unset DEEPLINK_CONFIG" in caught.value.remedy


@pytest.mark.parametrize(("key", "remedy"), [("stoer", "Is store meant?"), ("xyz", "There are catalog, store, ")])
def test_the_key_that_is_meant_is_named(tmp_path: Path, key: str, remedy: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f"{key} = 1")
    with pytest.raises(ConfigError) as caught:
        load_config({"DEEPLINK_CONFIG": str(file)})
    assert caught.value.remedy.startswith(remedy)


def test_variables_that_jobs_and_commands_have_are_not_taken_for_misspelt() -> None:
    root = Path(__file__).parents[3]
    code = "".join(
        path.read_text() for part in ("deeplink", "scheduler", "cache") for path in (root / part).rglob("*.py")
    )
    used = set(re.findall(r"\bDEEPLINK_[A-Z]+(?:_[A-Z]+)*\b", code)) - {"DEEPLINK_STOER"}
    assert {"DEEPLINK_ATTEMPT", "DEEPLINK_SHIM", "DEEPLINK_STORE"} <= used
    assert misspelt(dict.fromkeys(used, "")) == {}
    assert misspelt({"DEEPLINK_TOKENFILE": "", "DEEPLINK_SPARE": "", "DEEPLINK_HOMEPAGE": "", "STORES": ""}) == {
        "DEEPLINK_TOKENFILE": "DEEPLINK_TOKEN_FILE",
        "DEEPLINK_SPARE": "DEEPLINK_SPARES",
    }


def test_a_bad_variable_is_refused_by_name(tmp_path: Path) -> None:
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    with pytest.raises(ConfigError, match="DEEPLINK_REPLICAS"):
        load_config({"DEEPLINK_CONFIG": str(empty), "DEEPLINK_REPLICAS": "-1"})


def test_an_empty_optional_path_means_none(tmp_path: Path) -> None:
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    assert load_config({"DEEPLINK_CONFIG": str(empty), "DEEPLINK_TOKEN_FILE": ""}).token_file is None


def test_the_page_lists_every_key() -> None:
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    for field in dataclasses.fields(Config):
        assert f"| `{field.name}` |" in page
