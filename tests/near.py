"""Run the quick tests that are nearest to what changed, for a minute: what `make check` does.

python tests/near.py [--list] [ARGUMENT OF PYTEST...]

What changed is what git says differs from the last commit; where nothing does, the last commit. A test file is as
near as the shortest way of imports from it to a changed module. Tests that the minute does not reach are counted.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST = 150
"""Test files: collecting all of them takes 20 s."""
SECONDS = 60
LIMIT_S = 30


def module_of(path: str) -> str:
    """Return the name that a file is imported by: `cache/reader.py` is `deeplink.cache.reader`."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"deeplink.{name}" if name.split(".")[0] in {"cache", "scheduler"} else name


def imports(text: str) -> set[str]:
    """Return the modules that a file may import, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def distances(changed: set[str], graph: dict[str, set[str]]) -> dict[str, int]:
    """Return how many imports each module is away from a changed one; those that reach none are left out."""
    importers: dict[str, set[str]] = {}
    for module, wanted in graph.items():
        for one in wanted & graph.keys():
            importers.setdefault(one, set()).add(module)
    away = dict.fromkeys(changed & graph.keys(), 0)
    line = deque(away)
    while line:
        module = line.popleft()
        for importer in importers.get(module, ()):
            if importer not in away:
                away[importer] = away[module] + 1
                line.append(importer)
    return away


def nearest(changed: set[str], graph: dict[str, set[str]], files: dict[str, str]) -> list[str]:
    """Return the test files that reach what changed, nearest first."""
    away = distances(changed, graph)
    tests = [name for name in away if files[name].rpartition("/")[2].startswith("test_")]
    return [files[name] for name in sorted(tests, key=lambda name: (away[name], name))][:MOST]


def _git(*words: str) -> list[str]:
    argv = ["git", *words]
    return subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, check=True, timeout=LIMIT_S
    ).stdout.splitlines()


def _changed() -> list[str]:
    now = _git("diff", "--name-only", "HEAD") + _git("ls-files", "--others", "--exclude-standard")
    return now or _git("diff", "--name-only", "HEAD~1", "HEAD")


def main(argv: list[str]) -> int:
    """Run pytest on what is near; 0 where nothing is."""
    files = {module_of(file): file for file in _git("ls-files", "-co", "--exclude-standard", "*.py")}
    there = {name: file for name, file in files.items() if (ROOT / file).is_file()}
    graph = {name: imports((ROOT / file).read_text(encoding="utf-8")) for name, file in there.items()}
    changed = _changed()
    chosen = nearest({module_of(file) for file in changed if file.endswith(".py")}, graph, there)
    if any(not file.endswith(".py") for file in changed):  # a page, a setting, the wire: what holds them
        chosen += sorted(file for file in there.values() if file.startswith("tests/packaging/test_"))
        chosen = list(dict.fromkeys(chosen))
    if "--list" in argv or not chosen:
        print("\n".join(chosen) or "no quick test reaches what changed")  # noqa: T201
        return 0
    marker = "not slow and not cluster"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-m", marker, f"--within={SECONDS}"]
    os.chdir(ROOT)
    code = subprocess.run([*command, *argv, *chosen], check=False).returncode
    return 0 if code == 5 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
