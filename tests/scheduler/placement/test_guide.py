"""The guide's example prints what the guide says it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

GUIDE = Path(__file__).parents[3] / "docs" / "cost-model.md"


def test_the_example_prints_what_stands_below_it() -> None:
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(found[1], {})  # noqa: S102 (our own guide)
    assert printed.getvalue() == found[2]
