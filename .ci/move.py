"""Moves modules and renames what is in them, as a table says. Here while the house is rebuilt.

python .ci/move.py TABLE [SECTION...]

Lines of a table, in sections `[name]`; `#` begins a comment:
    deeplink/lately.py -> deeplink/core/cached_probe.py            a module, and the test that mirrors it
    deeplink/lately.py: Lately -> CachedProbe, probe -> look       names at its top level, by its path of before
    .set_free -> .release_hold                                     an attribute that one class in the tree defines
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOPS = ("deeplink", "cache", "scheduler")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def dotted(path: str) -> str:
    """`scheduler/watch/book.py` -> `deeplink.scheduler.watch.book`."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.startswith("deeplink") or name.split(".")[0] not in TOPS else f"deeplink.{name}"


class Table:
    def __init__(self, text: str, sections: list[str]) -> None:
        self.modules: dict[str, str] = {}
        self.names: dict[str, dict[str, str]] = defaultdict(dict)
        self.attributes: dict[str, str] = {}
        self.dots: dict[str, str] = {}
        section = ""
        for raw in text.splitlines():
            line = raw.partition("#")[0].strip()
            if line.startswith("["):
                section = line.strip("[]")
            elif line and (not sections or section in sections):
                self._take(line)

    def _take(self, line: str) -> None:
        path, colon, names = line.partition(": ")
        for pair in (names if colon else line).split(","):
            old, new = (word.strip() for word in pair.split("->"))
            if colon:
                self.names[dotted(path)][old] = new
            elif old.startswith("."):
                self.attributes[old[1:]] = new[1:]
            else:
                self.modules[old] = new


def edited(text: str, edits: dict[tuple[int, int], tuple[str, str]]) -> str:
    """Replace words at (line, byte column)."""
    lines = text.splitlines(keepends=True)
    for (line, column), (old, new) in sorted(edits.items(), reverse=True):
        raw = lines[line - 1].encode()
        assert raw[column:].startswith(old.encode()), (line, column, old, lines[line - 1])
        lines[line - 1] = (raw[:column] + new.encode() + raw[column + len(old.encode()) :]).decode()
    return "".join(lines)


def find_word(text: str, node: ast.AST, word: str) -> tuple[int, int]:
    """Return where `word` first stands from the beginning of a node on (def NAME, class NAME, import NAME)."""
    lines = text.splitlines(keepends=True)
    number, column = node.lineno, node.col_offset
    while True:
        raw = lines[number - 1].encode()
        found = re.search(rb"\b" + word.encode() + rb"\b", raw[column:])
        if found:
            return number, column + found.start()
        number, column = number + 1, 0


