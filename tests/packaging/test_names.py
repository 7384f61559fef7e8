"""A name means one thing in the whole product."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict

from tests.house import ROOT, modules


def test_a_public_class_name_is_used_once() -> None:
    places = defaultdict(list)
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 500
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


# Each package has its own, and every reader knows the kind; or the command of that name, and what it works on.
SHARED = {"__init__", "client", "errors", "server", "settings"} | {"index", "plan", "srun"}
SHARED |= {"sitecustomize"}  # which Python looks for


def test_a_module_name_means_one_thing() -> None:
    names = Counter(path.stem for path in modules())
    assert {name for name, count in names.items() if count > 1} == SHARED
