"""`deeplink operate` where no watchdog answers: the commands to run by hand, or that there are none."""

from __future__ import annotations

import pytest

from deeplink.cli.operate import command
from deeplink.core.errors import DeepLinkError


@pytest.mark.parametrize(
    ("words", "by_hand"),
    [
        (["drain", "n1"], "scontrol update nodename=n1 state=drain 'reason=operator by hand: fan'"),
        (["acknowledge", "3"], "none: only a watchdog keeps it"),
    ],
)
def test_without_a_watchdog_what_to_run_by_hand_is_told(
    words: list[str], by_hand: str, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPLINK_WATCH", f"127.0.0.1:{closed_port}")
    with pytest.raises(DeepLinkError, match="no watchdog does it") as told:
        command.main([*words, "--why", "fan"], standalone_mode=False)
    assert told.value.remedy == f"By hand: {by_hand}"
