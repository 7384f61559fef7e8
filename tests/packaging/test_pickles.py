"""Nothing is read that runs what it says: not from other processes, not from files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("deeplink", "cache", "scheduler", "tests", "benchmarks", "examples", ".ci", "ansible")
DOORS = {"deeplink/core/plainpickle.py", "tests/pickled.py"}
MODULES = "_pickle|pickle|marshal|shelve|cloudpickle|dill|joblib|multiprocessing.managers"
# In programs within strings, too: ranks of tests are such.
IMPORT = re.compile(rf"^\s*(?:import|from)\s+(?:{MODULES})\b", re.MULTILINE)
CALL = re.compile(
    r"\b(?:all_gather|gather)_object\(|\b(?:scatter|broadcast|send|recv)_object_list\("
    r"|\bmultiprocessing\.connection import .*(?:Listener|Client)"
)
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not path.relative_to(ROOT).as_posix().startswith(("deeplink/cache/", "deeplink/scheduler/", "deeplink/v1/"))
)


def faults(source: str) -> list[str]:
    """Return what in a program would run what it reads."""
    found = [match.group().strip() for match in (*IMPORT.finditer(source), *CALL.finditer(source))]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ".load(" in node.value:
            try:
                found += faults(node.value)
            except SyntaxError:
                continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            whose, given = (
                ast.unparse(node.func.value),
                {word.arg: ast.unparse(word.value) for word in node.keywords},
            )
            if whose == "torch" and given.get("weights_only") != "True":
                found.append("torch.load")
            if whose in {"np", "numpy"} and given.get("allow_pickle", "False") != "False":
                found.append("numpy.load")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "from multiprocessing.connection import Connection, Client",
        "from multiprocessing.managers import BaseManager",
        "dist.all_gather_object(x, y)",
        "dist.broadcast_object_list(x, src=0)",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "np.load(x, allow_pickle=True)",
        'RANK = """\nimport dill\n"""',
        'RANK = """\nimport torch\ntorch.load(x)\n"""',
    ],
)
def test_each_way_is_found(source: str) -> None:
    assert faults(source)


def test_no_program_of_the_tree_reads_a_pickle_but_the_doors() -> None:
    assert len(FILES) > 500
    named = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in FILES}
    this = Path(__file__).relative_to(ROOT).as_posix()
    found = {name: faults(text) for name, text in named.items() if name not in DOORS | {this}}
    assert {name: what for name, what in found.items() if what} == {}
    assert all(faults(named[door]) for door in DOORS)