class Renamer(ast.NodeVisitor):
    def __init__(self, text: str, module: str, table: Table) -> None:
        self.text, self.module, self.table = text, module, table
        self.edits: dict[tuple[int, int], tuple[str, str]] = {}
        self.bound: dict[str, str] = {}
        self.aliases: dict[str, str] = {}
        self.exported: list[ast.Constant] = []
        self.statements: list[tuple[ast.ImportFrom, str]] = []
        tree = ast.parse(text)
        self.used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {
            node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)
        }
        if module in table.names:
            self.bound |= table.names[module]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                self._import_from(node)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                self.exported = [one for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.aliases[alias.asname or alias.name] = alias.name
        self.visit(tree)
        for node in ast.walk(tree):  # names in strings: cast("Name", ...), annotations
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in {"cast", "TypeVar"}:
                for one in [*node.args, *(word.value for word in node.keywords)]:
                    self._in_string(one)
            for name in ("annotation", "returns"):
                if isinstance(getattr(node, name, None), ast.expr):
                    for one in ast.walk(getattr(node, name)):
                        self._in_string(one)
        for one in self.exported:
            if one.value in self.bound:
                self.edits[one.lineno, one.col_offset + 1] = (one.value, self.bound[one.value])

    def _in_string(self, one: ast.AST) -> None:
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            for found in re.finditer(r"\w+", one.value):
                if found[0] in self.bound:
                    at = (one.lineno, one.col_offset + 1 + found.start())
                    self.edits[at] = (found[0], self.bound[found[0]])

    def _import_from(self, node: ast.ImportFrom) -> None:
        names = self.table.names.get(node.module or "", {})
        if any(f"{node.module}.{alias.name}" in self.table.dots for alias in node.names):
            self._import_modules(node)
            return
        for alias in node.names:
            self.aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            if alias.name in names:
                self.edits[find_word(self.text, alias, alias.name)] = (alias.name, names[alias.name])
                if alias.asname is None:
                    self.bound[alias.name] = names[alias.name]

    def _import_modules(self, node: ast.ImportFrom) -> None:
        """Rewrite an import of modules, of which some move."""
        found: dict[str, list[str]] = {}
        for alias in node.names:
            old = f"{node.module}.{alias.name}"
            self.aliases[alias.asname or alias.name] = old
            package, _, name = self.table.dots.get(old, old).rpartition(".")
            said = alias.asname
            if said is None and name != alias.name:
                if name in self.used:
                    said = alias.name
                else:
                    self.bound[alias.name] = name
            found.setdefault(package, []).append(name + (f" as {said}" if said else ""))
        indent = " " * node.col_offset
        lines = [f"from {package} import {', '.join(names)}" for package, names in found.items()]
        self.statements.append((node, f"\n{indent}".join(lines)))

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self.bound:
            self.edits[node.lineno, node.col_offset] = (node.id, self.bound[node.id])

    def _definition(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if (
            self.module in self.table.names
            and node.name in self.table.names[self.module]
            and (node.col_offset == 0 or node.name[0].isupper())
        ):
            at = find_word(self.text, node, node.name)
            self.edits[at] = (node.name, self.table.names[self.module][node.name])
        elif isinstance(node, ast.ClassDef):
            for one in node.body:
                for target in one.targets if isinstance(one, ast.Assign) else ():
                    if isinstance(target, ast.Name) and target.id in self.table.attributes:
                        self.edits[target.lineno, target.col_offset] = (
                            target.id,
                            self.table.attributes[target.id],
                        )
        elif node.col_offset and node.name in self.table.attributes:
            self.edits[find_word(self.text, node, node.name)] = (node.name, self.table.attributes[node.name])
        self.generic_visit(node)

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _definition

    def visit_Attribute(self, node: ast.Attribute) -> None:
        new = self.table.attributes.get(node.attr)
        chain = ast.unparse(node.value)
        if chain in self.aliases:
            new = self.table.names.get(self.aliases[chain], {}).get(node.attr, new)
        if new:
            end = len(node.attr.encode())
            self.edits[node.end_lineno, node.end_col_offset - end] = (node.attr, new)
        self.generic_visit(node)

    def result(self) -> str:
        text = edited(self.text, self.edits)
        lines = text.splitlines(keepends=True)
        for node, new in sorted(self.statements, key=lambda one: -one[0].lineno):
            last = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
            lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + new + last]
        text = "".join(lines)
        for old, new in self.bound.items():  # in prose: `Old`, `Old.method`
            text = re.sub(rf"`{old}(?=[`.(])", f"`{new}", text)
        return text


def test_of(path: str) -> str:
    """Return the test that mirrors a module."""
    folder, _, name = path.rpartition("/")
    return f"tests/{folder}/test_{name}"


def main(argv: list[str]) -> int:
    table = Table(Path(argv[0]).read_text(), argv[1:])
    files = git("ls-files").splitlines()
    texts = [
        f
        for f in files
        if f.endswith((".py", ".md", ".toml", ".cfg", ".ini", ".dot", ".txt", ".yml", ".j2", ".proto"))
        or "/" not in f
        or f.startswith(".ci/")
    ]
    texts = [
        f
        for f in texts
        if f not in {"CHANGELOG.md", ".ci/move.py", ".ci/moves.txt"}
        and not f.startswith("deeplink/v1/")
        and (ROOT / f).is_file()
        and not (ROOT / f).is_symlink()
    ]
    moved: dict[str, str] = {}
    for old, new in table.modules.items():
        assert old in files, f"no such module: {old}"
        moved[old] = new
        if test_of(old) in files:
            moved[test_of(old)] = test_of(new)
    for name in list(table.names):
        assert any(dotted(f) == name for f in files if f.endswith(".py")), f"no such module: {name}"
    for file in texts:  # packages that hand names on
        if file.endswith("/__init__.py"):
            for node in ast.walk(ast.parse((ROOT / file).read_text())):
                if isinstance(node, ast.ImportFrom) and node.module in table.names:
                    for alias in node.names:
                        if alias.asname in {None, alias.name} and alias.name in table.names[node.module]:
                            table.names[dotted(file)][alias.name] = table.names[node.module][alias.name]
    dots = {dotted(old): dotted(new) for old, new in moved.items() if old.endswith(".py")}
    dot_pattern = (
        re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, sorted(dots, key=len, reverse=True))) + r")(?!\w)")
        if dots
        else None
    )
    path_pattern = (
        re.compile(r"(?<![\w])(" + "|".join(map(re.escape, sorted(moved, key=len, reverse=True))) + r")(?!\w)")
        if moved
        else None
    )
    for file in texts:
        path = ROOT / file
        before = text = path.read_text()
        if file.endswith(".py"):
            table.dots = dots
            text = Renamer(text, dotted(file), table).result()
        if dot_pattern:
            text = dot_pattern.sub(lambda m: dots[m[1]], text)
        if path_pattern:
            text = path_pattern.sub(lambda m: moved[m[1]], text)
        if file.endswith(".md"):  # a bare name, where only one module had it
            for old, new in table.modules.items():
                name = old.rpartition("/")[2]
                if sum(f.endswith("/" + name) for f in files) == 1:
                    text = text.replace(f"`{name}`", f"`{new.rpartition('/')[2]}`")
        if text != before:
            path.write_text(text)
    for old, new in moved.items():
        (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
        git("mv", old, new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
