"""Who calls a watchdog in tests: this process's own user, for any job, and as a standing agent of any node."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import cast

from deeplink.core.clock import Clock
from deeplink.core.types import NodeName
from deeplink.scheduler.journal.journal import Journal
from deeplink.scheduler.watch.authorizer import Authorizer, Caller, TokenMint
from deeplink.scheduler.watch.observer import Observer

NEVER = 99_999_999_999.0
MINT = TokenMint("the secret of the watchdogs in tests")
ME = pwd.getpwuid(os.getuid()).pw_name
TOKEN = MINT.token(Caller(uid=os.getuid()), NEVER)
NOBODYS = MINT.token(Caller(uid=65534), NEVER)


@dataclass
class AnySite:
    """Every job is of one user, and of the nodes those are known that `knows` says."""

    user: str = ME
    knows: Callable[[NodeName], bool] = lambda _name: True

    is_silent: bool = False

    def owner(self, job: int) -> str:
        return self.user

    def asked_owner(self, job: int) -> str:
        raise AssertionError(f"job {job} is known")

    def nodes_at(self, hosts: Collection[str]) -> frozenset[NodeName] | None:
        return frozenset()


def authorizer(journal: Journal, clock: Clock, site: AnySite | None = None) -> Authorizer:
    return Authorizer(MINT, cast("Observer", site or AnySite()), journal, clock)
