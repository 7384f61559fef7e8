"""Notices that a store was wiped between two runs: a site's epilog, job_container/tmpfs, a new disk, a reboot."""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deeplink.core.codec import from_row, to_json
from deeplink.core.private import private_folder
from deeplink.core.process_identity import ProcessIdentity, boot_id
from deeplink.core.publish import write_text

if TYPE_CHECKING:
    from pathlib import Path

    from deeplink.cache.store.store import Store
    from deeplink.core.clock import Clock
    from deeplink.core.types import NodeName

log = logging.getLogger(__name__)

_FILE = ".store.json"
_MARK, _MARK_KEPT_S = ".agent-", 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIdentity:
    """Tells one store from the next in the same place."""

    uuid: str
    made_unix: float
    boot: str  # the boot during which it was made
    device: int  # number of the file system it was made on


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreNote:
    """What the store of a node was when it was last looked at."""

    uuid: str  # of its identity
    shards: int
    bytes: int
    seen_unix: float
    boot: str  # the boot of the node then
    device: int  # number of the file system then


def identity_of(store: Store, clock: Clock) -> StoreIdentity:
    """Return the identity of a store, which gets one if it has none."""
    path = store.root / _FILE
    try:
        return from_row(StoreIdentity, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        pass
    except (ValueError, TypeError) as problem:
        log.warning("%s cannot be used and is made again: %s", path, problem)
    made = StoreIdentity(
        uuid=uuid.uuid4().hex, made_unix=clock.unix(), boot=boot_id(), device=store.root.stat().st_dev
    )
    write_text(path, to_json(made), mode=0o600)
    return made


def shared_with(store: Store, host: str) -> str:
    """Leave this machine's mark in a store, and return another machine that did so too; empty where none did.

    Marks of agents that are known to have ended do not count (this machine had another name then), nor those of
    machines that have said nothing for a day.
    """
    own = store.root / f"{_MARK}{host}"
    write_text(own, json.dumps(ProcessIdentity.own()), mode=0o600, durable=False)
    now = own.stat().st_mtime  # by the clock of the file system, which is that of the other marks
    for mark in sorted(store.root.glob(f"{_MARK}*")):
        with suppress(FileNotFoundError):  # its agent has ended
            if mark != own and now - mark.stat().st_mtime < _MARK_KEPT_S and not _has_ended(mark):
                return mark.name.removeprefix(_MARK)
    return ""


def _has_ended(mark: Path) -> bool:
    try:
        pid, started, namespace, boot = json.loads(mark.read_bytes())
        return ProcessIdentity(int(pid), int(started), str(namespace), str(boot) or "unknown").has_ended()
    except (ValueError, TypeError):  # of a release that did not say it
        return False


def unmark(store: Store, host: str) -> None:
    """Take this machine's mark away."""
    with suppress(OSError):  # its disk may be gone
        (store.root / f"{_MARK}{host}").unlink()


class StoreNotes:
    """The note of one node's store in the user's state folder."""

    def __init__(self, state: Path, node: NodeName, store: Store, clock: Clock) -> None:
        place = hashlib.sha256(str(store.root).encode()).hexdigest()[:12]
        self._path = state / "stores" / f"{node}-{place}.json"
        self._store, self._clock = store, clock

    def last(self) -> StoreNote | None:
        """Return the last note; None where there is none."""
        try:
            return from_row(StoreNote, json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as problem:
            log.warning("%s cannot be used: %s", self._path, problem)
            return None

    def note(self) -> None:
        """Note what the store is now."""
        held, identity = self._store.status(), identity_of(self._store, self._clock)
        said = StoreNote(
            uuid=identity.uuid,
            shards=held.shards,
            bytes=held.bytes,
            seen_unix=self._clock.unix(),
            boot=boot_id(),
            device=self._store.root.stat().st_dev,
        )
        private_folder(self._path.parent)
        write_text(self._path, to_json(said), mode=0o600)

    def wiped(self) -> str:
        """Say that the store was wiped since it was last noted, and what to do; empty if not."""
        before = self.last()
        identity = identity_of(self._store, self._clock)
        if before is None or not before.shards or identity.uuid == before.uuid or self._store.status().shards:
            return ""
        why = "an epilog, job_container/tmpfs or a clean-up emptied it"
        if before.device != self._store.root.stat().st_dev:
            why = "another file system is mounted there now (a job's private /tmp, or a new disk)"
        elif before.boot != boot_id():
            why = "the node was restarted since, which cleared it (is it on tmpfs?)"
        return (
            f"store {self._store.root} held {before.shards:,} shards ({before.bytes:,} bytes) and is empty now: "
            f"{why}. Let DEEPLINK_STORE name a folder on the local disk that outlives jobs; until then every job "
            "fills it again"
        )
