"""The folders that paths are served below, as a program's environment carries them. Imports next to nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOTS_VARIABLE = "DEEPLINK_PATH_ROOTS"
"""A line `NAME@VERSION=FOLDER` for each folder."""
MOST_TEXT = 64 << 10
"""Bytes of that variable; Linux takes 128 KiB in one."""
STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")  # noqa: PTH100, PTH118, PTH120 - pathlib costs each process 5 ms
"""On PYTHONPATH it makes a Python serve paths: it holds a `sitecustomize`."""


class PackedRoot(NamedTuple):
    """A folder that was packed."""

    folder: str  # absolute, as it was given to `deeplink pack`
    name: str  # of the dataset
    version: str


def environment(roots: Iterable[PackedRoot], env: Mapping[str, str]) -> dict[str, str]:
    """Return what is to be changed in an environment so that every Python below it serves paths."""
    text = "\n".join(f"{root.name}@{root.version}={root.folder}" for root in roots)
    path = [STARTUP, *(part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part not in {"", STARTUP})]
    return {ROOTS_VARIABLE: text, "PYTHONPATH": os.pathsep.join(path)}


def roots_in(env: Mapping[str, str]) -> list[PackedRoot]:
    """Return the folders that an environment names; what is no such line is left out."""
    found = []
    for line in env.get(ROOTS_VARIABLE, "").split("\n"):
        dataset, _, folder = line.partition("=")
        name, _, version = dataset.partition("@")
        if name and version and folder.startswith("/"):
            found.append(PackedRoot(folder, name, version))
    return found
