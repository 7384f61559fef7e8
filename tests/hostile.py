"""Foreign texts: what people name jobs, files and reasons. One corpus for all tests of names."""

from __future__ import annotations

from hypothesis import strategies as st

NAMES = (
    *("\x1b[2J", "\x1b]0;gone\x07", "\x9b31m", "a\x1b[31m\nb", "\x08\x08rm", "\x7f", "\x01", "a\rb", "\v\f"),
    *("a\nb", "\n", "\t", "a\n\nJobId=1 JobName=x", "a\nJobId=1 JobState=COMPLETED", "JobState=FAILED"),
    *("\udcff\udcfe", "caf\udce9", "\udce9\x1b[2J a\nb", "\ufeffa", "\u202egnp", "a\u2028b", "\u0085", "\u200b"),
    *("é", "e\u0301", "日本語", "\U0001f600", "\u0130", "²", "x" * 200, " ", "  two  ", "a b", "a|b|c", "%j"),
    *("../../x", "/etc/passwd", "~", "-", "--", "-x", "\\x41", "\\n", "<b>&amp;", "(null)", "{a,b}", "[a-z]"),
)
"""Names of jobs, files and datasets, reasons, comments: whatever their owner wrote. No empty one, no NUL."""
WORDS = (
    *NAMES,
    *(
        "",
        "\r\n",
        "'",
        '"',
        "'\"'\"'",
        "\\",
        "\\\\",
        "a\\ b",
        "$HOME",
        "$(id)",
        "`id`",
        "${x:-y}",
        "!",
        "*",
        "?",
        "#no",
    ),
    *("a;b", "a&b", ">f", "<f", "(x)", "%%", "%s%n", "a,b=c,d", "=", "--spares=3", "--export=NONE", "\\u0041"),
    *("key='va lue'", '{"json": [1, "two"]}', "x" * 5000),
)
"""Words of a command line or values of variables."""
TEXTS = st.sampled_from(WORDS) | st.lists(st.sampled_from(NAMES) | st.text(max_size=3), max_size=9).map("".join)
"""For property tests: one of them, or several together."""
