"""Writes docs/reference.md, what every command and error says of itself: `make reference`.

Settings stand in docs/configuration.md and metrics in docs/operator.md; tests hold those against the code.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

import click

from deeplink.cli import cli
from tests.house import ROOT, modules

PAGE = ROOT / "docs" / "reference.md"
HEAD = """# Reference

Every command with its options, and every error with its exit code. Written by `make reference` from the code;
a test holds it against the code. Settings: [configuration](configuration.md). Metrics:
[operating](operator.md#metrics).

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


if __name__ == "__main__":
    if "--check" in sys.argv:  # in a process of its own: click remembers a command's first --help
        sys.exit(0 if PAGE.read_text() == page() else "docs/reference.md is stale: run `make reference`")
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE.relative_to(ROOT)} written\n")
