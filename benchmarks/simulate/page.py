"""A report as Markdown, and as one HTML page that needs nothing else; pure."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from benchmarks.simulate.report import facts, plots, tables
from benchmarks.simulate.tables import markdown

if TYPE_CHECKING:
    from benchmarks.simulate.report import ReportSubject
    from benchmarks.simulate.tables import ReportTable

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1000px; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: .6em 0 1.2em }
th, td { border-bottom: 1px solid #ddd; padding: .2em .8em .2em 0; text-align: left; vertical-align: top }
th, td + td { white-space: nowrap }
.wide { overflow-x: auto }
svg { display: block; width: 100%; min-width: 600px; max-width: 860px; margin: 1em 0 }
svg { font: 12px system-ui, sans-serif }
code { background: #f3f3f3; padding: .1em .3em; overflow-wrap: anywhere }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd } th, td { border-color: #444 } code { background: #333 }
  svg { background: #ddd }
}
"""


def as_text(told: ReportSubject) -> str:
    """Return the report in Markdown, without a heading of its own."""
    parts = ["\n".join(f"- {fact}" for fact in facts(told)) + "\n", *map(markdown, tables(told))]
    return "\n".join(parts)


def as_html(told: ReportSubject, made_by: str) -> str:
    """Return the report as one page.

    Args:
        told: what it is about.
        made_by: the command that made it.
    """
    body = ["<h1>Simulated queue</h1>", f"<p><code>{escape(made_by)}</code></p>", "<ul>"]
    body += [f"<li>{escape(fact)}</li>" for fact in facts(told)]
    body.append("</ul>")
    body += map(_table, tables(told))
    body += ["<h2>Plots</h2>", "<p>Curves over time are those of the first seed.</p>", *map(_wide, plots(told))]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Simulated queue</title>'
    )
    head += f"<style>{_STYLE}</style>"
    return "\n".join(
        ["<!doctype html>", '<html lang="en"><head>', head, "</head><body>", *body, "</body></html>", ""]
    )


def _table(table: ReportTable) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.header)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in table.rows)
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    cells = f"<table><tr>{head}</tr>\n{rows}</table>"
    return f"<h2>{escape(table.title)}</h2>{_wide(cells)}{note}"


def _wide(part: str) -> str:
    """Return what may be wider than the window, in a box that is scrolled alone."""
    return f'<div class="wide">{part}</div>'
