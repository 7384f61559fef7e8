"""Writes docs/reference.md (commands, errors), docs/metrics.md and the Grafana boards: `make reference`.

Settings stand in docs/configuration.md; tests hold those against the code.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from prometheus_client import CollectorRegistry

from deeplink.cli import cli
from deeplink.core.metrics import AGENT, CONSOLE, WatchMetrics
from tests.dashboards import boards
from tests.house import ROOT, modules

HEAD = """# Reference

Every command with its options, and every error with its exit code. Written by `make reference` from the code;
a test holds it against the code. Settings: [configuration](configuration.md). Metrics:
[metrics](metrics.md).

"""


def commands() -> Iterator[tuple[str, str]]:
    """Yield each command's name and its `--help`, subcommands after their group."""
    for name in cli.list_commands(click.Context(cli)):
        command = cli.get_command(click.Context(cli), name)
        if command is not None and not command.hidden:
            yield from _below(f"deeplink {name}", command)


def _below(name: str, command: click.Command) -> Iterator[tuple[str, str]]:
    with click.Context(command, info_name=name, terminal_width=100, max_content_width=100) as context:
        yield name, command.get_help(context)
    if isinstance(command, click.Group):
        for inner, each in sorted(command.commands.items()):
            if not each.hidden:
                yield from _below(f"{name} {inner}", each)


def errors() -> Iterator[tuple[str, int, str]]:
    """Yield each public error class of the product: its name, its exit code, when it is raised."""
    code_of = {"DeepLinkError": 1}
    found: dict[str, tuple[list[str], int | None, str]] = {}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and not node.name.startswith("_"):
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                first = (ast.get_docstring(node) or "").partition("\n")[0]
                found[node.name] = bases, _exit_code(node), first

    def code(name: str) -> int | None:
        if name in code_of or name not in found:
            return code_of.get(name)
        bases, own, _ = found[name]
        return own if own is not None else next((one for base in bases if (one := code(base)) is not None), None)

    for name, (_, _, first) in sorted(found.items()):
        exits = code(name)
        if exits is not None:
            yield name, exits, first


def _exit_code(node: ast.ClassDef) -> int | None:
    for line in node.body:
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        value = getattr(line, "value", None)
        if isinstance(target, ast.Name) and target.id == "exit_code" and isinstance(value, ast.Constant):
            return int(str(value.value))
    return None


def page() -> str:
    """Return what docs/reference.md should hold."""
    listed = list(commands())
    lines = [HEAD, "## Commands\n\n"]
    lines += (f"- [`{name}`](#{name.replace(' ', '-')})\n" for name, _ in listed)
    lines += (f"\n### {name}\n\n```\n{text}\n```\n" for name, text in listed)
    lines += ["\n## Errors\n\n| error | exit code | raised when |\n|---|---|---|\n"]
    lines += (f"| `{name}` | {code} | {first.replace('|', chr(92) + '|')} |\n" for name, code, first in errors())
    return re.sub(r"[ \t]+$", "", "".join(lines), flags=re.MULTILINE)


METRICS_HEAD = """# Metrics

Written by `make reference` from `deeplink/core/metrics.py`; a test holds it against the code. Each daemon
exports its own and those of its process (`process_*`, `python_*`), nothing of another daemon. A histogram has
`_bucket`, `_sum` and `_count` behind its name; in OpenMetrics the watchdog's have the attempt as an exemplar.
`_info` metrics are 1, and join what they name to the others:
`deeplink_job_step * on (job_id) group_left (name, user) deeplink_job_info`.

How to scrape them, alerts and boards: [operating](operator.md#metrics), [alerts](alerts.md).
"""


def metrics_page() -> str:
    """Return what docs/metrics.md should hold."""
    lines = [METRICS_HEAD]
    watch = WatchMetrics(CollectorRegistry()).rows
    tables = (("The node agent", AGENT.rows), ("The watchdog", watch), ("The console", CONSOLE.rows))
    for title, rows in tables:
        lines.append(f"\n## {title}\n\n| metric | kind | labels | means |\n|---|---|---|---|\n")
        for row in rows:
            labels = ", ".join(f"`{label}`" for label in row.labels)
            lines.append(f"| `{row.name}` | {row.kind} | {labels} | {row.means.rstrip('.')} |\n")
    return "".join(lines)


def written() -> dict[Path, str]:
    """Return every file that is written from the code, with what it should hold."""
    docs = ROOT / "docs"
    return {docs / "reference.md": page(), docs / "metrics.md": metrics_page(), **boards()}


if __name__ == "__main__":
    stale = {path: text for path, text in written().items() if not path.exists() or path.read_text() != text}
    if "--check" in sys.argv:  # in a process of its own: click remembers a command's first --help
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"stale: {names}; run `make reference`" if stale else 0)
    for path, text in stale.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        sys.stdout.write(f"{path.relative_to(ROOT)} written\n")
