from __future__ import annotations

from deeplink.core.admission import SILENT_S, Strangers
from deeplink.core.clock import ManualClock


def test_what_is_remembered_is_bounded_and_ends() -> None:
    clock = ManualClock()
    known = Strangers(clock)
    for number in range(5000):
        known.note(f"h:{number}", "t", "UNIMPLEMENTED")
    assert len(known._known) == 4096
    assert known.answered("h:4999", "t") == "UNIMPLEMENTED"
    assert known.answered("h:4999", "another") == ""
    known.forget("h:4998")
    assert known.answered("h:4998", "t") == "", "an agent is announced there"
    assert known.answered("h:4999", "t")
    clock.sleep(SILENT_S)
    assert known.answered("h:4999", "t") == "", "by now it may have been given our token"
