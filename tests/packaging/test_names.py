"""A name means one thing in the whole product."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.house import ROOT, modules


def test_a_public_class_name_is_used_once() -> None:
    places = defaultdict(list)
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 1000
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
