"""One listing of a source for all parts of an array of jobs: the first task lists, the others read what it found.

It lies in the catalog with the parts, whole or not at all, until they are merged. Only one of the same user
counts, for its keys say what is read.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import zipfile
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from deeplink.cache.format.names import Names
from deeplink.cache.source.source import Listing
from deeplink.core.descriptors import opened, try_lock
from deeplink.core.publish import published_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deeplink.core.clock import Clock

log = logging.getLogger(__name__)

PREFIX = "listing-"
_LOOK_S = 1.0
_WAIT_S = 3600.0
"""Whoever waited so long for another task's listing lists the source itself."""
_OTHERS = 0o022
_COLUMNS = {"keys", "sizes", "marks"}


def shared_listing(folder: Path, key: str, list_source: Callable[[], Listing], clock: Clock) -> Listing:
    """Return the listing of this key in `folder`, made by `list_source` where no other process has made it.

    While another one makes it, this one waits. Where that ends without one, and where the storage has no locks,
    each lists for itself.
    """
    path = folder / f"{PREFIX}{key}.npz"
    with ExitStack() as held:
        is_first = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(opened(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW))
            is_first = try_lock(lock)
            if not is_first:
                _wait(lock, path, clock)
                held.close()
        except OSError as problem:
            log.info("the listing is not shared with other parts: %s", problem)
        if (found := _read(path)) is not None:
            return found
        began = clock.unix()
        listing = dataclasses.replace(list_source(), listed_unix=began)
        if is_first:
            _publish(path, listing)
        return listing


def _wait(lock: int, path: Path, clock: Clock) -> None:
    """Return once the listing is there, or nobody makes it, or too long has passed."""
    until = clock.monotonic() + _WAIT_S
    while not path.exists() and clock.monotonic() < until and not try_lock(lock):
        clock.sleep(_LOOK_S)


def _publish(path: Path, listing: Listing) -> None:
    facts = {name.name: getattr(listing, name.name) for name in dataclasses.fields(Listing)}
    columns = {name: facts.pop(name) for name in _COLUMNS}
    keys: Names = columns.pop("keys")
    columns |= {
        "text": np.frombuffer(keys.joined(), np.uint8),
        "offsets": keys.offsets - keys.offsets[0],
        "facts": np.frombuffer(json.dumps(facts).encode(), np.uint8),
    }
    try:
        with published_file(path, mode=0o600, durable=False) as draft, draft.open("wb") as file:
            np.savez(file, **columns)
    except OSError as problem:
        log.info("the listing is not shared with other parts: %s", problem)


def _read(path: Path) -> Listing | None:
    """Return the listing that a process of this user left; None where there is none, or not a whole one."""
    try:
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW) as descriptor:
            facts = os.fstat(descriptor)
            if facts.st_uid != os.geteuid() or facts.st_mode & _OTHERS:
                log.info("%s is another user's and not used", path)
                return None
            with os.fdopen(os.dup(descriptor), "rb") as file, np.load(file, allow_pickle=False) as found:
                keys = Names(memoryview(found["text"].data), found["offsets"])
                said = json.loads(found["facts"].tobytes())
                return Listing(keys=keys, sizes=found["sizes"], marks=found["marks"], **said)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as problem:
        log.warning("%s is not used: %s", path, problem)
        return None
